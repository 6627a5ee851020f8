"""ONNX Runtime in this process, with providers of its build or of plug-ins."""

from __future__ import annotations

import gc
import importlib
import resource
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING, Any, TypeVar

from onnx_ops.adapters.runtimes.cold_start import collect_starts, measure_start
from onnx_ops.adapters.runtimes.onnxruntime_session import (
    build_session,
    convert_runtime_errors,
    fingerprint_target,
)
from onnx_ops.adapters.runtimes.ort_format import write_package
from onnx_ops.domain.execution import RuntimeFacts
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.errors import MeasurementError
from onnx_ops.onnx_graph.files import list_shape_nodes, share_structure
from onnx_ops.onnx_graph.ort_format import is_ort_format
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

if TYPE_CHECKING:
    from numpy.random import Generator

_PROBE_LOOPS = 100

_T = TypeVar("_T")

Timed = Callable[[], tuple[int, bool]]
"""Function that runs a model once and returns the duration in nanoseconds.

The second value states whether the thread was preempted during the run.
"""


class OnnxRuntime(Runtime):
    """ONNX Runtime in this process. Every call builds the sessions that it needs."""

    def fingerprint(self, target: Target) -> HardwareFingerprint:
        """Return the hardware and runtime for which measurements on the target are valid."""
        return fingerprint_target(target)

    def facts(self, model: Path, target: Target) -> RuntimeFacts:
        """Build a session; return its providers and how many nodes each of them runs."""
        ort = importlib.import_module("onnxruntime")
        session = build_session(model, target, record_assignment=True)
        of_shapes = (
            frozenset[str]() if is_ort_format(model) else list_shape_nodes(share_structure(model))
        )
        nodes: Counter[str] = Counter()
        shape_nodes: Counter[str] = Counter()
        for part in session.get_provider_graph_assignment_info():
            names = [node.name for node in part.get_nodes()]
            nodes[part.ep_name] += len(names)
            if part.ep_name != target.providers[0].name:
                shape_nodes[part.ep_name] += len(of_shapes.intersection(names))
        return RuntimeFacts(
            runtime=target.runtime,
            version=ort.__version__,
            asked=tuple(provider.name for provider in target.providers),
            used=tuple(session.get_providers()),
            nodes=dict(sorted(nodes.items())),
            shape_nodes={name: count for name, count in sorted(shape_nodes.items()) if count},
            build=ort.get_build_info(),
            clock_resolution_ns=_clock_step(),
        )

    def rewritten(self, model: Path, target: Target, copy: Path) -> None:
        """Write the optimized graph; graphs that a provider compiles cannot be written."""
        build_session(model, target, write_to=copy)

    def package(self, model: Path, target: Target, folder: Path) -> None:
        """Write what a device needs to run the model into a folder."""
        write_package(model, target, folder)

    def run(
        self, model: Path, target: Target, batches: tuple[Tensors, ...]
    ) -> tuple[Mapping[str, Array], ...]:
        """Run each batch and return its outputs by name."""
        session = build_session(model, target)
        names = [output.name for output in session.get_outputs()]
        answers = []
        for feed in batches:
            with convert_runtime_errors(model):
                answers.append(dict(zip(names, session.run(names, dict(feed)), strict=True)))
        return tuple(answers)

    def sample(
        self, model: Path, target: Target, feed: Tensors, *, runs: int, warmup: int
    ) -> RunSamples:
        """Time `runs` runs of one feed after `warmup` runs that are not timed."""
        import numpy as np

        timed = _timed(build_session(model, target), feed)
        with convert_runtime_errors(model), _undisturbed():
            for _ in range(warmup):
                timed()
            samples = [timed() for _ in range(runs)]
        return RunSamples(
            nanoseconds=np.array([ns for ns, _ in samples], dtype=np.int64),
            preempted=np.array([lost for _, lost in samples], dtype=bool),
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

        order = np.random.default_rng(schedule.seed)
        figures = np.zeros(
            (3, schedule.rounds, schedule.blocks, len(models), schedule.runs), dtype=np.int64
        )

        def warm(model: Path) -> Timed:
            timed = _timed(build_session(model, target), feed)
            with convert_runtime_errors(model):
                for _ in range(schedule.warmup):
                    timed()
            return timed

        with _undisturbed():
            for round_number in range(schedule.rounds):
                sessions = _fresh(models, order, warm)
                for block in range(schedule.blocks):
                    for turn in order.permutation(len(models)):
                        with convert_runtime_errors(models[turn]):
                            figures[:, round_number, block, turn] = np.array(
                                _block(sessions[turn], schedule.runs)
                            ).T
        return PairedBenchmarkSamples(
            nanoseconds=figures[0], preempted=figures[1].astype(bool), probe=figures[2]
        )

    def under_load(
        self, models: Sequence[Path], target: Target, feed: Tensors, schedule: LoadSchedule
    ) -> LoadSamples:
        """Time windows of concurrent requests to each model."""
        import numpy as np

        order = np.random.default_rng(schedule.seed)
        nanoseconds = np.zeros((schedule.rounds, schedule.windows, len(models)), dtype=np.int64)
        with ThreadPoolExecutor(schedule.concurrency, thread_name_prefix="load") as pool:

            def loaded(model: Path) -> Callable[[], int]:
                call = _call(build_session(model, target), feed)
                return lambda: run_load_window(call, pool, schedule.concurrency, schedule.requests)

            for round_number in range(schedule.rounds):
                sessions = _fresh(models, order, loaded)
                with _undisturbed():
                    for number in range(-1, schedule.windows):
                        for turn in order.permutation(len(models)):
                            with convert_runtime_errors(models[turn]):
                                spent = sessions[turn]()
                            if number >= 0:
                                nanoseconds[round_number, number, turn] = spent
        return LoadSamples(nanoseconds=nanoseconds, requests=schedule.requests)

    def starts(
        self, models: Sequence[Path], target: Target, feed: Tensors, schedule: StartSchedule
    ) -> StartSamples:
        """Measure cold starts of each model in fresh processes."""
        return collect_starts(
            models, schedule, lambda model: measure_start(model, target, feed, schedule.requests)
        )


def _fresh(models: Sequence[Path], order: Generator, make: Callable[[Path], _T]) -> list[_T]:
    """Build each model's session with `make`; return results in the order of models.

    Sessions are built in random order, since a session's latency depends on where its memory is
    allocated.
    """
    built = {int(turn): make(models[turn]) for turn in order.permutation(len(models))}
    return [built[turn] for turn in range(len(models))]


def _block(timed: Timed, runs: int) -> list[tuple[int, bool, int]]:
    """Return the duration of each run, whether it was preempted, and its probe in ns.

    The probe is the longer of the two probes directly before and after the run.
    """
    samples, before = [], _probe()
    for _ in range(runs):
        spent, lost = timed()
        after = _probe()
        samples.append((spent, lost, max(before, after)))
        before = after
    return samples


def _probe() -> int:
    """Time one probe in this thread in nanoseconds; it takes about a microsecond."""
    clock = time.perf_counter_ns
    begun = clock()
    for _ in range(_PROBE_LOOPS):
        pass
    return clock() - begun


def _clock_step() -> float:
    """Return the smallest step of the clock in nanoseconds, from 1,000 measurements."""
    clock = time.perf_counter_ns
    steps = (second - first for first, second in ((clock(), clock()) for _ in range(1000)))
    return float(min(step for step in steps if step > 0))


def _call(session: Any, feed: Tensors) -> Callable[[], object]:
    names, inputs, run = [output.name for output in session.get_outputs()], dict(feed), session.run
    return lambda: run(names, inputs)


def _timed(session: Any, feed: Tensors) -> Timed:
    call = _call(session, feed)
    clock = time.perf_counter_ns
    usage, scope = resource.getrusage, getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)

    def timed() -> tuple[int, bool]:
        before = usage(scope).ru_nivcsw
        begun = clock()
        call()
        spent = clock() - begun
        return spent, usage(scope).ru_nivcsw != before

    return timed


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Prevent garbage collection in this block, so that it disturbs no timed run."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def run_load_window(
    call: Callable[[], object], pool: Executor, concurrency: int, requests: int
) -> int:
    """Make `requests` calls on `concurrency` threads of `pool` and time them all.

    Each thread makes its next call when the previous call has returned. At least `concurrency`
    threads of the pool must be free.

    Returns:
        Nanoseconds from the moment at which all threads are ready to the end of the last call.

    Raises:
        MeasurementError: the threads could not be started.
        Exception: `call` raised an exception; the other threads end after their current call.
    """
    waiting = deque(range(requests))
    clock = time.perf_counter_ns
    begun: list[int] = []
    ready = Barrier(concurrency, action=lambda: begun.append(clock()))

    def work() -> int:
        ready.wait()
        try:
            while waiting:
                try:
                    waiting.pop()
                except IndexError:  # Another thread has taken the last waiting call.
                    break
                call()
        except BaseException:
            waiting.clear()
            raise
        return clock()

    try:
        workers = [pool.submit(work) for _ in range(concurrency)]
    except RuntimeError as error:
        ready.abort()
        remedy = "Lower `concurrency`, or raise the limit of threads on this machine."
        raise MeasurementError(
            f"{concurrency} threads could not be started", why=str(error), remedy=remedy
        ) from error
    return max(worker.result() for worker in workers) - begun[0]
