"""Ports of the runtimes that run and measure a model on a target."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.domain.execution import RuntimeFacts
from onnx_ops.domain.target import Diagnosis, HardwareFingerprint, Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.ports.data import Array, Tensors
from onnx_ops.ports.plugin import Plugin


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedBenchmarkSchedule:
    """The schedule of a benchmark that times models alternately.

    There are `rounds` rounds. Each round builds a fresh session of every model, in random order,
    and warms the session up with `warmup` runs. Then, `blocks` times, every model gets one block of
    `runs` timed runs, with the models in random order.
    """

    rounds: int
    blocks: int = 12
    runs: int = 10
    warmup: int = 20
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedBenchmarkSamples:
    """Raw samples of a paired benchmark.

    `nanoseconds` and `preempted` have the shape (rounds, blocks, models, runs).

    `probe` has the same shape. For each run, it is the duration of a short, constant piece of work
    on the same core. It shows how fast the machine was at that moment. The work is timed directly
    before and after the run, and the longer duration counts. `probe` is None if the runtime has no
    probe.

    Each sample is the mean of `calls` consecutive runs. `calls` exceeds 1 if the clock is too
    coarse for a single run.
    """

    nanoseconds: Array
    preempted: Array
    probe: Array | None = None
    calls: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSamples:
    """Raw samples of one model: nanoseconds and preemptions of shape (runs,)."""

    nanoseconds: Array
    preempted: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSchedule:
    """The schedule of a benchmark under load.

    Each of `rounds` rounds builds a fresh session of every model, in random order. Each session
    answers `windows` windows of `requests` requests that `concurrency` threads send without pause.
    For each window, the models are in random order. An untimed window comes first on each session.
    """

    concurrency: int
    requests: int
    rounds: int
    windows: int = 2
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSamples:
    """Durations of windows of requests.

    A duration is in nanoseconds, from the first request of a window to its last answer. The shape
    is (rounds, windows, models). Every window answered `requests` requests.
    """

    nanoseconds: Array
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSchedule:
    """The schedule of starts of models in fresh processes.

    Each of `rounds` rounds starts one process for each model, in random order. Each process answers
    `requests` requests.
    """

    rounds: int
    requests: int = 20
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSamples:
    """Samples of fresh processes, arrays of shape (rounds, models).

    `load_ns` is the time to build the session, with the runtime imported. `first_ns` is the time of
    the first inference. `peak_bytes` is the highest resident memory, file mappings included, while
    the process loaded and answered, minus the resident memory just before. It is -1 where it is
    unknown.
    """

    load_ns: Array
    first_ns: Array
    peak_bytes: Array


class Runtime(Plugin):
    """A runtime that runs ONNX files on one kind of target.

    Methods that use a process of an environment raise StageError if that process ended or did not
    answer in time. This is not a failure of the model. If a forked process that guards against
    crashes of the model ends, they raise MeasurementError.
    """

    @abstractmethod
    def fingerprint(self, target: Target) -> HardwareFingerprint:
        """Return the machine and runtime build, without importing the runtime."""

    @abstractmethod
    def facts(self, model: Path, target: Target) -> RuntimeFacts:
        """Return the providers that ran the model and the number of nodes of each.

        Raises:
            MeasurementError: a provider is missing, or the runtime refuses the model.
        """

    @abstractmethod
    def run(
        self, model: Path, target: Target, batches: tuple[Tensors, ...]
    ) -> tuple[Mapping[str, Array], ...]:
        """Return the outputs for each batch, from one session.

        Raises:
            MeasurementError: the session could not be built or a run failed.
        """

    @abstractmethod
    def sample(
        self, model: Path, target: Target, feed: Tensors, *, runs: int, warmup: int
    ) -> RunSamples:
        """Time single runs of one session.

        Raises:
            MeasurementError: the session could not be built or a run failed.
        """

    @abstractmethod
    def benchmark(
        self,
        models: Sequence[Path],
        target: Target,
        feed: Tensors,
        schedule: PairedBenchmarkSchedule,
    ) -> PairedBenchmarkSamples:
        """Time models side by side; a model that is listed twice gets two sessions.

        Raises:
            MeasurementError: a session could not be built or a run failed.
        """

    @abstractmethod
    def under_load(
        self, models: Sequence[Path], target: Target, feed: Tensors, schedule: LoadSchedule
    ) -> LoadSamples:
        """Time windows of requests that several threads send to one session.

        The windows alternate between models.

        Raises:
            MeasurementError: a session could not be built or a request failed.
        """

    @abstractmethod
    def starts(
        self, models: Sequence[Path], target: Target, feed: Tensors, schedule: StartSchedule
    ) -> StartSamples:
        """Measure load, first inference and peak memory of models in fresh processes.

        Raises:
            MeasurementError: a process could not run its model.
            StageError: a process crashed, or did not answer in time.
        """

    def rewritten(self, model: Path, target: Target, copy: Path) -> None:
        """Write the graph after the runtime's own optimizations on the target to `copy`.

        Raises:
            MeasurementError: building the session or writing its graph failed.
        """
        raise MeasurementError(f"runtime {target.runtime} does not show the graph that it runs")

    def package(self, model: Path, target: Target, folder: Path) -> None:
        """Write the files of a target with an `ort_format` into `folder`.

        The files are `model.ort`, the list of the operators that it needs, and a report on how much
        of it NNAPI and CoreML would run.

        Raises:
            UserError: the runtime has no such format.
            MeasurementError: the file cannot be written.
        """
        raise UserError(
            f"runtime {target.runtime} writes no .ort files",
            where=f"target {target.name}: ort_format",
            remedy="Use runtime onnxruntime, node or browser.",
        )

    def with_environments(self, folder: Path) -> Runtime:
        """Return the runtime with the environments of its packages below a folder."""
        return self

    def diagnose(self) -> Iterable[Diagnosis]:
        """Return diagnoses of the runtime's requirements on this machine."""
        return ()
