"""Gates, their task metrics, and what a benchmark must measure for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import NormalDist
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, cast

from annotated_types import Ge, Gt, Le, Lt, doc

from onnx_ops.domain.artifact import digest_json, short_digest
from onnx_ops.domain.quantities import (
    OMIT_DEFAULT,
    Amount,
    Bytes,
    Count,
    Fraction,
    PerSecond,
    Seconds,
    TaggedFamily,
)
from onnx_ops.domain.task_metrics import (
    DEFAULT_FOR_CLASSES,
    DEFAULT_FOR_NUMBERS,
    METRICS,
    AnswerKind,
    Average,
    CountedRows,
    MeanLoss,
    MetricName,
    Options,
    Resampled,
    TaskMetric,
    list_errors,
    suggest_other_kind,
)

_NAMED_KEYS = (
    "positive",
    "output",
    "ignore",
    "decode",
    "per",
    "iou",
    "max_detections",
    "sigmas",
)
"""Keys that are part of a metric's `label` if they differ from their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDefinition:
    """All settings that shape a metric's value, without limits.

    A custom metric has `use` and no `name`. Defaults are filled in, so that two definitions that
    measure the same are equal.
    """

    name: MetricName | None = None
    use: str = ""
    k: int | None = None
    average: Average | None = None
    positive: str | int | None = None
    output: str | None = None
    ignore: int | None = None
    bins: int | None = field(default=None, metadata=OMIT_DEFAULT)
    q: float | None = field(default=None, metadata=OMIT_DEFAULT)
    logits: bool | None = field(default=None, metadata=OMIT_DEFAULT)
    decode: str = field(default="", metadata=OMIT_DEFAULT)
    per: Literal["set", "row"] = field(default="set", metadata=OMIT_DEFAULT)
    iou: float | None = field(default=None, metadata=OMIT_DEFAULT)
    max_detections: int | None = field(default=None, metadata=OMIT_DEFAULT)
    sigmas: tuple[float, ...] | None = field(default=None, metadata=OMIT_DEFAULT)

    @property
    def metric(self) -> TaskMetric | None:
        """The entry of `METRICS`; None for a custom metric."""
        return None if self.name is None else METRICS[self.name]

    @property
    def reads(self) -> AnswerKind | None:
        """The kind of outputs and labels that the metric reads.

        None for a custom metric, which takes any array.
        """
        return None if self.metric is None else self.metric.reads

    @property
    def method(self) -> CountedRows | MeanLoss | Resampled | None:
        """The method that computes the metric and its interval.

        None for a custom metric, which is resampled.
        """
        return None if self.metric is None else self.metric.method

    @property
    def options(self) -> Options:
        """The keys of the gate that shape the metric, with their values."""
        defaults = {} if self.metric is None else self.metric.options
        return {
            name: default if (given := getattr(self, name)) is None else given
            for name, default in defaults.items()
        }

    @property
    def label(self) -> str:
        """Name of the metric with its options, as evidence and tables show it.

        Metrics with different options have different labels. `sigmas` is shown as a digest.
        """
        display = "" if self.metric is None else self.metric.display
        parts = [display.format(**self.options) or self.name or self.use, self.average or ""]
        parts += [
            # The values of 68 keypoints would exceed MLflow's 250 characters of a metric's name.
            f"{key}:{short_digest(digest_json(value)) if key == 'sigmas' else value}"
            for key, value in self._list_own_keys().items()
        ]
        parts.append("of logits" if self.logits else "")
        return " ".join(part for part in parts if part)

    def _list_own_keys(self) -> Options:
        """Return the keys that differ from their defaults, in the order of the label."""
        usual = {"decode": "", "per": "set", **(self.metric.options if self.metric else {})}
        given = {key: getattr(self, key) for key in _NAMED_KEYS}
        return {
            key: value
            for key, value in given.items()
            if value is not None and value != usual.get(key)
        }

    @property
    def functions(self) -> Sequence[str]:
        """The functions of the project that the metric calls, by reference."""
        return [reference for reference in (self.use, self.decode) if reference]

    @property
    def extra(self) -> str:
        """The extra of onnx-ops with the packages of the metric; empty if none is needed."""
        return "" if self.metric is None else self.metric.extra

    @property
    def label_free(self) -> bool:
        """Whether models can be compared with each other without labels."""
        return self.metric is not None and self.metric.label_free

    @property
    def other_kind(self) -> str:
        """What outputs the metric requires, and what to use for other outputs.

        The sentence is empty if the table of metrics has no such advice.
        """
        return suggest_other_kind(self.name) if self.name is not None else ""

    @property
    def higher_is_better(self) -> bool | None:
        """Whether higher is better; None for a custom metric, whose gate defines it."""
        return None if self.metric is None else self.metric.higher_is_better


ACCURACY = MetricDefinition(name=DEFAULT_FOR_CLASSES)
RMSE = MetricDefinition(name=DEFAULT_FOR_NUMBERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRequest:
    """What a benchmark must measure for its gates, besides what it always measures.

    `throughput` are the concurrencies to measure. `starts` requests starts of fresh processes.
    `tolerances` are the regressions that the measurement must be able to detect, by kind of gate.
    They determine how long the measurement takes. Their entry `speedup` has the required speed-ups
    over the export, expressed as slow-downs. A speed-up of 10% is 1 / 1.1 - 1.
    """

    throughput: Sequence[int] = ()
    starts: bool = False
    tolerances: Mapping[str, Sequence[float]] = field(default_factory=dict)


class Gate(TaggedFamily):
    """Base of all kinds of gates, which are entries of `GATES`.

    Each kind is a frozen dataclass with the key `kind`.

    The rule that judges a kind is registered with `statistics.rules.common.judge_gate`.
    """

    __slots__ = ()

    kind: str

    counts: ClassVar[str] = ""
    """What `GateResult.n` counts in results that are not ratios."""

    figures: ClassVar[tuple[str, ...]] = ()
    """Metrics of `PairedRatios` that this kind judges.

    Metrics of a concurrency are judged by `ThroughputGate` and are not listed.
    """

    @classmethod
    def members(cls) -> Mapping[str, type[Gate]]:
        """Return the kinds that derive from this class."""
        return {kind: member for kind, member in GATES.items() if issubclass(member, cls)}

    def request(self) -> MeasurementRequest:
        """Return what a benchmark must measure for this gate."""
        return MeasurementRequest()

    def find_problems(self) -> Iterator[tuple[str, str]]:
        """Yield problems that the types of the keys do not exclude.

        Each problem is the key concerned (empty for the gate as a whole) and a message.
        """
        yield from ()


class TargetGate(Gate):
    """Base of the gates that a target can have.

    The limits of these gates can depend on the target's machine. Gates of task metrics belong to
    the pipeline.
    """

    __slots__ = ()


GATES: dict[str, type[Gate]] = {}
"""The kinds of gates by name, in the order of schemas and messages."""

GateClass = TypeVar("GateClass", bound=type[Gate])


def gate_kind(gate: GateClass) -> GateClass:
    """Add a kind of gate, a dataclass, to `GATES`, and return it."""
    tag = next(f.default for f in fields(gate) if f.name == "kind")  # type: ignore[arg-type]
    GATES[str(tag)] = gate
    return gate


def _make_tolerances(kind: str, max_regression: float | None) -> dict[str, Sequence[float]]:
    return {kind: (max_regression,)} if max_regression else {}


def _find_zero_regression(max_regression: float | None) -> Iterator[tuple[str, str]]:
    if max_regression == 0:
        message = "no measurement can show a regression of at most 0%; set a higher limit"
        yield "max_regression", message


InputGroup: TypeAlias = Literal[
    "range", "batches", "lengths", "splits", "beyond_range", "missing", "infinite", "empty_batch"
]
"""Kinds of inputs that parity runs besides the real rows.

Callers can send the kinds from `range` to `splits`, and `missing` if an input can be NaN. They
cannot send the other kinds.
"""


GroupRule: TypeAlias = Literal["fail", "advise", "ignore"]


@gate_kind
@dataclass(frozen=True, slots=True, kw_only=True)
class ParityGate(TargetGate):
    """Agreement with the source model.

    The error of a float variant must not exceed `noise_factor` times the noise in any column.
    Quantized variants are judged by invariants.
    """

    kind: Literal["parity"] = "parity"
    counts: ClassVar[str] = "rows"
    noise_factor: Annotated[
        float,
        Ge(1),
        Le(1000),
        doc("Allowed error as a multiple of the source's own float32 noise."),
    ] = 10.0
    weight_steps: Annotated[
        float, Ge(0.5), Le(2), doc("Largest error of a quantized weight, in quantization steps.")
    ] = 0.51
    activation_noise: Annotated[
        float,
        Ge(1),
        Le(10),
        doc("Largest in-range error of a quantized activation, in units of step / sqrt(12)."),
    ] = 1.74
    saturation: Annotated[
        Fraction, doc("Largest share of an activation's values outside its quantized range.")
    ] = 0.1
    clipping: Annotated[
        float,
        Ge(1),
        doc(
            "Largest energy that an activation's range cuts off, "
            "in multiples of the energy of rounding errors."
        ),
    ] = field(default=100.0, metadata=OMIT_DEFAULT)
    stretch: Annotated[
        float,
        Ge(1),
        doc("Widest range of an activation or a weight, in multiples of the span of its values."),
    ] = field(default=2.5, metadata=OMIT_DEFAULT)
    groups: Annotated[
        Mapping[InputGroup, GroupRule],
        doc(
            "Effect of a difference on a group of inputs: fail, advise or ignore. Default: "
            "fail if callers can send inputs of this group, else advise."
        ),
    ] = field(default_factory=dict, hash=False, metadata=OMIT_DEFAULT)

    def rule(self, group: str, *, inside: bool) -> GroupRule:
        """Return the effect that a difference on inputs of this group has on the verdict.

        Args:
            group: an `InputGroup`, optionally followed by a colon and a name.
            inside: whether callers can send inputs of this group.
        """
        return self.groups.get(
            cast("InputGroup", group.partition(":")[0]), "fail" if inside else "advise"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMetricGate(Gate):
    """Base of the gates of a task metric, relative to the baseline or absolute.

    `max_drop` and `max_increase` are relative to the baseline on the same rows, `min` and `max` are
    absolute. These four keys are limits; the other keys define the metric.
    """

    kind: str = ""
    counts: ClassVar[str] = "rows"
    name: Annotated[
        MetricName | None, doc("Name of the metric; default: accuracy, unless `use` is set.")
    ] = None
    use: Annotated[
        str,
        doc(
            "Custom metric, `package.module:function`; takes arrays (predictions, labels). "
            "`per` determines what it returns."
        ),
    ] = ""
    per: Annotated[
        Literal["set", "row"],
        doc(
            "What the function of a custom metric returns: one value of the rows together, or an "
            "array of one value per row, whose mean is the metric."
        ),
    ] = field(default="set", metadata=OMIT_DEFAULT)
    higher_is_better: Annotated[
        bool | None, doc("Direction of a custom metric; required with `use`.")
    ] = None
    k: Annotated[
        Count | None,
        doc(
            "top_k: number of highest scores that must include the label; default 5. recall_at_k, "
            "ndcg, mrr: number of best items that count; default 10."
        ),
    ] = None
    average: Annotated[
        Average | None,
        doc("f1, iou, dice: average over classes; default: binary with `positive`, else macro."),
    ] = None
    positive: Annotated[
        str | int | None,
        doc(
            "f1 (binary) and auc: the positive label; default: the greater of two. "
            "iou and dice (binary): the class; default 1."
        ),
    ] = None
    output: Annotated[str | None, doc("ONNX output to read; default: the first that fits.")] = None
    ignore: Annotated[
        int | None,
        doc(
            "token_agreement, iou, dice: value of ignored tokens or pixels of the label; "
            "default -100 (tokens), 255 (pixels)."
        ),
    ] = None
    bins: Annotated[
        int | None, Ge(2), Le(1000), doc("ece: number of bins of equal width; default 15.")
    ] = field(default=None, metadata=OMIT_DEFAULT)
    q: Annotated[
        float | None,
        Gt(0),
        Lt(1),
        doc("quantile_loss: the quantile that the model predicts; default 0.5, the median."),
    ] = field(default=None, metadata=OMIT_DEFAULT)
    logits: Annotated[
        bool | None,
        doc("brier, log_loss, ece: the scores are logits, to which softmax is applied."),
    ] = field(default=None, metadata=OMIT_DEFAULT)
    decode: Annotated[
        str,
        doc(
            "Function `package.module:function` that takes the outputs of a batch by name and "
            "returns one answer per row, such as a text."
        ),
    ] = field(default="", metadata=OMIT_DEFAULT)
    iou: Annotated[
        float | None,
        Ge(0),
        Le(1),
        doc(
            "map, ar, keypoints_ap: least overlap of a detection and an object, such as 0.5; "
            "default: the mean over 0.5, 0.55, …, 0.95."
        ),
    ] = field(default=None, metadata=OMIT_DEFAULT)
    max_detections: Annotated[
        Count | None,
        doc(
            "map, ar, keypoints_ap: number of best detections per image and class that count; "
            "default 100, for keypoints 20."
        ),
    ] = field(default=None, metadata=OMIT_DEFAULT)
    sigmas: Annotated[
        tuple[float, ...] | None,
        doc(
            "keypoints_ap: spread of each keypoint as a share of the object's size; "
            "default: COCO's 17 points of a person."
        ),
    ] = field(default=None, metadata=OMIT_DEFAULT)
    max_drop: Annotated[Fraction | None, doc("Largest tolerated drop, in percentage points.")] = (
        None
    )
    max_increase: Annotated[
        Fraction | None,
        doc(
            f"{list_errors()}, custom errors: largest tolerated increase, "
            "as a share of the baseline's value."
        ),
    ] = None
    min: Annotated[Fraction | None, doc("Smallest tolerated value.")] = None
    max: Annotated[
        Amount | None,
        doc(
            f"{list_errors()}, custom errors: largest tolerated value, as a plain number; for wer, "
            "0.12 is 12 %."
        ),
    ] = None

    @property
    def lower_is_better(self) -> bool:
        """Whether a lower value of the metric is better."""
        return (self.higher_is_better if self.use else self.definition().higher_is_better) is False

    @property
    def is_share(self) -> bool:
        """Whether values are shares; otherwise they are plain numbers.

        The values of a custom metric are treated as shares if higher values are better.
        """
        metric = self.definition().metric
        return not self.lower_is_better if metric is None else metric.is_share

    def definition(self) -> MetricDefinition:
        """Return the definition of the gate's metric, with defaults filled in."""
        read: dict[str, Any] = {"output": self.output, "decode": self.decode}
        if self.use:
            return MetricDefinition(use=self.use, per=self.per, **read)
        name = self.name or DEFAULT_FOR_CLASSES
        defaults = {**METRICS[name].options}
        if "average" in defaults:
            defaults["average"] = "macro" if self.positive is None else "binary"
        options: dict[str, Any] = {
            option: default if (given := getattr(self, option)) is None else given
            for option, default in defaults.items()
        }
        return MetricDefinition(name=name, **{"positive": self.positive, **read, **options})


@gate_kind
@dataclass(frozen=True, slots=True, kw_only=True)
class MetricGate(TaskMetricGate):
    """A task metric, relative to the baseline or absolute.

    `max_drop` and `max_increase` are relative to the baseline on the same rows, `min` and `max` are
    absolute. These four keys are limits; the other keys define the metric.
    """

    kind: Literal["metric"] = "metric"


FEWEST_SLICE_ROWS = 20
"""Number of rows below which no slice is judged.

For fewer rows, only metrics that count right rows have an interval.
"""

_USUAL_SLICE_ROWS = 50
"""Default fewest rows of a judged slice, unless a limit needs more."""

_ERROR = 0.05
"""Error rate of one end of an interval."""


@gate_kind
@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesGate(TaskMetricGate):
    """A task metric in each slice of scored rows, with one family-wise error rate.

    The section `slices` names the slices.
    """

    kind: Literal["slices"] = "slices"
    min_rows: Annotated[
        int | None,
        Ge(FEWEST_SLICE_ROWS),
        doc("Fewest rows of a judged slice; default: that of the section `slices`."),
    ] = None

    def count_needed_rows(self) -> int:
        """Return the fewest rows with which a slice can meet every limit.

        With this number of rows, a slice meets `min` if the candidate is right on all rows. The
        slice meets `max_drop` if the candidate is right on all rows on which the baseline is right.
        The number is computed for shares of right rows; for other metrics, it is
        `FEWEST_SLICE_ROWS`.
        """
        if not isinstance(self.definition().method, CountedRows):
            return FEWEST_SLICE_ROWS
        needed = [float(FEWEST_SLICE_ROWS)]
        if self.max_drop and self.max_drop < 1:
            # If no row is right only in the baseline, the lower end of Tango's interval is
            # -z^2 / (rows + z^2).
            square = NormalDist().inv_cdf(1 - _ERROR) ** 2
            needed.append(math.floor(square * (1 - self.max_drop) / self.max_drop) + 1)
        if self.min and self.min < 1:
            # Without a wrong row, Clopper and Pearson's interval begins at 5% ^ (1 / rows).
            needed.append(math.ceil(math.log(_ERROR) / math.log(self.min)))
        return int(max(needed))

    @property
    def fewest_rows(self) -> int:
        """The fewest rows of a judged slice."""
        return self.min_rows or max(_USUAL_SLICE_ROWS, self.count_needed_rows())


@gate_kind
@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyGate(TargetGate):
    """Latency in paired runs or as quantiles.

    `max_regression` limits paired runs relative to the baseline, and `faster_than` relative to the
    export. Limits of quantiles are absolute.
    """

    kind: Literal["latency"] = "latency"
    max_regression: Annotated[
        Fraction | None, doc("Largest tolerated slow-down against the baseline.")
    ] = None
    p50: Annotated[
        Seconds | None, doc("Median; enforced on dedicated targets, advisory elsewhere.")
    ] = None
    p90: Annotated[
        Seconds | None, doc("90th percentile; enforced on dedicated targets, advisory elsewhere.")
    ] = field(default=None, metadata=OMIT_DEFAULT)
    p95: Annotated[
        Seconds | None, doc("95th percentile; enforced on dedicated targets, advisory elsewhere.")
    ] = field(default=None, metadata=OMIT_DEFAULT)
    p99: Annotated[
        Seconds | None, doc("99th percentile; enforced on dedicated targets, advisory elsewhere.")
    ] = None
    faster_than: Annotated[
        Literal["fp32"] | None,
        doc("Every other variant must be faster than the export, with 95 % confidence."),
    ] = None
    min_speedup: Annotated[
        Fraction | None,
        doc("Smallest speed-up: 10% means that fp32 takes at least 1.1 times as long."),
    ] = None

    def quantiles(self) -> Mapping[str, tuple[float, float | None]]:
        """Return the share and the limit in seconds of each quantile, by name."""
        return {
            "p50": (0.5, self.p50),
            "p90": (0.9, self.p90),
            "p95": (0.95, self.p95),
            "p99": (0.99, self.p99),
        }

    def request(self) -> MeasurementRequest:
        """Return the regressions to detect; latency is always measured."""
        tolerances = _make_tolerances(self.kind, self.max_regression)
        if self.min_speedup:
            tolerances["speedup"] = (1 / (1 + self.min_speedup) - 1,)
        return MeasurementRequest(tolerances=tolerances)

    def find_problems(self) -> Iterator[tuple[str, str]]:
        """Yield a problem if a limit is missing, unreachable or without effect."""
        if self == LatencyGate():
            yield (
                "",
                (
                    "a latency gate needs 'max_regression', 'p50', 'p90', 'p95', "
                    "'p99' or 'faster_than'"
                ),
            )
        yield from _find_zero_regression(self.max_regression)
        if self.min_speedup is not None and self.faster_than is None:
            yield "min_speedup", "'min_speedup' needs 'faster_than: fp32'"


@gate_kind
@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputGate(TargetGate):
    """Requests per second of one session that several threads call concurrently."""

    kind: Literal["throughput"] = "throughput"
    counts: ClassVar[str] = "sessions"
    concurrency: Annotated[int, Ge(1), Le(256), doc("Requests in flight at any moment.")] = 4
    max_regression: Annotated[
        Fraction | None,
        doc("Largest tolerated increase of the time per request under load, against the baseline."),
    ] = None
    min: Annotated[
        PerSecond | None,
        doc("Fewest requests per second; enforced on dedicated targets, advisory elsewhere."),
    ] = None

    def request(self) -> MeasurementRequest:
        """Return the concurrency to measure, and the regression to detect."""
        tolerances = _make_tolerances(self.kind, self.max_regression)
        return MeasurementRequest(throughput=(self.concurrency,), tolerances=tolerances)

    def find_problems(self) -> Iterator[tuple[str, str]]:
        """Yield a problem if the limit is missing or cannot be met."""
        if self.max_regression is None and self.min is None:
            yield "", "a throughput gate needs 'max_regression' or 'min'"
        yield from _find_zero_regression(self.max_regression)


@gate_kind
@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStartGate(TargetGate):
    """Time in which a fresh process builds the session and runs the first inference.

    The session is built from the file. The two times are separate.
    """

    kind: Literal["cold_start"] = "cold_start"
    counts: ClassVar[str] = "processes"
    figures: ClassVar[tuple[str, ...]] = ("load", "first")
    load: Annotated[
        Seconds | None,
        doc("Median time to build the session; enforced on dedicated targets, advisory elsewhere."),
    ] = None
    first: Annotated[
        Seconds | None,
        doc(
            "Median time of the first inference; enforced on dedicated targets, advisory elsewhere."
        ),
    ] = None
    max_regression: Annotated[
        Fraction | None, doc("Largest tolerated slow-down of either time against the baseline.")
    ] = None

    def request(self) -> MeasurementRequest:
        """Request fresh processes, and the regression to detect."""
        return MeasurementRequest(
            starts=True, tolerances=_make_tolerances(self.kind, self.max_regression)
        )

    def find_problems(self) -> Iterator[tuple[str, str]]:
        """Yield a problem if the limit is missing or cannot be met."""
        if (self.load, self.first, self.max_regression) == (None, None, None):
            yield "", "a cold_start gate needs 'load', 'first' or 'max_regression'"
        yield from _find_zero_regression(self.max_regression)


@gate_kind
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGate(TargetGate):
    """Peak resident memory that a model adds to a fresh process.

    The process loads the model and answers requests.
    """

    kind: Literal["memory"] = "memory"
    counts: ClassVar[str] = "processes"
    figures: ClassVar[tuple[str, ...]] = ("peak",)
    max: Annotated[Bytes | None, doc("Largest tolerated median peak.")] = None
    max_regression: Annotated[
        Fraction | None, doc("Largest tolerated increase against the baseline.")
    ] = None

    def request(self) -> MeasurementRequest:
        """Request fresh processes, and the regression to detect."""
        return MeasurementRequest(
            starts=True, tolerances=_make_tolerances(self.kind, self.max_regression)
        )

    def find_problems(self) -> Iterator[tuple[str, str]]:
        """Yield a problem if the limit is missing or cannot be met."""
        if self.max is None and self.max_regression is None:
            yield "", "a memory gate needs 'max' or 'max_regression'"
        yield from _find_zero_regression(self.max_regression)


@gate_kind
@dataclass(frozen=True, slots=True, kw_only=True)
class SizeGate(TargetGate):
    """Size of the model on disk, external data included."""

    kind: Literal["size"] = "size"
    counts: ClassVar[str] = "model"
    max: Annotated[Bytes, doc("Largest tolerated size.")]


def select_gates(pipeline: Iterable[Gate], target: Iterable[TargetGate]) -> tuple[Gate, ...]:
    """Return the gates of a pipeline that apply on a target.

    The target's gates replace those of the same kind.
    """
    own = tuple(target)
    kinds = {gate.kind for gate in own}
    return (*(gate for gate in pipeline if gate.kind not in kinds), *own)


def derive_measurement_request(gates: Iterable[Gate]) -> MeasurementRequest:
    """Return what a benchmark must measure for the gates."""
    requests = [gate.request() for gate in gates]
    limits: dict[str, set[float]] = {}
    for request in requests:
        for kind, tolerances in request.tolerances.items():
            limits.setdefault(kind, set()).update(tolerances)
    return MeasurementRequest(
        throughput=tuple(sorted({level for request in requests for level in request.throughput})),
        starts=any(request.starts for request in requests),
        tolerances={kind: tuple(sorted(values)) for kind, values in sorted(limits.items())},
    )


def find_gate_kind(figure: str) -> str:
    """Return the kind of gate that judges a metric of `PairedRatios`."""
    return next((kind for kind, gate in GATES.items() if figure in gate.figures), "throughput")
