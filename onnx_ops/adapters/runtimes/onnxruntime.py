"""ONNX Runtime in this process, with any execution provider that its build has."""

from __future__ import annotations

import gc
import importlib
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onnx_ops.adapters.runtimes.hardware import fingerprint, lacking_flags
from onnx_ops.domain.evidence import RuntimeFacts
from onnx_ops.domain.target import HardwareFingerprint, SessionSettings, Target
from onnx_ops.errors import MeasurementFailure
from onnx_ops.ports.models import Array, PairSamples, PairSchedule, RunSamples, Tensors

DISTRIBUTION = "onnxruntime"

Timed = Callable[[], tuple[int, bool]]
"""One run: nanoseconds, and whether the thread lost its core meanwhile."""

_LEVELS = {
    "disabled": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
_QUIET = 4
"""Fatal messages only: an error is raised too, and told once; a warning would be taken for one of onnx-ops."""


class OnnxRuntime:
    """Fulfils `ports.Runtime`. Every call builds the sessions it needs and lets go of them."""

    def fingerprint(self, target: Target) -> HardwareFingerprint:
        return fingerprint(target.runtime, DISTRIBUTION)

    def facts(self, model: Path, target: Target) -> RuntimeFacts:
        ort = importlib.import_module("onnxruntime")
        session = _session(model, target, record_assignment=True)
        nodes: Counter[str] = Counter()
        for part in session.get_provider_graph_assignment_info():
            nodes[part.ep_name] += len(part.get_nodes())
        return RuntimeFacts(
            runtime=target.runtime,
            version=ort.__version__,
            asked=tuple(provider.name for provider in target.providers),
            used=tuple(session.get_providers()),
            nodes=dict(sorted(nodes.items())),
            build=ort.get_build_info(),
        )

    def run(self, model: Path, target: Target, batches: tuple[Tensors, ...]) -> tuple[Mapping[str, Array], ...]:
        session = _session(model, target)
        names = [output.name for output in session.get_outputs()]
        answers = []
        for feed in batches:
            with _failures(model):
                answers.append(dict(zip(names, session.run(names, dict(feed)), strict=True)))
        return tuple(answers)

    def sample(self, model: Path, target: Target, feed: Tensors, *, runs: int, warmup: int) -> RunSamples:
        import numpy as np

        timed = _timed(_session(model, target), feed)
        with _failures(model), _undisturbed():
            for _ in range(warmup):
                timed()
            samples = [timed() for _ in range(runs)]
        return RunSamples(
            nanoseconds=np.array([ns for ns, _ in samples], dtype=np.int64),
            preempted=np.array([lost for _, lost in samples], dtype=bool),
        )

    def pair(
        self, baseline: Path, candidate: Path, target: Target, feed: Tensors, schedule: PairSchedule
    ) -> PairSamples:
        import numpy as np

        order = np.random.default_rng(schedule.seed)
        shape = (schedule.pairs, schedule.blocks, 2, schedule.runs)
        nanoseconds = np.zeros(shape, dtype=np.int64)
        preempted = np.zeros(shape, dtype=bool)
        models = (baseline, candidate)
        with _undisturbed():
            for pair in range(schedule.pairs):
                sides = _fresh_pair(models, target, feed, bool(order.integers(2)), schedule.warmup)
                for block in range(schedule.blocks):
                    first = int(order.integers(2))
                    for side in (first, 1 - first):
                        with _failures(models[side]):
                            samples = [sides[side]() for _ in range(schedule.runs)]
                        nanoseconds[pair, block, side] = [ns for ns, _ in samples]
                        preempted[pair, block, side] = [lost for _, lost in samples]
        return PairSamples(nanoseconds=nanoseconds, preempted=preempted)


def available_providers() -> tuple[str, ...]:
    """Execution providers of the installed build."""
    return tuple(importlib.import_module("onnxruntime").get_available_providers())


def _fresh_pair(
    models: tuple[Path, Path], target: Target, feed: Tensors, swap: bool, warmup: int
) -> tuple[Timed, Timed]:
    """Both sessions, built and warmed up in the given order: memory layout is part of a session's latency."""
    built: dict[int, Timed] = {}
    for side in (1, 0) if swap else (0, 1):
        built[side] = _timed(_session(models[side], target), feed)
        with _failures(models[side]):
            for _ in range(warmup):
                built[side]()
    return built[0], built[1]


def _timed(session: Any, feed: Tensors) -> Timed:
    names = [output.name for output in session.get_outputs()]
    inputs = dict(feed)
    run = session.run
    clock = time.perf_counter_ns
    usage, who = resource.getrusage, getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)

    def timed() -> tuple[int, bool]:
        before = usage(who).ru_nivcsw
        begun = clock()
        run(names, inputs)
        spent = clock() - begun
        return spent, usage(who).ru_nivcsw != before

    return timed


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage collection and no reporting of warnings in the middle of a timed run."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check_machine(ort: Any, target: Target) -> None:
    if lacking := lacking_flags(target.requires_cpu_flags):
        raise MeasurementFailure(
            f"this CPU lacks {', '.join(lacking)}",
            where=f"target {target.name}",
            remedy="Figures from here mean nothing for this target; measure it on a machine that has them.",
        )
    wanted = [provider.name for provider in target.providers]
    missing = [name for name in wanted if name not in ort.get_available_providers()]
    if missing:
        raise MeasurementFailure(
            f"execution provider {missing[0]} is not in this build of ONNX Runtime",
            where=f"target {target.name}",
            why=f"it has {', '.join(ort.get_available_providers())}",
            remedy="Measure this target where its provider is installed; it is not measured here.",
        )


def _session(model: Path, target: Target, *, record_assignment: bool = False) -> Any:
    ort = importlib.import_module("onnxruntime")
    _check_machine(ort, target)
    providers = [(provider.name, dict(provider.options)) for provider in target.providers]
    with _failures(model):
        options = _options(ort, target.session)
        if record_assignment:
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        # Its fallback would print, and measure another provider than the one asked for.
        return ort.InferenceSession(str(model), options, providers=providers, enable_fallback=0)


def _options(ort: Any, settings: SessionSettings) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = _QUIET
    options.intra_op_num_threads = settings.intra_op_threads
    options.inter_op_num_threads = settings.inter_op_threads
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, _LEVELS[settings.graph_level])
    spinning = "1" if settings.spinning else "0"
    options.add_session_config_entry("session.intra_op.allow_spinning", spinning)
    options.add_session_config_entry("session.inter_op.allow_spinning", spinning)
    for key, value in settings.config.items():
        options.add_session_config_entry(key, value)
    return options


@contextmanager
def _failures(model: Path) -> Iterator[None]:
    """The runtime's own exceptions share no base class; each is told in one line."""
    try:
        yield
    except Exception as error:
        if type(error).__module__ != "onnxruntime.capi.onnxruntime_pybind11_state" and not isinstance(
            error, ValueError | RuntimeError
        ):
            raise
        lines = str(error).strip().splitlines()
        raise MeasurementFailure(
            "ONNX Runtime cannot run the model", where=model.name, why=lines[0][:400] if lines else type(error).__name__
        ) from error
