"""Gates, verdicts and decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Literal, NoReturn, TypeAlias, cast

from annotated_types import Ge, Le, doc

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.attestation import Attested
from onnx_ops.domain.execution import Execution
from onnx_ops.domain.inputs import GroupRule, InputGroup
from onnx_ops.domain.metric import IGNORED_TOKEN, TOP_K, Average, MetricDefinition, MetricName
from onnx_ops.domain.quantities import LATER, Amount, Bytes, Count, Fraction, PerSecond, Seconds
from onnx_ops.domain.standing import Standing


class Verdict(Enum):
    """PASS < INCONCLUSIVE < ERROR < FAIL; verdicts combine by taking the worst."""

    PASS = "pass"  # noqa: S105 (a verdict, not a password)
    INCONCLUSIVE = "inconclusive"
    ERROR = "error"
    FAIL = "fail"

    @property
    def rank(self) -> int:
        return _RANKS[self]

    def __lt__(self, other: Verdict) -> bool:
        return self.rank < other.rank

    def __bool__(self) -> NoReturn:
        raise TypeError("a verdict has four values; compare it with Verdict.PASS")

    @property
    def exit_code(self) -> int:
        return _EXIT_CODES[self]


_RANKS = {Verdict.PASS: 0, Verdict.INCONCLUSIVE: 1, Verdict.ERROR: 2, Verdict.FAIL: 3}
_EXIT_CODES = {Verdict.PASS: 0, Verdict.INCONCLUSIVE: 3, Verdict.ERROR: 4, Verdict.FAIL: 1}


def combine(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of them; INCONCLUSIVE if there are none, since silence is not success."""
    return max(verdicts, key=lambda v: v.rank, default=Verdict.INCONCLUSIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityGate:
    """Same function: float variants against the float64 noise floor, quantized ones by structural invariants."""

    kind: Literal["parity"] = "parity"
    noise_factor: Annotated[
        float, Ge(1), Le(1000), doc("Allowed error as a multiple of the source's own float32 noise.")
    ] = 10.0
    weight_steps: Annotated[
        float, Ge(0.5), Le(2), doc("Largest error of a quantized weight, in quantization steps.")
    ] = 0.51
    activation_noise: Annotated[
        float, Ge(1), Le(10), doc("Largest in-range error of a quantized activation, in units of step / sqrt(12).")
    ] = 1.74
    saturation: Annotated[Fraction, doc("Largest share of an activation's values outside its quantized range.")] = 0.1
    clipping: Annotated[
        float, Ge(1), doc("Largest energy that an activation's range cuts off, in multiples of that lost by rounding.")
    ] = field(default=100.0, metadata=LATER)
    stretch: Annotated[
        float, Ge(1), doc("Widest range of an activation or a weight, in multiples of what its values span.")
    ] = field(default=2.5, metadata=LATER)
    groups: Annotated[
        Mapping[InputGroup, GroupRule],
        doc(
            "What a difference on a kind of inputs does: fail, advise or ignore. By default it fails where callers can "
            "send such inputs, else it advises."
        ),
    ] = field(default_factory=dict, hash=False, metadata=LATER)

    def rule(self, group: str, *, inside: bool) -> GroupRule:
        """What a difference on the inputs of that group does."""
        return self.groups.get(cast("InputGroup", group.partition(":")[0]), "fail" if inside else "advise")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricGate:
    """A task metric, against the baseline on the same rows (`max_drop`, `max_increase`) or absolute (`min`, `max`).

    Limits are judged; everything else says what is measured.
    """

    kind: Literal["metric"] = "metric"
    name: Annotated[MetricName | None, doc("The metric; accuracy if neither it nor `use` is given.")] = None
    use: Annotated[
        str, doc("An own metric, `package.module:function`, called with arrays (predictions, labels); gives a float.")
    ] = ""
    higher_is_better: Annotated[bool | None, doc("Of an own metric, which must say it.")] = None
    k: Annotated[Count | None, doc("top_k: the label is among so many highest scores; 5 if not given.")] = None
    average: Annotated[Average | None, doc("f1: over classes; binary where `positive` is given, else macro.")] = None
    positive: Annotated[
        str | int | None, doc("f1 (binary) and auc: the positive label; if not given, the greater of two.")
    ] = None
    output: Annotated[str | None, doc("ONNX output to read; if not given, the first that fits.")] = None
    ignore: Annotated[int | None, doc("token_agreement: label of tokens that do not count; -100 if not given.")] = None
    max_drop: Annotated[Fraction | None, doc("Largest tolerated drop, in percentage points.")] = None
    max_increase: Annotated[
        Fraction | None, doc("mae, rmse, own errors: largest tolerated growth, as a share of the baseline's.")
    ] = None
    min: Annotated[Fraction | None, doc("Smallest tolerated value.")] = None
    max: Annotated[Amount | None, doc("mae, rmse, own errors: largest tolerated value, in the label's unit.")] = None

    def definition(self) -> MetricDefinition:
        """What it measures, with what it leaves out filled in."""
        if self.use:
            return MetricDefinition(use=self.use, output=self.output)
        name = self.name or "accuracy"
        average = self.average or ("macro" if self.positive is None else "binary")
        return MetricDefinition(
            name=name,
            k=(self.k or TOP_K) if name == "top_k" else None,
            average=average if name == "f1" else None,
            positive=self.positive,
            output=self.output,
            ignore=(IGNORED_TOKEN if self.ignore is None else self.ignore) if name == "token_agreement" else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyGate:
    """Latency against the baseline, measured now and side by side; or absolute quantiles; or against the export."""

    kind: Literal["latency"] = "latency"
    max_regression: Annotated[Fraction | None, doc("Largest tolerated slow-down against the baseline.")] = None
    p50: Annotated[Seconds | None, doc("Median; enforced on dedicated targets, advisory elsewhere.")] = None
    p90: Annotated[Seconds | None, doc("90th percentile; enforced on dedicated targets, advisory elsewhere.")] = field(
        default=None, metadata=LATER
    )
    p95: Annotated[Seconds | None, doc("95th percentile; enforced on dedicated targets, advisory elsewhere.")] = field(
        default=None, metadata=LATER
    )
    p99: Annotated[Seconds | None, doc("99th percentile; enforced on dedicated targets, advisory elsewhere.")] = None
    faster_than: Annotated[
        Literal["fp32"] | None, doc("Every other variant must be faster than the export, with confidence.")
    ] = None
    min_speedup: Annotated[
        Fraction | None, doc("By how much it must be faster: 10% means that fp32 takes at least 1.1 times as long.")
    ] = None

    def quantiles(self) -> Mapping[str, tuple[float, float | None]]:
        """Return the share below and the limit of each quantile by its name."""
        return {"p50": (0.5, self.p50), "p90": (0.9, self.p90), "p95": (0.95, self.p95), "p99": (0.99, self.p99)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputGate:
    """Requests answered per second by one session that several threads call at once, measured under that load."""

    kind: Literal["throughput"] = "throughput"
    concurrency: Annotated[int, Ge(1), Le(256), doc("Requests in flight at any moment.")] = 4
    max_regression: Annotated[
        Fraction | None, doc("Largest tolerated growth of the time per request under load, against the baseline.")
    ] = None
    min: Annotated[
        PerSecond | None, doc("Fewest requests per second; enforced on dedicated targets, advisory elsewhere.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStartGate:
    """A fresh process: the time to build the session from the file, and the time of the first inference."""

    kind: Literal["cold_start"] = "cold_start"
    load: Annotated[
        Seconds | None, doc("Median time to build the session; enforced on dedicated targets, advisory elsewhere.")
    ] = None
    first: Annotated[
        Seconds | None, doc("Median time of the first inference; enforced on dedicated targets, advisory elsewhere.")
    ] = None
    max_regression: Annotated[Fraction | None, doc("Largest tolerated slow-down of each against the baseline.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGate:
    """Peak resident memory that loading the model and answering requests adds to a fresh process."""

    kind: Literal["memory"] = "memory"
    max: Annotated[Bytes | None, doc("Largest tolerated median peak.")] = None
    max_regression: Annotated[Fraction | None, doc("Largest tolerated growth against the baseline.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeGate:
    """Size of the model on disk, external data included."""

    kind: Literal["size"] = "size"
    max: Annotated[Bytes, doc("Largest tolerated size.")]


Gate = ParityGate | MetricGate | LatencyGate | ThroughputGate | ColdStartGate | MemoryGate | SizeGate
TargetGate = ParityGate | LatencyGate | ThroughputGate | ColdStartGate | MemoryGate | SizeGate
"""A target may have limits of its own; what a model is for is the pipeline's affair."""


def gates_on(pipeline: Iterable[Gate], target: Iterable[TargetGate]) -> tuple[Gate, ...]:
    """The gates of a pipeline on a target: each kind that the target has gates of is the target's alone."""
    own = tuple(target)
    kinds = {gate.kind for gate in own}
    return (*(gate for gate in pipeline if gate.kind not in kinds), *own)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """One line of the gate table.

    `estimate`, `low`, `high` and `bound` (the number behind `limit`) are in `unit`; `n` counts what they rest on, and
    `groups` in how many groups it came. `p_value` is the chance of a figure at least as good if the truth were at the
    limit. An advisory result is shown and never enters a verdict.
    """

    gate: str
    metric: str
    limit: str
    verdict: Verdict
    reason: str
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    bound: float | None = None
    unit: str = ""
    n: int = 0
    advisory: bool = False
    groups: int = field(default=0, metadata=LATER)
    p_value: float | None = field(default=None, metadata=LATER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The verdicts of one variant on one target together.

    `faster_than_export` says whether a paired comparison shows, with confidence, that the variant beats the
    float export on this target; None for the export itself or where it was not measured.
    """

    variant: str
    target: str
    results: tuple[GateResult, ...]
    faster_than_export: bool | None = None
    latency_ratio: float | None = None
    standing: Standing | None = field(default=None, metadata=LATER)

    @property
    def verdict(self) -> Verdict:
        return combine(r.verdict for r in self.results if not r.advisory)

    @property
    def verdicts(self) -> Mapping[str, Verdict]:
        """The verdict of each kind of gate."""
        by_gate: dict[str, list[Verdict]] = {}
        for result in self.results:
            if not result.advisory:
                by_gate.setdefault(result.gate, []).append(result.verdict)
        return {gate: combine(found) for gate, found in by_gate.items()}

    @property
    def reason(self) -> str:
        """The reason of the worst result, in one line."""
        binding = [r for r in self.results if not r.advisory]
        if not binding:
            return "no gate applied: nothing was judged"
        worst = max(binding, key=lambda r: r.verdict.rank)
        if worst.verdict is Verdict.PASS:
            return "all gates passed"
        return f"{worst.gate}: {worst.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """What is signed: one decision bound to the content it was made about.

    `batchable` says that each row's answer was seen not to depend on the rows beside it, so that a server may run
    requests together. `custom_ops` are the libraries of operators that the target declares, `execution` says
    how it runs a model.
    `decided_at` is ISO 8601 in UTC; `sequence` grows with every decision (milliseconds since the epoch), and the
    highest valid one counts.
    """

    schema: int = 1
    model: str
    release: Digest
    variant: str
    target: str
    manifest: Digest
    target_digest: Digest
    gates_digest: Digest
    evidence: Digest
    verdict: Verdict
    verdicts: Mapping[str, Verdict]
    batchable: bool = False
    custom_ops: tuple[Digest, ...] = ()
    execution: Execution = field(default_factory=Execution)
    decided_at: str
    sequence: int


SignedDecision: TypeAlias = Attested[DecisionRecord]
