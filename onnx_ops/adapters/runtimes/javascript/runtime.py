"""ONNX Runtime for JavaScript: in Node, natively or as WebAssembly, and in a page of a headless browser."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from onnx_ops import codec
from onnx_ops.adapters.isolation.interpreter import Command
from onnx_ops.adapters.isolation.npm import NpmPackages, pinned
from onnx_ops.adapters.isolation.process import Limits, Process
from onnx_ops.adapters.runtimes.hardware import fingerprint
from onnx_ops.adapters.runtimes.held import Held
from onnx_ops.adapters.runtimes.javascript.programs import BROWSER, NODE, diagnosed, needed, version_of
from onnx_ops.adapters.runtimes.javascript.tensors import get_tensors, put_tensors
from onnx_ops.adapters.runtimes.ort_format import loaded_file, write_package
from onnx_ops.domain.evidence import RuntimeFacts
from onnx_ops.domain.execution import Environment
from onnx_ops.domain.target import Diagnosis, HardwareFingerprint, Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.onnx_graph.files import external_names
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

PATIENCE_S = 900.0
"""Seconds for an answer where `env.timeout` says nothing."""


@dataclass(slots=True, kw_only=True)
class NodeRuntime:
    """Fulfils `RewritingRuntime`, `PackagingRuntime` and `HousedRuntime` of the ports.

    The process stays from one call to the next, and is replaced when it has ended or another target is asked for.
    """

    kind: ClassVar[str] = "node"
    tools: ClassVar[tuple[str, ...]] = ()

    folder: Path | None = None
    """Of packages; a temporary one where none was given."""

    _held: Held = field(default_factory=Held)
    _temporary: Scratch | None = None

    def housed(self, folder: Path) -> NodeRuntime:
        return type(self)(folder=folder)

    def diagnose(self) -> Iterable[Diagnosis]:
        return diagnosed("runtimes node", (NODE, ("npm",)))

    def fingerprint(self, target: Target) -> HardwareFingerprint:
        name = self._library(target)
        return fingerprint(target.runtime, f"{pinned(self._requirements(target))[name]} ({name}, {self._engine()})")

    def facts(self, model: Path, target: Target) -> RuntimeFacts:
        document = self._ask("facts", target, model=_model(model))
        asked = [provider.name for provider in target.providers]
        return codec.from_json({"runtime": target.runtime, "asked": asked, **document}, RuntimeFacts)

    def rewritten(self, model: Path, target: Target, copy: Path) -> None:
        self._ask("rewritten", target, model=_model(model), copy=str(copy.resolve()))

    def package(self, model: Path, target: Target, folder: Path) -> None:
        write_package(model, target, folder)

    def run(self, model: Path, target: Target, batches: tuple[Tensors, ...]) -> tuple[Mapping[str, Array], ...]:
        with self._scratch(target) as folder:
            asked = [
                {"feed": put_tensors(feed, folder / f"feed-{number}"), "answer": str(folder / f"answer-{number}")}
                for number, feed in enumerate(batches)
            ]
            answers = self._ask("run", target, model=_loaded(model, target), batches=asked)
            return tuple(get_tensors(answer) for answer in answers)

    def sample(self, model: Path, target: Target, feed: Tensors, *, runs: int, warmup: int) -> RunSamples:
        import numpy as np

        found = self._measure("sample", target, feed, model=_loaded(model, target), runs=runs, warmup=warmup)
        return RunSamples(
            nanoseconds=np.array(found["nanoseconds"], dtype=np.int64),
            preempted=np.array(found["preempted"], dtype=bool),
        )

    def race(
        self, models: Sequence[Path], target: Target, feed: Tensors, schedule: PairedBenchmarkSchedule
    ) -> PairedBenchmarkSamples:
        import numpy as np

        heats = _orders(np.random.default_rng(schedule.seed), len(models), schedule.heats, schedule.blocks)
        asked = {"models": _models(models, target), "heats": heats, "runs": schedule.runs, "warmup": schedule.warmup}
        found = self._measure("race", target, feed, **asked)
        shape = (schedule.heats, schedule.blocks, len(models), schedule.runs)
        probe = None if found["probe"] is None else np.array(found["probe"], dtype=np.int64).reshape(shape)
        return PairedBenchmarkSamples(
            nanoseconds=np.array(found["nanoseconds"], dtype=np.int64).reshape(shape),
            preempted=np.array(found["preempted"], dtype=bool).reshape(shape),
            probe=probe,
            calls=found["calls"],
        )

    def under_load(self, models: Sequence[Path], target: Target, feed: Tensors, schedule: LoadSchedule) -> LoadSamples:
        import numpy as np

        heats = _orders(np.random.default_rng(schedule.seed), len(models), schedule.heats, schedule.windows + 1)
        asked = {"models": _models(models, target), "heats": heats, "requests": schedule.requests}
        found = self._measure("under_load", target, feed, **asked, concurrency=schedule.concurrency)
        shape = (schedule.heats, schedule.windows, len(models))
        nanoseconds = np.array(found["nanoseconds"], dtype=np.int64).reshape(shape)
        return LoadSamples(nanoseconds=nanoseconds, requests=schedule.requests)

    def starts(self, models: Sequence[Path], target: Target, feed: Tensors, schedule: StartSchedule) -> StartSamples:
        import numpy as np

        order = np.random.default_rng(schedule.seed)
        figures = np.zeros((3, schedule.heats, len(models)), dtype=np.int64)
        for heat in range(schedule.heats):
            for turn in order.permutation(len(models)):
                found = self._start(models[turn], target, feed, schedule.requests)
                figures[:, heat, turn] = found["load_ns"], found["first_ns"], found["peak_bytes"]
        return StartSamples(load_ns=figures[0], first_ns=figures[1], peak_bytes=figures[2])

    def _start(self, model: Path, target: Target, feed: Tensors, requests: int) -> Any:
        """Asked of a process of its own."""
        kept, self._held = self._held, Held()
        try:
            return self._measure("start", target, feed, model=_loaded(model, target), requests=requests)
        finally:
            self._held.stop()
            self._held = kept

    def _measure(self, do: str, target: Target, feed: Tensors, **arguments: object) -> Any:
        with self._scratch(target) as folder:
            return self._ask(do, target, feed=put_tensors(feed, folder / "feed"), **arguments)

    def _ask(self, do: str, target: Target, **arguments: object) -> Any:
        there = codec.to_json(replace(target, env=None))
        return self._process(target).ask(do, timeout=_limits(target).timeout, target=there, **arguments)

    @contextmanager
    def _scratch(self, target: Target) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self._process(target).folder) as folder:
            yield Path(folder)

    def _process(self, target: Target) -> Process:
        return self._held.get(target.digest(), lambda: self._started(target))

    def _started(self, target: Target) -> Process:
        if target.custom_ops:
            raise MeasurementError(
                "libraries of custom operators cannot be loaded from JavaScript", where=f"target {target.name}"
            )
        return Process(self._command(target), _limits(target), f"target {target.name}")

    def _command(self, target: Target) -> Command:
        node, program = needed(NODE, target.name), self._program(target)
        packages = NpmPackages(folder=self._packages_folder()).installed(self._requirements(target))

        def command(scratch: Path, answers: int, memory: int) -> list[str]:
            del scratch, memory
            worker = [str(WORKER.resolve()), self.kind, str(packages.resolve()), str(answers), program]
            return [node, "--expose-gc", "--no-warnings", *worker]

        return command

    def _packages_folder(self) -> Path:
        if self.folder is not None:
            return self.folder
        if self._temporary is None:
            self._temporary = Scratch()
        return self._temporary.path

    def _requirements(self, target: Target) -> tuple[str, ...]:
        own = self._defaults(target)
        if target.env is None:
            return own
        if not target.env.isolated or target.env.python or target.env.memory:
            raise UserError(
                "packages of JavaScript have a folder of their own, need no Python, and keep no limit of memory",
                where=f"target {target.name}: env",
                remedy="Leave out `isolated`, `python` and `memory`.",
            )
        requirements = target.env.requirements or own
        if self._library(target) not in pinned(requirements):
            raise UserError(
                f"its environment lacks {self._library(target)}",
                where=f"target {target.name}: env.requirements",
                remedy=f"Name its version, such as `{own[0]}`.",
            )
        return requirements

    def _library(self, target: Target) -> str:
        return next(iter(pinned(self._defaults(target))))

    def _defaults(self, target: Target) -> tuple[str, ...]:
        """The library first."""
        return (WEB,) if target.providers[0].name == "wasm" else (NATIVE,)

    def _engine(self) -> str:
        return f"Node {version_of(NODE)}"

    def _program(self, target: Target) -> str:
        del target
        return ""


@dataclass(slots=True, kw_only=True)
class BrowserRuntime(NodeRuntime):
    """The same in a page of a headless Chromium, which Node starts and asks."""

    kind: ClassVar[str] = "browser"

    def diagnose(self) -> Iterable[Diagnosis]:
        return diagnosed("runtimes browser", (NODE, ("npm",), BROWSER))

    def _defaults(self, target: Target) -> tuple[str, ...]:
        del target
        return WEB, DRIVER

    def _engine(self) -> str:
        return f"Chromium {version_of(BROWSER)}"

    def _program(self, target: Target) -> str:
        return needed(BROWSER, target.name)


def _orders(draw: Generator, models: int, heats: int, blocks: int) -> list[dict[str, Any]]:
    """In which order sessions are built, and models run in each block, for every heat."""
    return [
        {
            "build": draw.permutation(models).tolist(),
            "blocks": [draw.permutation(models).tolist() for _ in range(blocks)],
        }
        for _ in range(heats)
    ]


def _limits(target: Target) -> Limits:
    env = target.env or Environment()
    return Limits(timeout=env.timeout or PATIENCE_S)


def _models(models: Sequence[Path], target: Target) -> list[dict[str, Any]]:
    return [_loaded(model, target) for model in models]


def _loaded(model: Path, target: Target) -> dict[str, Any]:
    return _model(loaded_file(model, target))


def _model(path: Path) -> dict[str, Any]:
    """A model and the files of its weights, which WebAssembly must be given; none outside the model's folder."""
    place = path.resolve()
    names: tuple[str, ...] = ()
    with contextlib.suppress(UserError):  # `.ort`, or a broken file, of which the runtime tells
        names = external_names(place)
    files = {name: (place.parent / name).resolve() for name in names}
    inside = {name: file for name, file in files.items() if file.is_relative_to(place.parent) and file.is_file()}
    return {"path": str(place), "external": [{"name": name, "path": str(file)} for name, file in inside.items()]}
