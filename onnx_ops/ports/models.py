"""Ports of the rooms that touch models and data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.environment import Environment
from onnx_ops.domain.evidence import RuntimeFacts
from onnx_ops.domain.finding import Finding
from onnx_ops.domain.hardware import HardwareFingerprint
from onnx_ops.domain.pipeline import DataSection, Export, Quantize
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.recipes import Arithmetic
from onnx_ops.domain.target import CustomOps, Target

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.generic]
else:
    Array = Any

Tensors = Mapping[str, Array]
"""Named arrays; for model inputs and outputs the names are the ONNX ones and axis 0 is the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Named arrays of equal length along axis 0: model inputs by ONNX name, and labels if there are any."""

    inputs: Tensors
    label: Array | None = None

    def __len__(self) -> int:
        return int(next(iter(self.inputs.values())).shape[0])

    def head(self, rows: int) -> Dataset:
        """The first `rows` rows."""
        label = None if self.label is None else self.label[:rows]
        return Dataset(inputs={name: array[:rows] for name, array in self.inputs.items()}, label=label)


class DataSource(Protocol):
    """Brings a data set."""

    def fingerprint(self, section: DataSection, root: Path) -> str:
        """What changes when the data changes, found without loading it or importing a heavy package.

        Raises:
            NotFound: the data does not exist.
        """
        ...

    def load(self, section: DataSection, root: Path) -> Mapping[str, Array]:
        """All arrays of the set, by their own names.

        Raises:
            NotFound: the data does not exist.
            UserError: it is not what it should be.
        """
        ...


class ModelSource(Protocol):
    """Brings a trained model: a path of the project, `models:/NAME/VERSION`, or a URL."""

    def digest(self, place: str) -> Digest:
        """What changes when the model changes, found without fetching it.

        Raises:
            NotFound: there is no such model.
            ServiceUnavailable: its place does not answer.
        """
        ...

    def path(self, place: str, scratch: Path) -> Path:
        """The model as a local file or folder; `scratch`, which does not exist yet, takes what is fetched."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What an exporter is asked for. `samples` holds real inputs by ONNX name, at least two rows."""

    section: Export
    samples: Tensors
    path: Path


class Exporter(Protocol):
    """Turns a framework's model into an ONNX file and runs the original for comparison."""

    tools: tuple[str, ...]
    """Distributions whose versions shape the export."""

    def save(self, model: object, folder: Path) -> None:
        """Write a trained model into an empty folder."""
        ...

    def load(self, folder: Path) -> object:
        """Read what `save` wrote."""
        ...

    def export(self, model: object, request: ExportRequest) -> None:
        """Write the ONNX file to `request.path` at the opset and IR version asked for.

        Raises:
            UserError: the model or an option does not fit this exporter.
            StageFailure: the converter failed.
        """
        ...

    def reference(
        self, model: object, inputs: Tensors, precision: Literal["float32", "float64"]
    ) -> Mapping[str, Array] | None:
        """The source model's outputs under the ONNX output names, computed in that precision.

        None if the source cannot be run in that precision; parity then falls back on fixed tolerances.
        """
        ...


@runtime_checkable
class TrainingExporter(Exporter, Protocol):
    """An exporter that trains where its framework is, which is not here."""

    def train(self, run: str, data: Mapping[str, Dataset], parameters: Mapping[str, Json], folder: Path) -> None:
        """Call the training function `package.module:function` and save its model into an empty folder.

        Raises:
            StageFailure: it failed, or its process crashed.
        """
        ...


class Exporters(Protocol):
    """Exporters by the name of their framework."""

    def __call__(self, name: str, env: Environment | None = None, /) -> Exporter:
        """The exporter, in the environment asked for, else in its own default or here.

        Raises:
            NotFound: there is no such exporter.
            MissingPackage: a package that it needs is not installed.
        """
        ...


Tracer = Callable[[Tensors, Collection[str]], tuple[Tensors, Tensors | None]]
"""Runs the source on inputs and gives those of the named values that it has, in float32 and, if it can, in float64.

Raises ValueError if the source refuses the inputs.
"""


@runtime_checkable
class TracingExporter(Exporter, Protocol):
    """An exporter that can also look inside its source."""

    def tracer(self, model: object, request: ExportRequest) -> Tracer:
        """The source's intermediate values under the names they have in the export; writes no file.

        Raises:
            UserError, StageFailure: as for `export`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """One decision tree, its n nodes in preorder: a split, then what holds at most its threshold, then the rest.

    `features` int64 (n), -1 at a leaf; `thresholds` float32 (n), the largest float32 that still takes the first way;
    `weights` float32 (n, outputs), what a leaf adds to each output. The rest is 0.
    """

    features: npt.NDArray[np.int64]
    thresholds: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]


@runtime_checkable
class TreeExporter(Exporter, Protocol):
    """An exporter that can tell the trees of its source."""

    def trees(self, model: object) -> tuple[Tree, ...] | None:
        """The trees in the order of the file, with weights as they should stand there; None if it cannot tell."""
        ...


@runtime_checkable
class SessionExporter(Exporter, Protocol):
    """An exporter whose source is run by ONNX Runtime, which may lack its operators."""

    def with_custom_ops(self, libraries: tuple[CustomOps, ...]) -> Exporter:
        """The same, with libraries of operators for its sessions."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeRequest:
    """What an optimizer is asked for. `calibration` holds inputs by ONNX name, or None if none was declared.

    `machines` are those of the targets on which the variant is to run, each kind once.
    """

    section: Quantize
    source: Path
    path: Path
    calibration: Tensors | None
    machines: tuple[Arithmetic, ...] = ()


class Optimizer(Protocol):
    """Derives one ONNX file from another.

    `quantized`: the variant differs from its source by design, so that its weights and a task metric are judged and
    not its distance from the source.
    """

    tools: tuple[str, ...]
    quantized: bool
    needs_calibration: bool

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        """Write the derived file to `request.path`, and tell in a sentence each what was decided and why.

        Raises:
            UserError: an option does not fit, or an excluded node took no effect.
            StageFailure: the library failed.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceSchedule:
    """How models are timed in turns.

    Each of `heats` builds a session of every model fresh, in random order, warms it up with `warmup` runs, and times
    `blocks` rounds in which every model has a block of `runs` runs, in random order within each round.
    """

    heats: int
    blocks: int = 12
    runs: int = 10
    warmup: int = 20
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceSamples:
    """Raw samples of a race: nanoseconds and preemptions of shape (heats, blocks, models, runs).

    `probe`, of the same shape, is how long a short piece of work that is always the same took right before or right
    after each run on its core, the longer of the two: it tells how fast the machine was just then. None where a
    runtime has no such probe.

    `calls`: each sample is the mean of so many runs, one right after the other, where the clock is too coarse for one.
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
    """How models are put under load.

    Each of `heats` builds a session of every model fresh, in random order, and has each answer `windows` windows of
    `requests` requests that `concurrency` threads send without pause, the models in random order within each round. A
    window that is not timed comes before, on each session.
    """

    concurrency: int
    requests: int
    heats: int
    windows: int = 2
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSamples:
    """Nanoseconds from the first request of a window to its last answer, of shape (heats, windows, models). Every
    window answered `requests` requests."""

    nanoseconds: Array
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSchedule:
    """Fresh processes in `heats`, one for each model, in random order within a heat; each answers `requests`."""

    heats: int
    requests: int = 20
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSamples:
    """Of each process, arrays of shape (heats, models).

    `load_ns` is building the session, the runtime being imported; `first_ns` the first inference. `peak_bytes` is the
    highest resident memory, file mappings included, while it loaded and answered, less the resident memory just
    before; -1 where the system does not tell.
    """

    load_ns: Array
    first_ns: Array
    peak_bytes: Array


class Runtime(Protocol):
    """Runs ONNX files on one kind of target.

    Where it does so in another process, every method raises StageFailure if that ended, or did not answer in time: that
    says nothing about the model.
    """

    def fingerprint(self, target: Target) -> HardwareFingerprint:
        """The machine and runtime build, found without importing the runtime."""
        ...

    def facts(self, model: Path, target: Target) -> RuntimeFacts:
        """Which providers and how many nodes each really took.

        Raises:
            MeasurementFailure: a provider is missing, or the runtime refuses the model.
        """
        ...

    def run(self, model: Path, target: Target, batches: tuple[Tensors, ...]) -> tuple[Mapping[str, Array], ...]:
        """Outputs for each batch, from one session.

        Raises:
            MeasurementFailure: the session could not be built or a run failed.
        """
        ...

    def sample(self, model: Path, target: Target, feed: Tensors, *, runs: int, warmup: int) -> RunSamples:
        """Time single runs of one session."""
        ...

    def race(self, models: Sequence[Path], target: Target, feed: Tensors, schedule: RaceSchedule) -> RaceSamples:
        """Time models side by side; one that stands there twice gets two sessions."""
        ...

    def under_load(self, models: Sequence[Path], target: Target, feed: Tensors, schedule: LoadSchedule) -> LoadSamples:
        """Time windows of requests that several threads send to one session, the models in turns."""
        ...

    def starts(self, models: Sequence[Path], target: Target, feed: Tensors, schedule: StartSchedule) -> StartSamples:
        """Load models in fresh processes, in turns, and have each answer requests.

        Raises:
            MeasurementFailure: a process crashed, or could not run its model.
        """
        ...


@runtime_checkable
class HousedRuntime(Runtime, Protocol):
    """A runtime whose packages may live in environments of their own."""

    def housed(self, folder: Path) -> Runtime:
        """The same, with its environments below a folder."""
        ...

    def diagnose(self) -> Iterable[Finding]:
        """What it needs of this machine beside those, and whether that is here. Changes nothing."""
        ...


@runtime_checkable
class RewritingRuntime(Runtime, Protocol):
    """A runtime that can show the graph that it really runs."""

    def rewritten(self, model: Path, target: Target, copy: Path) -> None:
        """Write the graph after the runtime's own optimizations on the target to `copy`.

        Raises:
            MeasurementFailure: the session could not be built, or its graph cannot be written.
        """
        ...


@runtime_checkable
class PackagingRuntime(Runtime, Protocol):
    """A runtime that runs another file than the ONNX model where a target has an `ort_format`."""

    def package(self, model: Path, target: Target, folder: Path) -> None:
        """Write what such a target gets of a model into `folder`: `model.ort`, and what is known of it.

        Raises:
            MeasurementFailure: it cannot be made.
        """
        ...
