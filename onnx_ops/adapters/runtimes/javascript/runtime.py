"""ONNX Runtime for JavaScript, in Node or in a page of a headless browser.

In Node, ONNX Runtime runs natively or as WebAssembly.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from onnx_ops import codec
from onnx_ops.adapters.isolation.environments import NpmPackages, parse_pins
from onnx_ops.adapters.isolation.process import IsolatedProcess, ProcessLimits, RetainedProcess
from onnx_ops.adapters.runtimes.cold_start import collect_starts
from onnx_ops.adapters.runtimes.hardware import read_hardware
from onnx_ops.adapters.runtimes.ort_format import prepare_model_file, write_package
from onnx_ops.domain.execution import Environment, RuntimeFacts
from onnx_ops.domain.target import Diagnosis, HardwareFingerprint, Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.onnx_graph.files import list_external_names
from onnx_ops.ports import Runtime
from onnx_ops.ports.data import Array, Tensors
from onnx_ops.ports.runtime import (
    LoadSamples,
    LoadSchedule,
    PairedBenchmarkSamples,
    PairedBenchmarkSchedule,
    RunSamples,
    StartSamples,
    StartSchedule,
)
from onnx_ops.scratch import Scratch

if TYPE_CHECKING:
    from numpy.random import Generator

WORKER = Path(__file__).with_name("worker.mjs")

NATIVE = "onnxruntime-node@1.30.0"
WEB = "onnxruntime-web@1.30.0"
DRIVER = "playwright-core@1.65.1"

DEFAULT_TIMEOUT_S = 900.0
"""Maximum time of a call in seconds if `env.timeout` is not set."""


@dataclass(slots=True, kw_only=True)
class NodeRuntime(Runtime):
    """Runtime that measures models in a Node.js process.

    The first call starts the process, and later calls reuse it. A new process is started if the
    process has ended or the target changes.
    """

    kind: ClassVar[str] = "node"
    folder: Path | None = None
    """Folder of npm packages; a temporary folder by default."""

    _held: RetainedProcess = field(default_factory=RetainedProcess)
    _temporary: Scratch | None = None

    def with_environments(self, folder: Path) -> NodeRuntime:
        """Return the same runtime with its packages below `folder`."""
        return type(self)(folder=folder)

    def diagnose(self) -> Iterable[Diagnosis]:
        """Report whether the required programs are installed."""
        return diagnose_programs("runtimes node", (NODE, ("npm",)))

    def fingerprint(self, target: Target) -> HardwareFingerprint:
        """Return the hardware and runtime for which measurements on the target are valid."""
        name = self._library(target)
        return read_hardware(
            target.runtime,
            f"{parse_pins(self._requirements(target))[name]} ({name}, {self._engine()})",
        )

    def facts(self, model: Path, target: Target) -> RuntimeFacts:
        """Build a session; return its providers and how many nodes each of them runs."""
        document = self._ask("facts", target, model=_model(model))
        providers = [provider.name for provider in target.providers]
        return codec.from_json(
            {"runtime": target.runtime, "asked": providers, **document}, RuntimeFacts
        )

    def rewritten(self, model: Path, target: Target, copy: Path) -> None:
        """Write the optimized graph; onnxruntime-web raises MeasurementError instead."""
        self._ask("rewritten", target, model=_model(model), copy=str(copy.resolve()))

    def package(self, model: Path, target: Target, folder: Path) -> None:
        """Write what a device needs to run the model into a folder."""
        write_package(model, target, folder)

    def run(
        self, model: Path, target: Target, batches: tuple[Tensors, ...]
    ) -> tuple[Mapping[str, Array], ...]:
        """Run each batch and return its outputs by name."""
        with self._process(target).shared_folder() as folder:
            requests = [
                {
                    "feed": write_tensors(feed, folder / f"feed-{number}"),
                    "answer": str(folder / f"answer-{number}"),
                }
                for number, feed in enumerate(batches)
            ]
            answers = self._ask("run", target, model=_loaded(model, target), batches=requests)
            return tuple(read_tensors(answer) for answer in answers)

    def sample(
        self, model: Path, target: Target, feed: Tensors, *, runs: int, warmup: int
    ) -> RunSamples:
        """Time `runs` runs of one feed after `warmup` runs that are not timed."""
        import numpy as np

        answer = self._measure(
            "sample", target, feed, model=_loaded(model, target), runs=runs, warmup=warmup
        )
        return RunSamples(
            nanoseconds=np.array(answer["nanoseconds"], dtype=np.int64),
            preempted=np.array(answer["preempted"], dtype=bool),
        )

    def benchmark(
        self,
        models: Sequence[Path],
        target: Target,
        feed: Tensors,
        schedule: PairedBenchmarkSchedule,
    ) -> PairedBenchmarkSamples:
        """Time several models by the schedule, in random order in each block."""
        import numpy as np

        rounds = _orders(
            np.random.default_rng(schedule.seed), len(models), schedule.rounds, schedule.blocks
        )
        request = {"models": [_loaded(model, target) for model in models], "rounds": rounds}
        answer = self._measure(
            "benchmark", target, feed, **request, runs=schedule.runs, warmup=schedule.warmup
        )
        shape = (schedule.rounds, schedule.blocks, len(models), schedule.runs)
        probe = (
            None
            if answer["probe"] is None
            else np.array(answer["probe"], dtype=np.int64).reshape(shape)
        )
        return PairedBenchmarkSamples(
            nanoseconds=np.array(answer["nanoseconds"], dtype=np.int64).reshape(shape),
            preempted=np.array(answer["preempted"], dtype=bool).reshape(shape),
            probe=probe,
            calls=answer["calls"],
        )

    def under_load(
        self, models: Sequence[Path], target: Target, feed: Tensors, schedule: LoadSchedule
    ) -> LoadSamples:
        """Time windows of concurrent requests to each model."""
        import numpy as np

        rounds = _orders(
            np.random.default_rng(schedule.seed), len(models), schedule.rounds, schedule.windows + 1
        )
        request = {"models": [_loaded(model, target) for model in models], "rounds": rounds}
        load = {"requests": schedule.requests, "concurrency": schedule.concurrency}
        answer = self._measure("under_load", target, feed, **request, **load)
        shape = (schedule.rounds, schedule.windows, len(models))
        nanoseconds = np.array(answer["nanoseconds"], dtype=np.int64).reshape(shape)
        return LoadSamples(nanoseconds=nanoseconds, requests=schedule.requests)

    def starts(
        self, models: Sequence[Path], target: Target, feed: Tensors, schedule: StartSchedule
    ) -> StartSamples:
        """Measure cold starts of each model in fresh processes."""

        def start(model: Path) -> tuple[int, int, int]:
            previous, self._held = self._held, RetainedProcess()
            try:
                request = {"model": _loaded(model, target), "requests": schedule.requests}
                answer = self._measure("start", target, feed, **request)
            finally:
                self._held.stop()
                self._held = previous
            return answer["load_ns"], answer["first_ns"], answer["peak_bytes"]

        return collect_starts(models, schedule, start)

    def _measure(self, do: str, target: Target, feed: Tensors, **arguments: object) -> Any:
        with self._process(target).shared_folder() as folder:
            return self._ask(do, target, feed=write_tensors(feed, folder / "feed"), **arguments)

    def _ask(self, do: str, target: Target, **arguments: object) -> Any:
        timeout = _limits(target).timeout
        return self._process(target).ask(
            do, timeout=timeout, target=replace(target, env=None), **arguments
        )

    def _process(self, target: Target) -> IsolatedProcess:
        return self._held.get(target.digest(), lambda: self._start(target))

    def _start(self, target: Target) -> IsolatedProcess:
        where = f"target {target.name}"
        if target.custom_ops:
            raise MeasurementError(
                "libraries of custom operators cannot be loaded from JavaScript",
                where=where,
                remedy="Remove `custom_ops` from the target.",
            )
        node, program = require_program(NODE, target.name), self._program(target)
        if self.folder is None:
            self._temporary = Scratch()
            self.folder = self._temporary.path
        packages = NpmPackages(folder=self.folder).installed(self._requirements(target))

        def command(scratch: Path, answers: int, memory: int) -> list[str]:
            worker = [
                str(WORKER.resolve()),
                self.kind,
                str(packages.resolve()),
                str(answers),
                program,
            ]
            return [node, "--expose-gc", "--no-warnings", *worker]

        return IsolatedProcess(command, _limits(target), where)

    def _requirements(self, target: Target) -> tuple[str, ...]:
        own = self._defaults(target)
        if target.env is None:
            return own
        if not target.env.isolated or target.env.python or target.env.memory:
            raise UserError(
                "the environment of a JavaScript runtime is always separate, and has neither "
                "Python nor a memory limit",
                where=f"target {target.name}: env",
                remedy="Leave out `isolated`, `python` and `memory`.",
            )
        requirements = target.env.requirements or own
        pins = parse_pins(requirements)
        if self._library(target) not in pins:
            missing = [f"{name}@{pin}" for name, pin in parse_pins(own).items() if name not in pins]
            raise UserError(
                f"the environment lacks {self._library(target)}",
                where=f"target {target.name}: env.requirements",
                remedy=f"Add each package with its version, such as {', '.join(missing)}.",
            )
        return requirements

    def _library(self, target: Target) -> str:
        return next(iter(parse_pins(self._defaults(target))))

    def _defaults(self, target: Target) -> tuple[str, ...]:
        """Return the default npm packages: ONNX Runtime first, then further packages."""
        return (WEB,) if target.providers[0].name == "wasm" else (NATIVE,)

    def _engine(self) -> str:
        return f"Node {read_program_version(NODE)}"

    def _program(self, target: Target) -> str:
        return ""


@dataclass(slots=True, kw_only=True)
class BrowserRuntime(NodeRuntime):
    """Runtime in a page of a headless Chromium, which Node starts and controls."""

    kind: ClassVar[str] = "browser"

    def diagnose(self) -> Iterable[Diagnosis]:
        """Report whether the required programs are installed."""
        return diagnose_programs("runtimes browser", (NODE, ("npm",), BROWSER))

    def _defaults(self, target: Target) -> tuple[str, ...]:
        return WEB, DRIVER

    def _engine(self) -> str:
        return f"Chromium {read_program_version(BROWSER)}"

    def _program(self, target: Target) -> str:
        return require_program(BROWSER, target.name)


def _orders(draw: Generator, models: int, rounds: int, blocks: int) -> list[dict[str, Any]]:
    """Return random orders of the models for every round.

    A round has one order for building the sessions, and one order for each block.
    """
    return [
        {
            "build": draw.permutation(models).tolist(),
            "blocks": [draw.permutation(models).tolist() for _ in range(blocks)],
        }
        for _ in range(rounds)
    ]


def _limits(target: Target) -> ProcessLimits:
    env = target.env or Environment()
    return ProcessLimits(timeout=env.timeout or DEFAULT_TIMEOUT_S)


def _loaded(model: Path, target: Target) -> dict[str, Any]:
    return _model(prepare_model_file(model, target))


def _model(path: Path) -> dict[str, Any]:
    """Return the paths of a model and its weight files.

    WebAssembly cannot open weight files, so the worker passes their bytes to ONNX Runtime. Files
    outside the model's folder are left out.
    """
    place = path.resolve()
    names: tuple[str, ...] = ()
    with contextlib.suppress(UserError):
        # From a damaged file, no names are read. The runtime reports the damage when it loads the
        # file.
        names = list_external_names(place)
    files = {name: (place.parent / name).resolve() for name in names}
    inside = {
        name: file
        for name, file in files.items()
        if file.is_relative_to(place.parent) and file.is_file()
    }
    return {
        "path": str(place),
        "external": [{"name": name, "path": str(file)} for name, file in inside.items()],
    }


NODE = ("node", "nodejs")
BROWSER = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

_REMEDIES = {
    "node": "Install Node.js 18 or newer (Debian, Ubuntu: `apt-get install nodejs npm`).",
    "npm": "Install npm (Debian, Ubuntu: `apt-get install npm`).",
    "chromium": "Install Chromium (Debian: `apt-get install chromium`).",
}


def find_program(names: Sequence[str]) -> str | None:
    """Return the path of the first of these programs on PATH; None if all are missing."""
    return next((place for name in names if (place := shutil.which(name))), None)


def require_program(names: Sequence[str], target: str) -> str:
    """Return the path of the first of these programs on PATH.

    Raises:
        MeasurementError: all of the programs are missing.
    """
    place = find_program(names)
    if place is None:
        raise MeasurementError(
            f"{names[0]} is not installed on this machine",
            where=f"target {target}",
            remedy=_REMEDIES[names[0]],
        )
    return place


def read_program_version(names: Sequence[str]) -> str:
    """Return the version that the program reports; `not installed` if it is missing."""
    place = find_program(names)
    return _read_version(place) if place else "not installed"


def diagnose_programs(check: str, needs: Sequence[Sequence[str]]) -> Iterator[Diagnosis]:
    """Report which programs are installed; a missing program is not a fault.

    `check` names the diagnosis. `needs` lists the possible names of each program.
    """
    missing = [names[0] for names in needs if find_program(names) is None]
    if missing:
        remedy = " ".join(_REMEDIES[name] for name in missing)
        yield Diagnosis(
            check=check,
            ok=True,
            absent=True,
            found=f"not installed: {', '.join(missing)}",
            remedy=remedy,
        )
    else:
        yield Diagnosis(
            check=check,
            ok=True,
            found=", ".join(f"{names[0]} {read_program_version(names)}" for names in needs),
        )


@functools.cache
def _read_version(place: str) -> str:
    try:
        done = subprocess.run(
            [place, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "does not report its version"
    words = [word.removeprefix("v") for word in done.stdout.split()]
    return next((word for word in words if word[:1].isdecimal()), "unknown")


_TYPES = {
    "bool": "bool",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "int8": "i1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "uint8": "u1",
}
"""NumPy dtypes with little-endian layout, by the names of types in JavaScript."""


def write_tensors(tensors: Tensors, stem: Path) -> list[dict[str, Any]]:
    """Write tensors to files `stem-<number>` and describe them for a worker.

    Raises:
        MeasurementError: JavaScript does not support the type of a tensor.
    """
    entries = []
    for number, (name, array) in enumerate(tensors.items()):
        file = stem.with_name(f"{stem.name}-{number}")
        kind = "string" if array.dtype.kind in "OUS" else array.dtype.name
        if kind == "string":
            texts = [
                v.decode(errors="replace") if isinstance(v, bytes) else str(v)
                for v in array.ravel().tolist()
            ]
            file.write_text(json.dumps(texts), encoding="utf-8")
        elif kind in _TYPES:
            file.write_bytes(array.astype(_TYPES[kind]).tobytes())
        else:
            raise MeasurementError(
                f"input {name} is of type {kind}, which JavaScript's tensors do not support"
            )
        entries.append({"name": name, "type": kind, "dims": list(array.shape), "file": str(file)})
    return entries


def read_tensors(entries: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """Read the tensors that a worker wrote."""
    import numpy as np

    tensors: dict[str, Any] = {}
    for entry in entries:
        data, dims = Path(entry["file"]).read_bytes(), tuple(entry["dims"])
        if entry["type"] == "string":
            tensors[entry["name"]] = np.array(json.loads(data), dtype=object).reshape(dims)
        else:
            values = np.frombuffer(data, dtype=_TYPES[entry["type"]])
            tensors[entry["name"]] = values.astype(values.dtype.newbyteorder("=")).reshape(dims)
    return tensors
