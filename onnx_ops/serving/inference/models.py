"""Models in memory: sessions, the cache of packed models, loading and warm-up."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from onnx_ops import codec
from onnx_ops.domain.artifact import (
    MODEL_FILE,
    Digest,
    TensorSpec,
    digest_file,
    digest_json,
    hex_digits,
)
from onnx_ops.domain.encoded_inputs import ENCODED_PROPERTY, parse_encoded_inputs
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.evidence import NAN_PROPERTY
from onnx_ops.domain.execution import CPU, Execution, Provider, SessionSettings
from onnx_ops.errors import InfrastructureError, NotFoundError, UserError, quoted
from onnx_ops.file_locks import hold_lock
from onnx_ops.plugins import require
from onnx_ops.ports.data import Array, Tensors
from onnx_ops.protocol import images
from onnx_ops.protocol.images import ImageLimits
from onnx_ops.scratch import sync_path
from onnx_ops.serving.inference.bound_runs import BoundRun
from onnx_ops.serving.inference.image_tensors import IMAGE_DTYPE
from onnx_ops.serving.inference.integrity import ModelCopies
from onnx_ops.serving.inference.responses import InputsRejectedError, RunTimeoutError
from onnx_ops.serving.inference.signature import InferenceRequest, ModelSignature
from onnx_ops.serving.inference.tensors import DTYPE_OF_ONNX, get_numpy_dtype

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

_IMAGE_DECODER = "DecodeImage"
"""Operator of onnxruntime-extensions whose name is in the errors of its runs."""

_UNKNOWN_CATEGORY = "Unknown Category"
"""Part of the message of a `Fail` error that only inputs cause.

The operator OneHotEncoder raises this error for an unknown category if its attribute `zeros` is 0.
scikit-learn's `handle_unknown="error"` is exported in this way.
"""

BOUND_ERRORS = (RuntimeError, *RUNTIME_ERRORS)
"""Errors of bound runs; the runtime converts only some to its own types."""

_LEVELS = {
    "disabled": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}

_PACKED_MODEL = "model.onnx"
_PACKED_WEIGHTS = "weights.bin"
_ENTRY = "entry.json"
_ENTRY_FORMAT = 2
_MIN_WEIGHT_BYTES = 1024
_MIN_ALIGNED_BYTES = (1 << 20) + 1
"""Size in bytes of a weight from which the runtime aligns it in the file.

See github.com/microsoft/onnxruntime/pull/23069. The runtime writes the packed form of smaller
weights directly after the previous weight. Its kernels crash unless the packed form starts at a
multiple of `_ALIGNMENT`.
"""
_ALIGNMENT = 64
_PACKED_PLACE = re.compile(rb"\|(\d+);\d+;")
"""Pattern of the position of packed weights in their file.

The runtime writes the position into the model as `KEY|OFFSET;LENGTH;FLAGS`.
"""
_MAX_ENTRIES = 8
_LOOP_OPERATORS = (b'"\x04Loop', b'"\x04Scan')
"""Encoded types of loop nodes in a model file: field 4, the length, and the name.

The bodies of loops allocate memory in every iteration. If two threads run such a model at the same
time, they mostly wait for the lock of the session's arena. Runs of 380 µs then took 800 µs.
"""
_UNBOUNDED_OPERATORS = (
    *_LOOP_OPERATORS,
    b'"\x0bSequenceMap',
    b'"\nBeamSearch',
    b'"\x11WhisperBeamSearch',
    b'"\x0cGreedySearch',
    b'"\x08Sampling',
)
"""Encoded types of operators whose inputs determine how often a subgraph runs.

ONNX Runtime expands SequenceMap to a Loop. The search operators of its contrib domain run their
decoder subgraph once for each generated token.
"""
_PADDING_OPERATORS = (b"Tokenizer", b'"\x0bStringSplit')
"""Parts of the encoded types of operators that split texts into words.

The operators pad the words of every text to the number of words of the longest. The first name also
matches the tokenizers of onnxruntime-extensions, whose names end with it.
"""
_SEARCHED_BYTES = 1 << 20
_WARM_UP_RUNS = 3
_SEED = 20_240_229
_BFLOAT16 = 16
"""Number of the element type in ONNX (TensorProto.BFLOAT16)."""


def open_session(
    path: Path,
    execution: Execution | None = None,
    *,
    libraries: Sequence[Path] = (),
    optimize: bool = True,
    cache: Path | None = None,
    **entries: str,
) -> Any:
    """Open a session that runs a model as its target specifies.

    The model is loaded by path, because loading from bytes would block the interpreter.

    Args:
        libraries: libraries of custom operators. They must be verified, because loading a library
            runs its code.
        optimize: whether to optimize the graph; not needed for a file with an optimized graph.
        cache: value of `{cache}` in options of providers.
        entries: further configuration of the session. `optimized_model_filepath` is the path to
            which the optimized model is written.

    Raises:
        InfrastructureError: an execution provider is missing, or fails to start.
        Exception: one of `RUNTIME_ERRORS`, if the runtime cannot load the model.
    """
    execution = execution or Execution()
    wanted = [provider.name for provider in execution.providers]
    if missing := [name for name in wanted if name not in ort.get_available_providers()]:
        raise _build_provider_error(
            missing[0], f"this build of ONNX Runtime has no {', '.join(missing)}"
        )
    if wanted != [CPU]:
        from onnx_ops.plugins import load_cuda

        load_cuda(ort, wanted)
    options = _build_options(path, execution.session, optimize=optimize)
    options.optimized_model_filepath = entries.pop("optimized_model_filepath", "")
    for name, value in entries.items():
        options.add_session_config_entry(f"session.{name}", value)
    for library in libraries:
        options.register_custom_ops_library(str(library))
    values = _fill_cache(execution.providers, cache)
    session = ort.InferenceSession(
        str(path), options, providers=wanted, provider_options=values, enable_fallback=0
    )
    if session.get_providers()[0] != wanted[0]:
        raise _build_provider_error(
            wanted[0], f"ONNX Runtime silently fell back to {session.get_providers()[0]}"
        )
    return session


def _build_options(path: Path, settings: SessionSettings, *, optimize: bool) -> Any:
    """Return the options of a session with the settings of its target."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = settings.intra_op_threads
    options.inter_op_num_threads = settings.inter_op_threads
    options.graph_optimization_level = _LEVELS[settings.graph_level if optimize else "disabled"]
    # The docstring of `_LOOP_OPERATORS` explains why such models use no arena.
    options.enable_cpu_mem_arena = not _has_operator(path, _LOOP_OPERATORS)
    options.log_severity_level = (
        # Level 4 logs only fatal errors. Other errors are raised as exceptions, and clients must
        # not be able to fill the log.
        4
    )
    for kind in ("intra_op", "inter_op"):
        options.add_session_config_entry(
            f"session.{kind}.allow_spinning", "1" if settings.spinning else "0"
        )
    for name, value in settings.config.items():
        options.add_session_config_entry(name, value)
    return options


def _fill_cache(providers: Sequence[Provider], cache: Path | None) -> list[dict[str, str]]:
    """Return the options of each provider with the path of the cache folder filled in.

    The folder is created if an option contains it.
    """
    if cache is not None and any(
        "{cache}" in value for each in providers for value in each.options.values()
    ):
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = str(cache or "")
    return [
        {name: value.replace("{cache}", folder) for name, value in each.options.items()}
        for each in providers
    ]


def _build_provider_error(provider: str, why: str) -> InfrastructureError:
    return InfrastructureError(
        f"the target of the model uses {provider}, which is not available here",
        why=why,
        remedy="Serve the model on a machine with that execution provider, or deploy a version "
        "that was measured on another target.",
    )


def _has_operator(path: Path, operators: Sequence[bytes]) -> bool:
    """Return whether the bytes of a model file contain one of these operators.

    All graphs and functions of the model are searched. A match can be accidental.
    """
    overlap, end = max(map(len, operators)), b""
    with path.open("rb") as file:
        # The file is searched in pieces. One search in 2 GB would block the interpreter for
        # seconds.
        while piece := file.read(_SEARCHED_BYTES):
            text = end + piece
            if any(operator in text for operator in operators):
                return True
            end = text[-overlap:]
    return False


def measure_folder(folder: Path) -> int:
    """Return the total size in bytes of all files below a folder."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


class PackedModelCache:
    """Optimized models with packed weights, mapped by all workers of a server.

    The key of an entry consists of the model's manifest, its execution settings and libraries, the
    processor's features, and the runtime's version. An entry is used only while its files have the
    digests that were recorded when it was made. It is made only if its model returns the same bits
    as the original on sample inputs.

    Only the server's user may write in the folder of the cache. A model has no entry if it is
    smaller than `min_bytes`, or runs on another provider than the CPU.
    """

    def __init__(self, folder: Path, min_bytes: int) -> None:
        self._folder = folder
        self._min_bytes = min_bytes

    def open_session(
        self, path: Path, deployment: Deployment, libraries: Sequence[Path] = ()
    ) -> Any:
        """Open a session of a model from its entry; make the entry if needed.

        See the function `open_session`.
        """
        execution = deployment.execution
        entry = self._folder / hex_digits(_compute_key(deployment, libraries))
        open_model = partial(
            open_session,
            execution=execution,
            libraries=libraries,
            cache=entry.with_suffix(".providers"),
        )
        is_on_cpu = [provider.name for provider in execution.providers] == [CPU]
        if not is_on_cpu or measure_folder(path.parent) < self._min_bytes:
            return open_model(path)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # One worker creates the entry, and the others wait until it is complete.
            with hold_lock(self._folder / f"{entry.name}.lock"):
                return self._open_entry(entry, open_model) or self._make_entry(
                    path, entry, open_model
                )
        except OSError as error:
            _log.warning("%s is loaded without the cache of packed models: %s", path, error)
            return open_model(path)

    def _open_entry(self, entry: Path, open_model: Callable[..., Any]) -> Any:
        """Return a session from an entry; None if the entry is missing or invalid."""
        try:
            recorded = json.loads((entry / _ENTRY).read_bytes())
            if recorded != _describe_entry(entry):
                raise ValueError("its files differ from those that were recorded")
            os.utime(entry)
            return open_model(entry / _PACKED_MODEL, optimize=False)
        except FileNotFoundError:
            return None
        except (ValueError, *RUNTIME_ERRORS) as error:
            _log.warning("the packed model in %s is rebuilt: %s", entry, error)
            return None

    def _make_entry(self, path: Path, entry: Path, open_model: Callable[..., Any]) -> Any:
        temporary = entry.with_name(f".tmp-{entry.name}")
        # An existing folder belongs to a process that was killed while it held the lock.
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(mode=0o700)
        try:
            original = _save_packed(path, temporary, open_model, _MIN_WEIGHT_BYTES)
            if not _is_aligned(temporary / _PACKED_MODEL):
                original = _save_packed(path, temporary, open_model, _MIN_ALIGNED_BYTES)
            if not _is_aligned(temporary / _PACKED_MODEL):
                _log.warning("%s is not cached packed: the runtime left weights unaligned", path)
                return original
            packed = open_model(temporary / _PACKED_MODEL, optimize=False)
            if not return_same_bits(original, packed):
                _log.warning(
                    "%s is not cached packed: sample inputs give other outputs or errors", path
                )
                return original
            (temporary / _ENTRY).write_text(
                json.dumps(_describe_entry(temporary)), encoding="utf-8"
            )
            for written in (*temporary.iterdir(), temporary):
                sync_path(written)
            shutil.rmtree(entry, ignore_errors=True)
            temporary.rename(entry)
            # The most recently used entries are kept. A process that has mapped the files of a
            # deleted entry can still read them.
            entries = [
                p for p in self._folder.iterdir() if p.is_dir() and not p.name.startswith(".tmp-")
            ]
            entries.sort(key=lambda p: p.stat().st_mtime_ns, reverse=True)
            for unused in entries[_MAX_ENTRIES:]:
                shutil.rmtree(unused, ignore_errors=True)
                unused.with_name(f"{unused.name}.lock").unlink(missing_ok=True)
            return open_model(entry / _PACKED_MODEL, optimize=False)
        except RUNTIME_ERRORS as error:
            _log.warning("%s cannot be cached packed: %s", path, get_first_line(error))
            return open_model(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _save_packed(path: Path, folder: Path, open_model: Callable[..., Any], least_bytes: int) -> Any:
    """Return a session of a model, which has written the model with packed weights.

    Weights of at least `least_bytes` are in a separate file.
    """
    return open_model(
        path,
        optimized_model_filepath=str(folder / _PACKED_MODEL),
        optimized_model_external_initializers_file_name=_PACKED_WEIGHTS,
        optimized_model_external_initializers_min_size_in_bytes=str(least_bytes),
        save_external_prepacked_constant_initializers="1",
    )


def _is_aligned(model: Path) -> bool:
    """Return whether all packed weights of a model are aligned.

    The kernels can use aligned weights directly in the mapped file.
    """
    return not any(int(place) % _ALIGNMENT for place in _PACKED_PLACE.findall(model.read_bytes()))


def return_same_bits(first: Any, second: Any) -> bool:
    """Return whether two sessions return the same bits for zeros and random numbers.

    The result is False if a session cannot run on these inputs.
    """
    encoded = _read_encoded_inputs(first)
    for draw in (None, np.random.default_rng(_SEED)):
        try:
            feed = {
                node.name: _read_image(images.SAMPLE_IMAGE)
                if node.name in encoded
                else _build_sample(_build_spec(node, Path()), draw)
                for node in first.get_inputs()
            }
            for a, b in zip(first.run(None, feed), second.run(None, feed), strict=True):
                if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
                    return False
        except (UserError, *RUNTIME_ERRORS):
            return False
    return True


def _build_sample(spec: TensorSpec, random: np.random.Generator | None = None) -> Array:
    """Return a sample input: zeros or random floats, empty strings, or sample images.

    Every free dimension has size 1.
    """
    shape = tuple(d if isinstance(d, int) else 1 for d in spec.shape)
    if spec.dtype == "string":
        return np.full(shape, "", dtype=object)
    if spec.dtype == IMAGE_DTYPE:
        return np.full(shape, images.SAMPLE_IMAGE, dtype=object)
    if random is not None and spec.dtype.startswith("float"):
        return random.standard_normal(shape).astype(spec.dtype)
    # Integers stay zero, because they can be indices, which must be within a range.
    return np.zeros(shape, get_numpy_dtype(spec.dtype))


def _read_image(content: bytes) -> Array:
    """Return an encoded image as the only row of a model's input, shape (1, bytes)."""
    return np.frombuffer(content, np.uint8)[np.newaxis]


def get_first_line(error: Exception) -> str:
    """Return the first line of an error of the runtime, quoted."""
    return quoted(str(error).strip().partition("\n")[0])


def _compute_key(deployment: Deployment, libraries: Sequence[Path]) -> Digest:
    """Return the key of an entry. The paths of libraries contain their digests."""
    operators = (
        {"custom_ops": [str(path.relative_to(path.parents[2])) for path in libraries]}
        if libraries
        else {}
    )
    return digest_json(
        {
            "manifest": deployment.manifest,
            "execution": codec.to_json(deployment.execution),
            "processor": _read_processor(),
            "runtime": ort.__version__,
            **operators,
        }
    )


def _read_processor() -> str:
    """Return the model and features of the processor."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as stream:
        return "".join(
            sorted(
                {line for line in stream if line.startswith(("flags", "Features", "model name"))}
            )
        )


def _describe_entry(folder: Path) -> dict[str, object]:
    names = [name for name in (_PACKED_MODEL, _PACKED_WEIGHTS) if (folder / name).exists()]
    return {"format": _ENTRY_FORMAT, "files": {name: digest_file(folder / name) for name in names}}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A loaded model. `run` is thread-safe.

    `native` is the runtime's function behind `session.run`. `session.run` also checks the inputs
    (in version 1.31: for WebGPU graphs, missing inputs, and the owners of values). The checks take
    a sixth of the time of a small model. `options` are the options of runs on the event loop.
    `seconds` is the time of a run on one row; 0 if unknown. `size_bytes` is the size of all files.
    `is_unbounded` states whether the inputs determine how often a part of the model runs, or
    are images.
    """

    deployment: Deployment
    signature: ModelSignature
    session: Any
    native: Callable[..., Any]
    size_bytes: int
    options: Any = field(default_factory=ort.RunOptions)
    seconds: float = 0.0
    is_unbounded: bool = False

    def run(self, outputs: Sequence[str], feed: Tensors, options: Any = None) -> Sequence[Array]:
        """Run the model, and return the named outputs.

        `options` are the options of a run on a thread (see `RunMonitor`).

        A model that decodes images runs one image at a time. So the memory for a request is that of
        its largest image, and a batch has no padding.

        Raises:
            InputsRejectedError: the model rejects the inputs.
            RunTimeoutError: the run was ended through its options.
            InfrastructureError: the run failed for another reason.
            UserError: an image cannot be decoded, or the shape of an output depends on the image.
        """
        options = options or self.options
        if not self.signature.images:
            return self._run_once(outputs, feed, options)
        count = len(feed[self.signature.images[0]])
        rows = [
            self._run_once(outputs, self._select_row(feed, row), options) for row in range(count)
        ]
        return [self._join_rows(name, arrays) for name, *arrays in zip(outputs, *rows, strict=True)]

    def _select_row(self, feed: Tensors, row: int) -> Tensors:
        """Return the model's inputs for one row of a feed."""
        readers = self.signature.readers
        return {
            name: _read_image(array[row])
            if name in self.signature.images
            else array[row : row + 1]
            if readers[name].has_free_rows
            else array
            for name, array in feed.items()
        }

    def _join_rows(self, name: str, arrays: Sequence[Array]) -> Array:
        if len(arrays) == 1:
            return arrays[0]
        if (
            any(array.ndim == 0 or len(array) != 1 for array in arrays)
            or len({array.shape for array in arrays}) != 1
        ):
            raise UserError(
                f"output {name!r} does not have one row of the same shape for each image",
                remedy="Send one image per request.",
            )
        return np.concatenate(arrays)

    def _run_once(self, outputs: Sequence[str], feed: Tensors, options: Any) -> Sequence[Array]:
        try:
            if self.signature.has_bfloat16:
                return self._run_bfloat16(outputs, feed, options)
            arrays: Sequence[Array] = self.native(outputs, feed, options)
        except RUNTIME_ERRORS as error:
            if options.terminate:
                raise RunTimeoutError(
                    "the run of the model was ended, as it took too long"
                ) from error
            if self.signature.images and _IMAGE_DECODER in str(error):
                raise UserError("the image cannot be decoded", why=get_first_line(error)) from error
            if isinstance(error, ort_errors.InvalidArgument) or _UNKNOWN_CATEGORY in str(error):
                raise InputsRejectedError(
                    "the model rejects these inputs", why=get_first_line(error)
                ) from error
            raise InfrastructureError(
                "the model failed on these inputs", why=get_first_line(error)
            ) from error
        return arrays

    def bind(self, request: InferenceRequest, arrays: Sequence[Array]) -> BoundRun | None:
        """Return a bound run for requests like this one; None if binding is impossible.

        `arrays` are the outputs of the request. The result is also None if the bound run returns
        other bits.
        """
        # In ONNX Runtime 1.31, `session.run_with_iobinding` first reads a WebGPU graph id from the
        # options, which takes about 70 µs. The run of a small model takes 3 µs. Therefore the
        # function that it calls next is called directly.
        native = getattr(getattr(self.session, "_sess", None), "run_with_iobinding", None)
        if native is None or self.session.get_providers() != [CPU]:
            return None
        binding = self.session.io_binding()
        feed = {name: array.copy() for name, array in request.feed.items()}
        outputs = [np.empty(array.shape, array.dtype) for array in arrays]
        for name, array in feed.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        for name, array in zip(request.outputs, outputs, strict=True):
            binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
        run = partial(native, binding._iobinding, self.options)  # noqa: SLF001 (as above)
        bound = BoundRun(
            run, replace(request, feed=feed), outputs, self.signature.readers[next(iter(feed))].code
        )
        try:
            run()
        except BOUND_ERRORS:
            return None
        same = all(
            own.tobytes() == array.tobytes() for own, array in zip(outputs, arrays, strict=True)
        )
        return bound if same else None

    def _run_bfloat16(self, outputs: Sequence[str], feed: Tensors, options: Any) -> list[Array]:
        """Run a model with bfloat16 tensors, whose bits numpy stores as uint16."""
        values = {
            name: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _BFLOAT16)
            if self.signature.inputs[name].dtype == "bfloat16"
            else ort.OrtValue.ortvalue_from_numpy(array)
            for name, array in feed.items()
        }
        arrays: list[Array] = []
        found = self.session.run_with_ort_values(list(outputs), values, options)
        for name, value in zip(outputs, found, strict=True):
            if self.signature.outputs[name].dtype == "bfloat16":
                shape = tuple(value.shape())
                size = int(np.prod(shape)) * 2
                # The bits are copied, because deleting `value` frees the memory.
                bits = ctypes.string_at(value.data_ptr(), size) if size else b""
                arrays.append(np.frombuffer(bits, np.uint16).reshape(shape))
            else:
                arrays.append(value.numpy())
        return arrays

    def warm_up(self) -> float:
        """Run the model on its smallest inputs; return the seconds of the last run.

        See `_build_least_feed`. If the model fails, and one of these inputs was guessed, the result
        is 0. An input is guessed if it has a free size besides the batch, or if it contains
        strings, images or one column of int64.

        Raises:
            InfrastructureError: the model fails, and no input was guessed.
        """
        feed = self._build_least_feed()
        started_at = 0.0
        try:
            for _ in range(_WARM_UP_RUNS):
                started_at = time.perf_counter()
                self.run(tuple(self.signature.outputs), feed)
        except (UserError, InfrastructureError) as error:
            # A column of integers often contains categories, and 0 is possibly not one of them.
            is_guess = any(
                any(isinstance(d, str) for d in spec.shape[1:])
                or spec.dtype in ("string", IMAGE_DTYPE)
                or (spec.dtype == "int64" and spec.shape[1:] == (1,))
                for spec in (self.signature.inputs[name] for name in feed)
            )
            if not is_guess:
                where = self.deployment.name
                raise InfrastructureError(
                    "the model failed on zeros in its warm-up", where=where, why=error.why
                ) from error
            _log.warning(
                "deployment %s is not warmed up: its model fails on sample inputs (zeros, empty "
                "texts or small images, with free dimensions of size 1)",
                self.deployment.name,
            )
            return 0.0
        return time.perf_counter() - started_at

    def _build_least_feed(self) -> Tensors:
        """Return zeros, empty strings or sample images; every free dimension has size 1."""
        return {
            name: _build_sample(self.signature.inputs[name]) for name in self.signature.required
        }

    def release_memory(self) -> None:
        """Return unused memory of the session's arena to the system.

        The arena returns memory only at the end of a run. Therefore the model runs once.
        """
        if self.session.get_session_options().enable_cpu_mem_arena:
            options = ort.RunOptions()
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
            with contextlib.suppress(UserError, InfrastructureError):
                self.run(tuple(self.signature.outputs), self._build_least_feed(), options)

    def run_random(self) -> None:
        """Run the model once on random numbers; the model can reject them."""
        random = np.random.default_rng(_SEED)
        feed = {
            name: _build_sample(self.signature.inputs[name], random)
            for name in self.signature.required
        }
        with contextlib.suppress(UserError, InfrastructureError):
            self.run(tuple(self.signature.outputs), feed)


def load_model(
    deployment: Deployment,
    copies: ModelCopies,
    cache: PackedModelCache | None = None,
    *,
    image_limits: ImageLimits | None = None,
) -> LoadedModel:
    """Return a model, loaded from the verified copy of its files and warmed up.

    `ModelCopies.fetch` makes the copy.

    Raises:
        OnnxOpsError: `ModelCopies.fetch` raised the error.
        NotFoundError: the files contain no model.
        UserError: the server does not support an input or output of the model, or the property of
            its encoded inputs is invalid.
        MissingPackageError: the model decodes images, and Pillow is not installed.
        InfrastructureError: the runtime cannot load or run the model.
    """
    folder = copies.fetch(deployment)
    path = folder / MODEL_FILE
    if not path.is_file():
        raise NotFoundError(
            f"the files of the version contain no {MODEL_FILE}", where=deployment.name
        )
    libraries = [folder / name for name in deployment.custom_ops]
    try:
        if cache is None:
            session = open_session(path, deployment.execution, libraries=libraries)
        else:
            session = cache.open_session(path, deployment, libraries)
    except RUNTIME_ERRORS as error:
        why = get_first_line(error)
        raise InfrastructureError(
            "the runtime cannot load the model", where=str(path), why=why
        ) from error
    native = getattr(getattr(session, "_sess", None), "run", session.run)
    signature = _build_signature(session, deployment, path, image_limits)
    model = LoadedModel(
        deployment=deployment,
        signature=signature,
        session=session,
        native=native,
        size_bytes=measure_folder(folder),
        # The content of an image, rather than its shape, decides how long its decoder runs.
        is_unbounded=bool(signature.images) or _has_operator(path, _UNBOUNDED_OPERATORS),
    )
    return replace(model, seconds=model.warm_up())


def _read_encoded_inputs(session: Any) -> frozenset[str]:
    """Return the names of the inputs that take encoded images.

    Raises:
        UserError: the model's property is invalid.
    """
    properties = session.get_modelmeta().custom_metadata_map
    return frozenset(parse_encoded_inputs(properties.get(ENCODED_PROPERTY, "")))


def _build_signature(
    session: Any, deployment: Deployment, path: Path, image_limits: ImageLimits | None = None
) -> ModelSignature:
    """Return the model's signature.

    Requests can omit inputs of ONNX's optional type, and inputs with a default of a single element.
    Larger defaults are weights of a model that was exported with its weights as inputs. Such inputs
    are hidden from clients.
    """
    nodes = session.get_inputs()
    defaults = [node for node in session.get_overridable_initializers() if set(node.shape) <= {1}]
    encoded = _read_encoded_inputs(session)
    if encoded:
        require(images.PACKAGE, where=str(path))
    inputs = {
        node.name: _build_image_spec(node, path)
        if node.name in encoded
        else _build_spec(node, path)
        for node in (*nodes, *defaults)
    }
    signature = ModelSignature(
        model=deployment.model,
        version=deployment.version,
        inputs=inputs,
        outputs={node.name: _build_spec(node, path) for node in session.get_outputs()},
        optional=frozenset(n.name for n in nodes if n.type.startswith("optional("))
        | {n.name for n in defaults},
        refuses_nan=session.get_modelmeta().custom_metadata_map.get(NAN_PROPERTY) == "refused",
        image_limits=image_limits,
        pads_texts=any(node.type == "tensor(string)" for node in nodes)
        and _has_operator(path, _PADDING_OPERATORS),
    )
    if signature.has_bfloat16 and signature.has_text_input:
        raise UserError(
            "the server does not support a model with both bfloat16 tensors and text inputs",
            where=str(path),
        )
    return signature


def _build_image_spec(node: Any, path: Path) -> TensorSpec:
    """Return the spec of an input that takes encoded images, as clients see it."""
    if node.type != "tensor(uint8)" or len(node.shape) != 2:
        raise UserError(
            f"{node.name} is a {node.type} of shape {node.shape}, which cannot contain encoded "
            "images",
            where=str(path),
            remedy="Give the input the type uint8 and the shape (rows, bytes).",
        )
    rows = node.shape[0]
    return TensorSpec(
        name=node.name, dtype=IMAGE_DTYPE, shape=(rows if isinstance(rows, str) else "?",)
    )


def _build_spec(node: Any, path: Path) -> TensorSpec:
    kind = (
        node.type.removeprefix("optional(")[:-1] if node.type.startswith("optional(") else node.type
    )
    dtype = DTYPE_OF_ONNX.get(kind)
    if dtype is None:
        raise UserError(
            f"{node.name} is a {node.type}, for which the Open Inference Protocol has no datatype",
            where=str(path),
            remedy="Export the model with tensors of other types (for scikit-learn classifiers: "
            "without ZipMap).",
        )
    shape = tuple(d if isinstance(d, int) else str(d or "?") for d in node.shape)
    return TensorSpec(name=node.name, dtype=dtype, shape=shape)
