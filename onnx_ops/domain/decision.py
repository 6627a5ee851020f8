"""Verdicts, decisions, metrics that rank variants, and the recheck of champions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Literal, NoReturn, TypeAlias

from annotated_types import Ge, Le, doc

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.attestation import Attested
from onnx_ops.domain.evidence import Interval
from onnx_ops.domain.execution import Execution
from onnx_ops.domain.quantities import OMIT_DEFAULT, Notation

Preference: TypeAlias = Literal["latency", "size", "accuracy", "cost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The preference by which one of the passing variants is chosen.

    `objective: size` is short for `objective: {default: size}`.
    """

    default: Annotated[
        Preference,
        Notation.SHORT_FORM,
        doc(
            "Minimize latency, size (bytes of the file) or cost (of a request), "
            "or maximize accuracy (the task metric)."
        ),
    ] = "latency"
    targets: Annotated[
        Mapping[str, Preference], doc("Objectives of single targets, instead of the default.")
    ] = field(default_factory=dict)

    def on(self, target: str) -> Preference:
        """Return the preference for the choice of a variant on a target."""
        return self.targets.get(target, self.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetObjective:
    """The preference on one target, and what the target costs.

    `price` is the cost per hour in any currency. It is None if it is unknown, and for an objective
    other than cost.
    """

    objective: Preference = "latency"
    price: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingMetrics:
    """The metrics of one variant on one target that ranking uses.

    `ratio` is the request time divided by the export's request time. `change` is the improvement of
    the task metric `metric` over the export's value. It is a difference or, where lower is better,
    the share by which the error fell. `seconds` is the median time of a single request. `load` is
    the time per request at the highest measured concurrency.
    """

    size_bytes: int = 0
    ratio: Interval | None = None
    metric: str = ""
    change: Interval | None = None
    seconds: float | None = None
    load: Interval | None = None


class Verdict(Enum):
    """Verdict of a gate: PASS < INCONCLUSIVE < ERROR < FAIL.

    The combination of several verdicts is the worst verdict.
    """

    PASS = "pass"  # noqa: S105 (a verdict, not a password)
    INCONCLUSIVE = "inconclusive"
    ERROR = "error"
    FAIL = "fail"

    @property
    def rank(self) -> int:
        """Position of the verdict in the order from PASS to FAIL."""
        return list(Verdict).index(self)

    def __lt__(self, other: Verdict) -> bool:
        return self.rank < other.rank

    def __bool__(self) -> NoReturn:
        raise TypeError("a verdict is not a boolean; compare it with Verdict.PASS")

    @property
    def exit_code(self) -> int:
        """Exit code of the command line for this verdict."""
        return {Verdict.PASS: 0, Verdict.INCONCLUSIVE: 3, Verdict.ERROR: 4, Verdict.FAIL: 1}[self]


def combine_verdicts(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict; INCONCLUSIVE if there are none."""
    return max(verdicts, key=lambda v: v.rank, default=Verdict.INCONCLUSIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceResult:
    """The result of a gate on one slice of the rows.

    `verdict` is None for a slice that has too few rows or groups to be judged.
    `p_value` is the chance of an estimate at least as bad if the truth were at the limit. It is
    corrected for all judged slices (Holm). The other fields are those of `GateResult`.
    """

    slice: str
    verdict: Verdict | None
    reason: str
    n: int
    groups: int = 0
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """The result of one gate for one metric: a row of the gate table.

    `estimate`, `low`, `high` and `bound` (the number behind `limit`) are in `unit`. `n` is the
    number of observations, and `groups` the number of groups that they form. `p_value` is the
    chance of an estimate at least as good if the truth were at the limit. An advisory result is
    shown, and does not affect the verdict. `slices` are the results on slices of the rows, the
    worst first. `estimate`, `low`, `high`, `n` and `groups` are then those of the worst slice.
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
    groups: int = field(default=0, metadata=OMIT_DEFAULT)
    p_value: float | None = field(default=None, metadata=OMIT_DEFAULT)
    slices: tuple[SliceResult, ...] = field(default=(), metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The verdicts of one variant on one target.

    `faster_than_export`: whether a paired comparison shows, with confidence, that the variant is
    faster than the float export on this target. None for the export itself, or if the comparison
    was not made. `latency_ratio` is the largest ratio of its latency to that of the export, None
    without a comparison. `standing` has the metrics that rank the variant.
    """

    variant: str
    target: str
    results: tuple[GateResult, ...]
    faster_than_export: bool | None = None
    latency_ratio: float | None = None
    standing: RankingMetrics | None = field(default=None, metadata=OMIT_DEFAULT)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all binding results; INCONCLUSIVE if there are none."""
        return combine_verdicts(r.verdict for r in self.results if not r.advisory)

    @property
    def verdicts(self) -> Mapping[str, Verdict]:
        """The worst verdict of the binding results of each kind of gate."""
        by_gate: dict[str, list[Verdict]] = {}
        for result in self.results:
            if not result.advisory:
                by_gate.setdefault(result.gate, []).append(result.verdict)
        return {gate: combine_verdicts(results) for gate, results in by_gate.items()}

    @property
    def reason(self) -> str:
        """The reason of the worst binding result, in one line.

        If every binding result is PASS, or if there are none, the text states this instead.
        """
        binding = [r for r in self.results if not r.advisory]
        if not binding:
            return "no binding gate applied"
        worst = max(binding, key=lambda r: r.verdict.rank)
        if worst.verdict is Verdict.PASS:
            return "all gates passed"
        return f"{worst.gate}: {worst.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """The signed record of one decision, bound to the content that was judged.

    `batchable` is True under two conditions. Measurements showed that each row's answer is
    independent of the other rows in the batch. They did not show that running requests together is
    slower. `threads` is the number of requests, or of batches of them, that a server should run
    concurrently; 0 means as many as possible. `custom_ops` are the libraries of operators that the
    target declares. `execution` is how the target runs a model. `decided_at` is ISO 8601 in UTC.
    `sequence` grows with every decision (milliseconds since the epoch); the valid decision with the
    highest sequence applies.
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
    threads: Annotated[int, Ge(0), Le(1024)] = 0
    custom_ops: tuple[Digest, ...] = ()
    execution: Execution = field(default_factory=Execution)
    decided_at: str
    sequence: int


SignedDecision: TypeAlias = Attested[DecisionRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecheckResult:
    """The result of measuring a champion again.

    `verdict` is FAIL if a gate fails that did not fail before, or if a measurement has changed by
    more than its gate allows. It is ERROR if the measurement failed, and INCONCLUSIVE if the
    measurements permit no conclusion. `changed` lists differences of the runtime and the
    machine. `measured` is the number of measurements.
    """

    model: str
    version: str
    target: str
    pipeline: str = ""
    variant: str = ""
    verdict: Verdict
    why: str
    changed: tuple[str, ...] = ()
    results: tuple[GateResult, ...] = ()
    measured: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether the verdict is FAIL."""
        return self.verdict is Verdict.FAIL

    @property
    def reason(self) -> str:
        """The reason of the verdict, with the differences."""
        return f"{self.why}; changed since: {', '.join(self.changed)}" if self.changed else self.why


def compute_recheck_exit_code(results: Iterable[RecheckResult]) -> int:
    """Return 1 if a champion failed, else 4 if a measurement failed, else 0."""
    verdicts = {result.verdict for result in results}
    worst = (verdict for verdict in (Verdict.FAIL, Verdict.ERROR) if verdict in verdicts)
    return next((verdict.exit_code for verdict in worst), 0)
