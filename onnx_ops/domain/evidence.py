"""Evidence: the measurements of one variant on one target, without judgement."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.execution import RuntimeFacts
from onnx_ops.domain.quantities import OMIT_DEFAULT
from onnx_ops.domain.target import HardwareFingerprint

EXPORT = "fp32"
"""Name of the variant that the export stage makes."""

NanPolicy = Literal["refused", "answered", "passed on", ""]
"""Treatment of NaN by the source model.

The model refuses inputs with NaN, answers with numbers, or passes NaN on to its answer. The value
is empty where no input can be NaN.
"""


NAN_PROPERTY = "onnx-ops.nan"
"""Property of an ONNX file that contains the `NanPolicy` of its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLimits:
    """Inputs that the source model refuses, and the rows that it ran.

    `refused` maps each refused group of inputs to the error text of the source. `nan` describes how
    the source treats NaN. On a slow source, only `rows` of the `samples` rows were run. Both
    numbers are 0 if all rows were run.
    """

    nan: NanPolicy = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    rows: int = field(default=0, metadata=OMIT_DEFAULT)
    samples: int = field(default=0, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeStructure:
    """Comparison of the trees of an export and of its source, node by node.

    `trees`, `splits` and `leaves` count the trees, splits and leaves of the source. `changed`
    counts the nodes that differ, and trees that only one model has; `differences` describes the
    first differences.
    """

    trees: int
    splits: int
    leaves: int
    changed: int
    differences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMeasurement:
    """One quantized activation, measured on real rows.

    Attributes:
        values: number of measured values.
        noise: the largest |read back - written| of values inside the range. The unit is step /
            sqrt(12), the standard deviation of rounding. Rounding alone causes at most sqrt(3).
        saturated: share of values outside the range, without those below a range that begins at 0.
        departure: root mean square distance from the float export's value, in the unit of `noise`.
            All earlier layers contribute to it. None where the float export has no such value.
        clipping: mean square of what the range cuts off, relative to the mean square of 8-bit
            rounding over that range.
        stretch: width of the range relative to the width of the values, at the end where the range
            fits best. None if the range can be the fixed range of a function (Softmax, Sigmoid,
            Tanh). Also None if a value is NaN or infinite, or if all values are 0.
    """

    tensor: str
    values: int
    noise: float
    saturated: float
    departure: float | None = None
    clipping: float | None = field(default=None, metadata=OMIT_DEFAULT)
    stretch: float | None = field(default=None, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatOperator:
    """An operator of a quantized variant that runs in float.

    Operators of this kind can run in int8. `setting` is the setting with which this operator runs
    in int8; empty if there is none.
    """

    name: str
    op_type: str
    reason: str
    setting: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A cause of a slow or wrong variant on its target, and the setting that fixes it.

    `setting` is what to write into the pipeline or target file. `nodes` are the names of the
    affected nodes; nodes without a name are omitted.
    """

    finding: str
    setting: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Coverage:
    """The matrix products and convolutions that run in int8, and those in float.

    They are determined after the runtime's graph optimization.

    `int8` has the names of operators in the export, and `floats` describes the operators that run
    in float. `unheeded` are operators that were excluded from quantization, but that the runtime
    runs in int8.
    """

    int8: tuple[str, ...] = ()
    floats: tuple[FloatOperator, ...] = ()
    unheeded: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The number of operators that run in int8, as a sentence.

        The sentence names kinds of recurrent layers that run in float.
        """
        recurrent = sorted({one.op_type for one in self.floats} & {"GRU", "LSTM", "RNN"})
        kinds = "/".join(("MatMul/Conv/Gemm", *recurrent))
        return f"{len(self.int8)} of {len(self.int8) + len(self.floats)} {kinds} run in int8"


EVIDENCE_SCHEMA = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityColumn:
    """One column of an output, measured on real rows.

    `scale` is its largest |answer|, `error` its largest error, and `noise` its noise as in
    `ParityMeasurement`. The gate detects no error up to `noise` times its `noise_factor`.
    """

    column: str
    scale: float
    error: float
    noise: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityMeasurement:
    """One output on one group of inputs.

    Floats are measured by column, an index of the last axis. Behind a convolution it is an index of
    the channels, and in a joined output each segment counts separately. `error`, `noise` and
    `ratio` = error / noise are the values of the worst `column`, whose largest |answer| is `scale`.
    `error` is max |onnx - src64|. `noise` combines max |src32 - src64| and the rounding error that
    is computed from the graph (see `statistics.parity.measure_output`). `columns` are the columns
    on real rows where small errors are hardest to detect.

    For outputs other than floats, `error` is the share of rows that differ. Rows for which
    rounding can change the source's answer are not counted. `mismatch` names a difference that no
    tolerance covers, such as another shape, other non-finite values, or an error of the export.
    `tolerance` is the fixed tolerance that replaces the noise where the source runs in only one of
    float32 and float64.

    A source with discontinuities (trees) is also run on inputs that are jittered by rounding. Of
    the rows that differ beyond the noise, `explained` counts those within the range of the source's
    answers. `unexplained` counts the other rows; only these determine the error.

    `inside`: whether callers can send inputs of this group. `example` describes the row with the
    largest difference; empty if the output does not diverge.
    """

    output: str
    group: str
    rows: int
    error: float
    noise: float
    ratio: float
    mismatch: str = ""
    tolerance: str = ""
    explained: int = 0
    unexplained: int = 0
    inside: bool = field(default=True, metadata=OMIT_DEFAULT)
    example: str = field(default="", metadata=OMIT_DEFAULT)
    column: str = field(default="", metadata=OMIT_DEFAULT)
    scale: float = field(default=0.0, metadata=OMIT_DEFAULT)
    columns: tuple[ParityColumn, ...] = field(default=(), metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInvariance:
    """Comparison of one output for rows in one batch and for the same rows one by one.

    `error` is max |f(batch)[i] - f(row i)|; for labels, it is the share of rows that differ.
    `ratio` is `error` in units of the source's noise, or of a tenth of the fixed tolerance if the
    noise is not measured. `changed` is the share of rows whose class (arg max, or label) differs;
    None for an output that has no classes.
    """

    output: str
    rows: int
    error: float
    ratio: float
    changed: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first node at which an export that fails parity departs from its source.

    `ratio` is error / noise of the value that `node` computes; `scope` is the source's module path.
    Without a node, `note` gives the reason.
    """

    node: str = ""
    op_type: str = ""
    scope: str = ""
    ratio: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMeasurement:
    """Largest distance of a quantized weight from its float original.

    `steps` is this distance in quantization steps. `output_error` is measured where rounding does
    not explain the distance; otherwise it is None. It is the mean square error of the layer's
    outputs on real rows, relative to the error with plain rounding. For a bias (`bias`), it is
    relative to the error of the layer with the original bias. `stretch` is the range of the type's
    levels divided by the range of the levels in use. It is measured only for weights with 8-bit
    levels, and is None for other weights.
    """

    tensor: str
    steps: float
    elements: int
    output_error: float | None = field(default=None, metadata=OMIT_DEFAULT)
    stretch: float | None = field(default=None, metadata=OMIT_DEFAULT)
    bias: bool = field(default=False, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The first `used` of the `total` rows of a data set."""

    data: str
    used: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedCounts:
    """A metric of two models on the same rows.

    Both models are right on `both` rows, one of them on `only_baseline` or `only_candidate` rows,
    and neither on the rest of the `n` rows. `against` names the other model, `champion` or `fp32`;
    empty for an absolute value.

    Where the data names groups, `groups` counts them. `change_effect` and `value_effect` are the
    design effects of the change and of the candidate's own value. A design effect is the number of
    rows that contain as much information as one independent row. `equal`: whether all outputs of
    both models are equal on every row, so that the change is exactly 0.
    """

    metric: str
    against: str
    n: int
    both: int
    only_baseline: int
    only_candidate: int
    groups: int = field(default=0, metadata=OMIT_DEFAULT)
    change_effect: float = field(default=1.0, metadata=OMIT_DEFAULT)
    value_effect: float = field(default=1.0, metadata=OMIT_DEFAULT)
    equal: bool = field(default=False, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its two-sided confidence interval."""

    estimate: float
    low: float
    high: float

    @classmethod
    def point(cls, value: float) -> Interval:
        """Return the interval of an exact value."""
        return cls(estimate=value, low=value, high=value)

    @property
    def is_point(self) -> bool:
        """Return whether the value is exact."""
        return self.low == self.estimate == self.high

    @property
    def is_finite(self) -> bool:
        """Return whether no number is NaN or infinite."""
        return all(map(math.isfinite, (self.estimate, self.low, self.high)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreComparison:
    """The values of a metric for two models; the metric is not a count of rows.

    `metric` is the label of its definition; `against` is as in `PairedCounts`. `baseline` is the
    other model's value on the same rows, and `reference` is this value with its interval.
    `difference` is candidate minus baseline, and `ratio` is candidate divided by baseline; each is
    None where it is undefined for the metric. If there is no value, one field gives the reason.
    `undefined`: the metric is undefined on these rows. `failed`: the measurement failed. `broken`:
    the model's own outputs are NaN or infinite, a failure of the model.

    `groups` is the number of groups if the data names groups; 0 otherwise. `effective` is the
    effective number of rows (or groups) that contribute to the candidate's error: (sum of errors)^2
    / sum of squared errors. `heavy` has the indices of the worst rows, which together contribute
    half of the candidate's error. The worst row is first, and at most ten are kept.

    If few rows (or groups) cause most of the losses, `carrying` counts those with the largest
    losses. Without them, the losses of both models are spread evenly enough. `rest` is the
    difference or ratio of the remaining rows; None if they have no loss.
    """

    metric: str
    against: str
    n: int
    candidate: Interval | None = None
    baseline: float | None = None
    difference: Interval | None = None
    ratio: Interval | None = None
    confidence: float = 0.0
    method: str = ""
    undefined: str = ""
    failed: str = ""
    broken: str = field(default="", metadata=OMIT_DEFAULT)
    groups: int = field(default=0, metadata=OMIT_DEFAULT)
    effective: float | None = field(default=None, metadata=OMIT_DEFAULT)
    heavy: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT)
    reference: Interval | None = field(default=None, metadata=OMIT_DEFAULT)
    carrying: int = field(default=0, metadata=OMIT_DEFAULT)
    rest: float | None = field(default=None, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceMeasurement:
    """Task metrics on the rows of one slice.

    `slice` names the slice by its column and value, such as `country=DE`. `rows` counts its rows.
    `metrics` and `scores` are those of `Evidence`, for the metrics that gates judge by slice.
    """

    slice: str
    rows: int
    metrics: tuple[PairedCounts, ...] = ()
    scores: tuple[ScoreComparison, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyComparison:
    """Paired latency of the variant (B) relative to another model (A).

    Both models are measured in the same run, on one machine.

    `log_ratios[i]` is log(median B / median A) of the block pairs of session pair i.
    `self_log_ratios` is the same for A against itself, the measure of the host's noise. `baseline`
    is the digest of A's file. `runs` counts the timed runs, and `preempted` those that were
    preempted. Each run is the mean of `calls` inferences; `calls` exceeds 1 where the target's
    clock is too coarse for a single inference.
    """

    against: str
    baseline: Digest
    log_ratios: tuple[tuple[float, ...], ...]
    self_log_ratios: tuple[tuple[float, ...], ...]
    runs: int
    preempted: int
    calls: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySamples:
    """Durations of single runs of the variant, in nanoseconds.

    The raw values are stored beside the evidence. `preempted` counts the preempted runs. Quantiles
    are computed from the other runs, or from all runs if all were preempted. `sorted_ns` has these
    runs in ascending order, so that a gate can count exceedances of any limit.
    """

    batch: int
    runs: int
    preempted: int
    quantiles_ns: Mapping[str, float]
    sorted_ns: tuple[int, ...] = ()


def throughput_metric_name(concurrency: int) -> str:
    """Return the metric name of the time per request under concurrent requests."""
    return f"concurrency {concurrency}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRatios:
    """A metric other than latency, of the variant (B) relative to another model (A).

    The two are measured alternately. `figure` is a `throughput_metric_name`, `load` or `first`
    (durations of a fresh process), or `peak` (its memory). `log_ratios[i]` is log(B / A) of pair i:
    of sessions under load, of processes otherwise. `self_log_ratios` is the same for A against
    itself, the measure of the host's noise. `baseline` is the digest of A's file.
    """

    figure: str
    against: str
    baseline: Digest
    log_ratios: tuple[tuple[float, ...], ...]
    self_log_ratios: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputMeasurement:
    """Requests per second of fresh sessions of the variant.

    `concurrency` threads call each session concurrently. `per_second` has one value per session,
    the median of its windows. `requests` counts the requests of all windows.
    """

    concurrency: int
    batch: int
    requests: int
    per_second: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingMeasurement:
    """Rows per second of one session under concurrent requests.

    At any moment, `threads` requests run, each with `rows` rows.
    """

    threads: int
    rows: int
    rows_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStartMeasurement:
    """Fresh processes that load the variant and answer `requests` requests.

    There is one value per process. `load_s` is the time to build the session, with the runtime
    imported and the file in the page cache. `first_s` is the time of the first inference.
    `peak_bytes` is the peak of resident memory from the start of loading, minus the memory that was
    resident just before. It is empty if the value of a process is unknown or 0.
    """

    batch: int
    requests: int
    load_s: tuple[float, ...]
    first_s: tuple[float, ...]
    peak_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChampionFacts:
    """The target's champion when the variant was measured.

    The fields are its version, the digest of its files, and its size.
    """

    version: str
    manifest: Digest
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemResult:
    """The judgement of one step of the section `system`, on all inputs.

    The project's own code is compared with the export and the steps around it. The steps are judged
    where they are measured, since the tolerances belong to their values. `step` can also be
    `answer`, the final answers, or `source`, which must answer equal inputs equally.
    `estimate`, `high` and `bound` are in `unit`.
    """

    step: str
    verdict: Literal["pass", "inconclusive", "error", "fail"]
    limit: str
    reason: str
    estimate: float | None = None
    high: float | None = None
    bound: float | None = None
    unit: str = ""
    inputs: int = 0
    advisory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All measurements of one variant on one target.

    Attributes:
        failure: reason for a missing measurement. The cause is the environment, never the model.
        baseline: the primary model for comparisons: `champion`, or else `fp32`; empty if there is
            neither.
        conditions: conditions of the machine that can disturb measurements, such as the load.
        size_bytes: size of the model files that the target loads.
        parity: agreement of the variant with the source on the target; empty if it is quantized.
        export_parity: agreement of the export with the source, from stage `validate`.
        raw: digest of the timed samples and of the metrics' values by row (`.npz`).
        divergence: where the export departs from its source. Without such a departure: where the
            values on the target depart from those on one CPU thread.
        recipe: sentences that describe how the variant was made.
        advice: what makes the variant slow or wrong on the target.
        opsets: the opset of each domain that the variant imports.
        operators: number of the variant's nodes by operator and version of the operator's
            definition (`Gemm-13`).
        champion: the champion at the time of measurement, even if it has the same files as the
            variant and is not compared.
        grouped: why the scored rows seem to form groups although no key of the pipeline file names
            groups.
        scored_on: machines that scored the rows in shards; empty if the measuring machine scored
            them.
        sampled: the part of the data set that is scored; None if all rows are scored.
        slices: the metrics of each slice of the scored rows.
        unused_inputs: inputs on which no answer of the export depends.
        system: comparison of the export and its steps with the project's own code; empty if the
            pipeline declares none.
    """

    schema: int = EVIDENCE_SCHEMA
    pipeline: str
    variant: str
    target: str
    quantized: bool
    release: Digest
    manifest: Digest
    target_digest: Digest
    dedicated: bool
    size_bytes: int
    hardware: HardwareFingerprint
    conditions: Mapping[str, str] = field(default_factory=dict)
    runtime: RuntimeFacts | None = None
    baseline: str = ""
    champion: ChampionFacts | None = field(default=None, metadata=OMIT_DEFAULT)
    parity: tuple[ParityMeasurement, ...] = ()
    export_parity: tuple[ParityMeasurement, ...] = ()
    batch_invariance: tuple[BatchInvariance, ...] = ()
    divergence: Divergence | None = None
    weights: tuple[WeightMeasurement, ...] = ()
    source: SourceLimits | None = None
    trees: TreeStructure | None = None
    unused_inputs: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    system: tuple[SystemResult, ...] = field(default=(), metadata=OMIT_DEFAULT)
    activations: tuple[ActivationMeasurement, ...] = ()
    coverage: Int8Coverage | None = None
    recipe: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()
    metrics: tuple[PairedCounts, ...] = ()
    scores: tuple[ScoreComparison, ...] = ()
    grouped: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    scored_on: tuple[HardwareFingerprint, ...] = field(default=(), metadata=OMIT_DEFAULT)
    sampled: SampledRows | None = field(default=None, metadata=OMIT_DEFAULT)
    slices: tuple[SliceMeasurement, ...] = field(default=(), metadata=OMIT_DEFAULT)
    opsets: Mapping[str, int] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    operators: Mapping[str, int] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    comparisons: tuple[LatencyComparison, ...] = ()
    latency: LatencySamples | None = None
    throughput: tuple[ThroughputMeasurement, ...] = ()
    scheduling: tuple[SchedulingMeasurement, ...] = field(default=(), metadata=OMIT_DEFAULT)
    starts: ColdStartMeasurement | None = None
    ratios: tuple[PairedRatios, ...] = ()
    raw: Digest | None = None
    failure: str = ""
