"""Evidence: what was measured about one variant on one target. Facts, no opinions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.quantities import OMIT_DEFAULT
from onnx_ops.domain.target import HardwareFingerprint

NanPolicy = Literal["refused", "answered", "passed on", ""]
"""What the source does with NaN: it refuses such inputs, answers them with numbers, or answers NaN; empty where no
input can hold one."""


NAN_PROPERTY = "onnx-ops.nan"
"""Property of an ONNX file that holds the `NanPolicy` of its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLimits:
    """What the source model does not answer: groups of inputs that it refuses, in its own words, and NaN.

    `rows` is how many of the `samples` rows a slow source was asked; both are 0 where it was asked all.
    """

    nan: NanPolicy = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    rows: int = field(default=0, metadata=OMIT_DEFAULT)
    samples: int = field(default=0, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeStructure:
    """The trees of an export beside those of its source, node by node.

    `trees`, `splits` and `leaves` count the source's; `changed` counts the nodes that differ, and `differences` tells
    the first of them.
    """

    trees: int
    splits: int
    leaves: int
    changed: int
    differences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMeasurement:
    """One quantized activation on real rows.

    `noise` is the largest |read back - written| of values inside the range, in units of step / sqrt(12), the standard
    deviation of rounding: rounding alone makes up to sqrt(3). `departure` is the root mean square distance from the
    float export's value in that unit, which all layers before share in; None where the float export has no such
    value. `saturated` is the share of values outside the range, without those below a range that begins at 0.
    `clipping` is the mean square of what the range cuts off, in the mean square of rounding to 8 bits over that range.
    `stretch` is how many times as far the range reaches as the values do, at the end where it fits best; None where the
    range may be that of a function (Softmax, Sigmoid, Tanh) and not of values, and where no value differs from 0.
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
    """An operator of a quantized variant that runs in float though its kind could run in int8, why, and which setting
    mends it; empty where none does."""

    name: str
    op_type: str
    reason: str
    setting: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Something that makes a variant slow or wrong on its target, and the setting that mends it.

    `setting` is what to write into the pipeline or target file; `nodes` are those that are meant, as far as it has
    names for them.
    """

    finding: str
    setting: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Coverage:
    """Which matrix products and convolutions run in int8 after the runtime's own optimization of the graph.

    `int8` and `floats` name them as the export does. `unheeded` are operators that were excluded from quantization
    and that the runtime runs in int8 all the same.
    """

    int8: tuple[str, ...] = ()
    floats: tuple[FloatOperator, ...] = ()
    unheeded: tuple[str, ...] = ()


EVIDENCE_SCHEMA = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityMeasurement:
    """One output on one group of inputs.

    `error` is max |onnx - src64|; `noise` is max(max |src32 - src64|, 2 eps max |src64|); `ratio` is error / noise.
    For integer and string outputs `error` is the share of rows that differ although the source is sure of them.
    `mismatch` names a difference of shape or of the non-finite values, which no tolerance covers. `tolerance` tells
    the fixed tolerance that took the noise's place where the source does not run in float64.

    Where the source itself jumps (trees), `explained` counts the rows that differ beyond the noise and lie within the
    source's answers to inputs jittered by rounding; `unexplained` those that do not, of which alone the error tells.

    `inside` says whether callers can send such inputs; `example` shows the row that is worst off, where one is off.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInvariance:
    """One output of real rows asked in one batch, against the same rows asked one by one.

    `error` is max |f(batch)[i] - f(row i)|; `ratio` is error in units of the source's noise. `changed` is the share
    of rows whose class (arg max, or label) differs, None of an output that has no classes.
    """

    output: str
    rows: int
    error: float
    ratio: float
    changed: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where an export that fails parity first departs from its source.

    `ratio` is error / noise of the value that `node` computes; `scope` is the source's module path. Without a node,
    `note` says why none could be named.
    """

    node: str = ""
    op_type: str = ""
    scope: str = ""
    ratio: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMeasurement:
    """Largest distance of a quantized weight from its float original, in quantization steps.

    Where that is more than rounding moves a weight, `output_error` is the mean square error of its layer's answers on
    real rows, over that of plain rounding; None where it was not measured. `stretch` is how many times as far the
    levels of its type reach as those that the weight uses, None where it has no 8-bit levels.
    """

    tensor: str
    steps: float
    elements: int
    output_error: float | None = field(default=None, metadata=OMIT_DEFAULT)
    stretch: float | None = field(default=None, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The first `used` of the `total` rows of a data set."""

    data: str
    used: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedCounts:
    """A metric of two models on the same rows.

    `both` rows are right in both, `only_baseline` and `only_candidate` in one, the rest of `n` in neither.
    `against` is `champion`, `fp32` or, for an absolute value, empty.

    Where the data names groups, `groups` counts them. It then takes `change_effect` times as many rows as of
    independent ones to know the change as well, and `value_effect` times as many for the candidate's own value.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its two-sided interval."""

    estimate: float
    low: float
    high: float

    @classmethod
    def point(cls, value: float) -> Interval:
        """Return the interval of an exact value."""
        return cls(estimate=value, low=value, high=value)

    @property
    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite."""
        return all(map(math.isfinite, (self.estimate, self.low, self.high)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreComparison:
    """A metric that is no count of rows: the candidate's value, and how it differs from another model's on them.

    `metric` is the label of its definition; `against` is as in `PairedCounts`. `baseline` is the other model's value on
    the same rows, `reference` the same with its interval. `difference` is candidate minus
    baseline, `ratio` candidate over baseline; an entry has those that make sense for its metric. Where there is no
    figure, `undefined` says why these rows give none, `failed` why it could not be measured, or `broken` what is wrong
    with the model's own answers (NaN, infinity), which is the model's failure.

    `groups` counts the groups that were taken in place of rows. `effective` is how many equally bad rows (or groups)
    would carry the candidate's error as evenly; `heavy` numbers the rows that carry half of it, the worst first.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyComparison:
    """Paired latency of the variant (B) against another model (A) on one machine, now.

    `log_ratios[i]` holds log(median B / median A) of the block pairs of session pair i; `self_log_ratios` the same
    for A against itself, the measure of the host's noise. Each run is the mean of `calls` inferences, more than one
    where the target's clock is too coarse.
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
    """Single runs of the variant in nanoseconds; raw values stand beside the evidence.

    Quantiles are of the runs that were not preempted; `preempted` counts the others. `sorted_ns` keeps those runs
    in order, so that a gate can count exceedances of any limit.
    """

    batch: int
    runs: int
    preempted: int
    quantiles_ns: Mapping[str, float]
    sorted_ns: tuple[int, ...] = ()


def throughput_metric_name(concurrency: int) -> str:
    """Return the name of the time per request with that many requests in flight."""
    return f"concurrency {concurrency}"


def find_gate_kind(figure: str) -> str:
    """Return the kind of gate that judges a metric of `PairedRatios`."""
    return {"load": "cold_start", "first": "cold_start", "peak": "memory"}.get(figure, "throughput")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRatios:
    """A figure other than latency of the variant (B) over that of another model (A), measured in turns, now.

    `figure` is a `throughput_metric_name`, `load` or `first` (durations of a fresh process), or `peak` (its memory).
    `log_ratios[i]` holds log(B / A) of pair i: of sessions under load, of processes otherwise; `self_log_ratios` the
    same for A against itself, the measure of the host's noise.
    """

    figure: str
    against: str
    baseline: Digest
    log_ratios: tuple[tuple[float, ...], ...]
    self_log_ratios: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputMeasurement:
    """Requests per second of fresh sessions of the variant, each called by `concurrency` threads at once.

    `per_second` holds one value a session, the median of its windows; `requests` counts those of all windows.
    """

    concurrency: int
    batch: int
    requests: int
    per_second: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStartMeasurement:
    """Fresh processes that load the variant and answer `requests` requests; one value a process.

    `load_s` is building the session, with the runtime imported and the file in the page cache; `first_s` the first
    inference. `peak_bytes` is the peak of resident memory from then on, less what was resident just before loading;
    empty where the system does not tell it.
    """

    batch: int
    requests: int
    load_s: tuple[float, ...]
    first_s: tuple[float, ...]
    peak_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeFacts:
    """What really ran: the providers asked for and used, and how many nodes each one took.

    `clock_resolution_ns` is the shortest step of the clock that times runs, measured; None in older evidence.
    """

    runtime: str
    version: str
    asked: tuple[str, ...]
    used: tuple[str, ...]
    nodes: Mapping[str, int]
    build: str = ""
    clock_resolution_ns: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChampionFacts:
    """The champion of the target when the variant was measured: its version, and its files' digest and bytes."""

    version: str
    manifest: Digest
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything measured about one variant on one target.

    `failure` says why a measurement is missing; it blames the environment, never the model. `raw` is the digest of
    the samples (`.npz`). `divergence` is that of the export, found where it is first compared with its source, or else
    that of the target from that place. `recipe` tells in sentences how the variant was made, `advice` what slows it
    down on the target. `opsets` are the versions that the variant imports by domain, `operators` counts its nodes by
    operator and version of its definition (`Gemm-13`). `champion` is what served then, also where its files are those
    of the variant, and there is nothing to compare. `grouped` says why the scored rows look as if some belonged
    together, where no key names groups. `sampled` is None where all rows of the data set are scored.
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
    activations: tuple[ActivationMeasurement, ...] = ()
    coverage: Int8Coverage | None = None
    recipe: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()
    metrics: tuple[PairedCounts, ...] = ()
    scores: tuple[ScoreComparison, ...] = ()
    grouped: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    sampled: SampledRows | None = field(default=None, metadata=OMIT_DEFAULT)
    opsets: Mapping[str, int] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    operators: Mapping[str, int] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    comparisons: tuple[LatencyComparison, ...] = ()
    latency: LatencySamples | None = None
    throughput: tuple[ThroughputMeasurement, ...] = ()
    starts: ColdStartMeasurement | None = None
    ratios: tuple[PairedRatios, ...] = ()
    raw: Digest | None = None
    failure: str = ""
