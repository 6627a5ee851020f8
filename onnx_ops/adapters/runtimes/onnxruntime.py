"""ONNX Runtime in this process, with any execution provider that its build has."""

from __future__ import annotations

import gc
import importlib
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from onnx_ops.adapters.runtimes.hardware import fingerprint
from onnx_ops.adapters.runtimes.onnxruntime_load import window
from onnx_ops.adapters.runtimes.onnxruntime_session import failures, new_session
from onnx_ops.adapters.runtimes.onnxruntime_start import start, stored_feed
from onnx_ops.domain.evidence import RuntimeFacts
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.ports.models import (
    Array,
    LoadSamples,
    LoadSchedule,
    PairSamples,
    PairSchedule,
    RunSamples,
    StartSamples,
    StartSchedule,
    Tensors,
)

DISTRIBUTION = "onnxruntime"

_T = TypeVar("_T")

Timed = Callable[[], tuple[int, bool]]
"""One run: nanoseconds, and whether the thread lost its core meanwhile."""


class OnnxRuntime:
    """Fulfils `ports.RewritingRuntime`. Every call builds the sessions it needs and lets go of them."""

    def fingerprint(self, target: Target) -> HardwareFingerprint:
        return fingerprint(target.runtime, DISTRIBUTION)

    def facts(self, model: Path, target: Target) -> RuntimeFacts:
        ort = importlib.import_module("onnxruntime")
        session = new_session(model, target, record_assignment=True)
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

    def rewritten(self, model: Path, target: Target, copy: Path) -> None:
        """Graphs of providers that compile their part cannot be written."""
        new_session(model, target, write_to=copy)

    def run(self, model: Path, target: Target, batches: tuple[Tensors, ...]) -> tuple[Mapping[str, Array], ...]:
        session = new_session(model, target)
        names = [output.name for output in session.get_outputs()]
        answers = []
        for feed in batches:
            with failures(model):
                answers.append(dict(zip(names, session.run(names, dict(feed)), strict=True)))
        return tuple(answers)

    def sample(self, model: Path, target: Target, feed: Tensors, *, runs: int, warmup: int) -> RunSamples:
        import numpy as np

        timed = _timed(new_session(model, target), feed)
        with failures(model), _undisturbed():
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

        def warm(model: Path) -> Timed:
            timed = _timed(new_session(model, target), feed)
            with failures(model):
                for _ in range(schedule.warmup):
                    timed()
            return timed

        with _undisturbed():
            for pair in range(schedule.pairs):
                sides = _fresh_pair(models, bool(order.integers(2)), warm)
                for block in range(schedule.blocks):
                    first = int(order.integers(2))
                    for side in (first, 1 - first):
                        with failures(models[side]):
                            samples = [sides[side]() for _ in range(schedule.runs)]
                        nanoseconds[pair, block, side] = [ns for ns, _ in samples]
                        preempted[pair, block, side] = [lost for _, lost in samples]
        return PairSamples(nanoseconds=nanoseconds, preempted=preempted)

    def under_load(
        self, baseline: Path, candidate: Path, target: Target, feed: Tensors, schedule: LoadSchedule
    ) -> LoadSamples:
        import numpy as np

        models, order = (baseline, candidate), np.random.default_rng(schedule.seed)
        nanoseconds = np.zeros((schedule.pairs, schedule.windows, 2), dtype=np.int64)
        with ThreadPoolExecutor(schedule.concurrency, thread_name_prefix="load") as pool:

            def loaded(model: Path) -> Callable[[], int]:
                call = _call(new_session(model, target), feed)
                return lambda: window(call, pool, schedule.concurrency, schedule.requests)

            for pair in range(schedule.pairs):
                sides = _fresh_pair(models, bool(order.integers(2)), loaded)
                with _undisturbed():
                    for turn in range(-1, schedule.windows):
                        first = int(order.integers(2))
                        for side in (first, 1 - first):
                            with failures(models[side]):
                                spent = sides[side]()
                            if turn >= 0:
                                nanoseconds[pair, turn, side] = spent
        return LoadSamples(nanoseconds=nanoseconds, requests=schedule.requests)

    def starts(
        self, baseline: Path, candidate: Path, target: Target, feed: Tensors, schedule: StartSchedule
    ) -> StartSamples:
        import numpy as np

        models, order = (baseline, candidate), np.random.default_rng(schedule.seed)
        figures = np.zeros((3, schedule.pairs, 2), dtype=np.int64)
        with stored_feed(feed) as stored:
            for pair in range(schedule.pairs):
                first = int(order.integers(2))
                for side in (first, 1 - first):
                    figures[:, pair, side] = start(models[side], target, stored, schedule.requests)
        return StartSamples(load_ns=figures[0], first_ns=figures[1], peak_bytes=figures[2])


def available_providers() -> tuple[str, ...]:
    """Execution providers of the installed build."""
    return tuple(importlib.import_module("onnxruntime").get_available_providers())


def _fresh_pair(models: tuple[Path, Path], swap: bool, make: Callable[[Path], _T]) -> tuple[_T, _T]:
    """Both sessions, built and warmed up in the given order: memory layout is part of a session's latency."""
    built = {side: make(models[side]) for side in ((1, 0) if swap else (0, 1))}
    return built[0], built[1]


def _call(session: Any, feed: Tensors) -> Callable[[], object]:
    names, inputs, run = [output.name for output in session.get_outputs()], dict(feed), session.run
    return lambda: run(names, inputs)


def _timed(session: Any, feed: Tensors) -> Timed:
    call = _call(session, feed)
    clock = time.perf_counter_ns
    usage, who = resource.getrusage, getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)

    def timed() -> tuple[int, bool]:
        before = usage(who).ru_nivcsw
        begun = clock()
        call()
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
