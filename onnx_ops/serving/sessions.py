"""Sessions of the runtime, and a cache of models in the form that this processor likes best."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, Manifest, digest_file, digest_json, hex_digits
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.execution import CPU, Execution
from onnx_ops.errors import InfrastructureError, quoted
from onnx_ops.ports.data import Array

_log = logging.getLogger(__name__)

RUNTIME = f"onnxruntime {ort.__version__}"

RUNTIME_ERRORS = (
    ort_errors.EPFail,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)

_LEVELS = {
    "disabled": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}

_MODEL = "model.onnx"
_WEIGHTS = "weights.bin"
_ENTRY = "entry.json"
_SMALLEST_WEIGHT = 1024
_LOOPS = (b'"\x04Loop', b'"\x04Scan')
"""A node's type as it stands in a file: field 4, its length, its name."""
_SEED = 20_240_229
_FORMAT = 1
_MOST_ENTRIES = 8


def open_session(
    path: Path,
    execution: Execution | None = None,
    *,
    libraries: Sequence[Path] = (),
    optimise: bool = True,
    cache: Path | None = None,
    **entries: str,
) -> Any:
    """A session that runs a model as its target does.

    Args:
        path: the model. It is loaded by path, as the interpreter stands still while bytes are loaded.
        execution: providers and settings; by default one thread of the CPU that does not spin while it waits.
        libraries: of custom operators, which have been verified: loading one runs its code.
        optimise: whether the graph is optimised; not needed if it was before it was written.
        cache: what `{cache}` stands for in options of providers.
        entries: further configuration of the session; `optimized_model_filepath` is where the result is written.

    Raises:
        InfrastructureError: an execution provider is missing here, or does not start.
        one of RUNTIME_ERRORS: the runtime cannot load it.
    """
    execution = execution or Execution()
    settings = execution.session
    wanted = [provider.name for provider in execution.providers]
    if missing := set(wanted) - set(ort.get_available_providers()):
        raise _not_here(wanted, f"this build of ONNX Runtime has no {', '.join(sorted(missing))}")
    options = ort.SessionOptions()
    options.intra_op_num_threads = settings.intra_op_threads
    options.inter_op_num_threads = settings.inter_op_threads
    options.graph_optimization_level = _LEVELS[settings.graph_level if optimise else "disabled"]
    options.enable_cpu_mem_arena = not _repeats(path)
    options.log_severity_level = 4  # errors are raised anyway; clients must not be able to fill the log
    for kind in ("intra_op", "inter_op"):
        options.add_session_config_entry(f"session.{kind}.allow_spinning", "1" if settings.spinning else "0")
    options.optimized_model_filepath = entries.pop("optimized_model_filepath", "")
    for name, value in (*settings.config.items(), *((f"session.{name}", value) for name, value in entries.items())):
        options.add_session_config_entry(name, value)
    for library in libraries:
        options.register_custom_ops_library(str(library))
    if cache is not None and any("{cache}" in value for one in execution.providers for value in one.options.values()):
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    values = [
        {name: value.replace("{cache}", str(cache or "")) for name, value in provider.options.items()}
        for provider in execution.providers
    ]
    session = ort.InferenceSession(str(path), options, providers=wanted, provider_options=values, enable_fallback=0)
    if session.get_providers()[0] != wanted[0]:
        raise _not_here(wanted, f"ONNX Runtime fell back to {session.get_providers()[0]} in silence")
    return session


def _not_here(wanted: Sequence[str], why: str) -> InfrastructureError:
    return InfrastructureError(
        f"the model was measured on {wanted[0]}, which does not run here",
        why=why,
        remedy="Serve it where that execution provider is, or deploy what was measured on another target.",
    )


def _repeats(path: Path) -> bool:
    """Whether a model may have loops. Their bodies take memory at every pass, and two threads that run such a model at
    once spend most of their time on the lock of the session's arena: runs of 380 µs took 800."""
    if not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as model:
        return any(model.find(operator) >= 0 for operator in _LOOPS)


def size_of(folder: Path) -> int:
    """Bytes of the files of a model."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


class Prepacked:
    """Optimised models with packed weights, one folder each, that all workers of a machine map into their memory.

    An entry is kept by the model's manifest, the processor's abilities and the runtime's version. It is used only
    while its files have the digests that were recorded when it was made, and only if its model then answered with the
    same bits as the original.

    Args:
        folder: where entries stand; nobody but the server's user may write there.
        smallest: bytes of the smallest model that is worth an entry.
    """

    def __init__(self, folder: Path, smallest: int) -> None:
        self._folder = folder
        self._smallest = smallest

    def session(self, path: Path, deployment: Deployment, libraries: Sequence[Path] = ()) -> Any:
        """A session of the model at `path`, from its entry where there is a good one. Else one is made.

        Raises:
            InfrastructureError: an execution provider is missing here, or does not start.
            one of RUNTIME_ERRORS: the runtime cannot load the model.
        """
        execution = deployment.execution
        place = self._folder / hex_digits(_key(deployment, libraries))
        opened = partial(open_session, execution=execution, libraries=libraries, cache=place.with_suffix(".providers"))
        on_processor = [provider.name for provider in execution.providers] == [CPU]
        if not on_processor or size_of(path.parent) < self._smallest:
            return opened(path)
        try:
            with self._alone(place.name):
                return self._from(place, opened) or self._make(path, place, opened)
        except OSError as error:
            _log.warning("%s is loaded without the cache of packed models: %s", path, error)
            return opened(path)

    def _from(self, place: Path, opened: Callable[..., Any]) -> Any:
        """A session from an entry; None if there is none that can be trusted."""
        try:
            recorded = json.loads((place / _ENTRY).read_bytes())
            if recorded != {"format": _FORMAT, "files": dict(_files(place).files)}:
                raise ValueError("its files are not those that were recorded")
            os.utime(place)
            return opened(place / _MODEL, optimise=False)
        except FileNotFoundError:
            return None
        except (ValueError, *RUNTIME_ERRORS) as error:
            _log.warning("the packed model in %s is made again: %s", place, error)
            return None

    def _make(self, path: Path, place: Path, opened: Callable[..., Any]) -> Any:
        temporary = place.with_name(f".tmp-{place.name}")
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed while it held the lock
        temporary.mkdir(mode=0o700)
        try:
            original = opened(
                path,
                optimized_model_filepath=str(temporary / _MODEL),
                optimized_model_external_initializers_file_name=_WEIGHTS,
                optimized_model_external_initializers_min_size_in_bytes=str(_SMALLEST_WEIGHT),
                save_external_prepacked_constant_initializers="1",
            )
            packed = opened(temporary / _MODEL, optimise=False)
            if not same_answers(original, packed):
                _log.warning("%s is not kept packed: its answers would differ", path)
                return original
            entry = {"format": _FORMAT, "files": dict(_files(temporary).files)}
            (temporary / _ENTRY).write_text(json.dumps(entry), encoding="utf-8")
            _sync(temporary)
            shutil.rmtree(place, ignore_errors=True)
            temporary.rename(place)
            self._prune()
            return opened(place / _MODEL, optimise=False)
        except RUNTIME_ERRORS as error:
            _log.warning("%s cannot be kept packed: %s", path, first_line(error))
            return opened(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _prune(self) -> None:
        """Remove all entries but those that were used last. Who has one in memory keeps it."""
        entries = [path for path in self._folder.iterdir() if path.is_dir() and not path.name.startswith(".tmp-")]
        entries.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in entries[_MOST_ENTRIES:]:
            shutil.rmtree(path, ignore_errors=True)
            path.with_name(f"{path.name}.lock").unlink(missing_ok=True)

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """One worker makes an entry while the others wait for it."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self._folder / f"{name}.lock").open("a") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield


def same_answers(one: Any, other: Any) -> bool:
    """Whether two sessions give the same bits for zeros and for random numbers; False if they cannot be run."""
    random = np.random.default_rng(_SEED)
    for draw in (np.zeros, random.standard_normal):
        feed = {node.name: _sample(node, draw) for node in one.get_inputs()}
        try:
            pairs = zip(one.run(None, feed), other.run(None, feed), strict=True)
            if not all(_same_bits(a, b) for a, b in pairs):
                return False
        except RUNTIME_ERRORS:
            return False
    return True


def first_line(error: Exception) -> str:
    return quoted(str(error).strip().partition("\n")[0])


def _sample(node: Any, draw: Any) -> Array:
    shape = tuple(d if isinstance(d, int) else 1 for d in node.shape)
    kind = {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(float16)": "float16"}.get(node.type)
    if kind is not None:
        return np.asarray(draw(shape), kind)
    if node.type == "tensor(string)":
        return np.full(shape, "", dtype=object)
    return np.zeros(shape, node.type.removeprefix("tensor(").removesuffix(")"))  # indices, which must stay in range


def _same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and (a.tobytes() == b.tobytes())


def _key(deployment: Deployment, libraries: Sequence[Path]) -> Digest:
    """Constants may have been computed by kernels of the libraries, whose names tell their target and content."""
    operators = {"custom_ops": [str(path.relative_to(path.parents[2])) for path in libraries]} if libraries else {}
    return digest_json(
        {
            "manifest": deployment.manifest,
            "execution": codec.to_json(deployment.execution),
            "processor": _processor(),
            "runtime": ort.__version__,
            **operators,
        }
    )


def _processor() -> str:
    """What the processor can do, as the system tells it."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as stream:
        lines = [line for line in stream if line.startswith(("flags", "Features", "model name"))]
    return "".join(sorted(set(lines)))


def _files(folder: Path) -> Manifest:
    return Manifest(files={name: digest_file(folder / name) for name in (_MODEL, _WEIGHTS) if (folder / name).exists()})


def _sync(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
