"""The request and the results of a judgement on two ONNX files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.decision import Decision, GateResult, Verdict, combine_verdicts
from onnx_ops.domain.evidence import Advice
from onnx_ops.domain.gate import MetricGate
from onnx_ops.domain.target import Target
from onnx_ops.measure.row_layout import arrange_runtime
from onnx_ops.onnx_graph.model_kind import CandidateKind
from onnx_ops.ports import Dataset, Runtime
from onnx_ops.statistics.scores import CustomMetric
from onnx_ops.statistics.slices import Slicing
from onnx_ops.tools.bench import (
    ComparisonResult,
    Conditions,
    Reporter,
)
from onnx_ops.tools.compare import REFERENCE, ParityResult
from onnx_ops.tools.sample_rows import SampleRows

Part = Literal["parity", "latency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One setting of the sweep: its name in results, the batch, and the input rows."""

    name: str
    batch: int
    samples: SampleRows


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeRequest:
    """Two files, the settings of their comparison, and the limits of the candidate.

    `settings` is the sweep over batches and sizes of dimensions. `runtime` returns a runtime by its
    name. `inside` runs models with their intermediate values as outputs. `dataset` is None if rows
    are generated, or if the data are a single request instead of rows. `functions` contains
    custom metrics by reference. If `max_regression` is None, the default limits apply. If
    `concurrency` is None, no throughput is measured. With `cold`, fresh processes are measured too,
    at the first setting. `only` restricts the judgement to one part. `sizes` names dimensions for
    which one size is sufficient. The answers of a `retrained` candidate are not compared with the
    baseline's: the task metric decides. `slices` are parts of the data set in which the metric is
    judged too.
    """

    baseline: Path
    candidate: Path
    kind: CandidateKind
    targets: Sequence[Target]
    settings: Sequence[SweepPoint]
    runtime: Callable[[str], Runtime]
    inside: Runtime
    conditions: Conditions
    metric: MetricGate
    dataset: Dataset | None = None
    functions: Mapping[str, CustomMetric] = field(default_factory=dict)
    max_regression: float | None = None
    concurrency: int | None = None
    cold: bool = False
    only: Part | None = None
    retrained: bool = False
    sizes: frozenset[str] = frozenset()
    slices: Sequence[Slicing] = ()
    seed: int = 0
    report: Reporter = lambda _: None

    @property
    def has_metric(self) -> bool:
        """Return whether the task metric can be computed.

        It needs a data set, and usually labels.
        """
        return self.dataset is not None and (
            self.dataset.label is not None or self.metric.definition().label_free
        )

    @property
    def exact(self) -> Runtime:
        """Return the runtime that computes the reference answers."""
        return self.runtime(REFERENCE.runtime)

    def arrange(self, runtime: Runtime, setting: SweepPoint | None = None) -> Runtime:
        """Return a runtime that takes rows on axis 0.

        The runtime adds the inputs without rows of one setting of the sweep, by default the first.
        """
        return arrange_runtime(
            runtime, (setting or self.settings[0]).samples.read_layout(self.baseline)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetJudgement:
    """The results on one target, with `paired` in the order of the sweep.

    `remedy` is the remedy for a failed measurement.
    """

    target: str
    decision: Decision
    paired: tuple[ComparisonResult, ...] = ()
    advice: tuple[Advice, ...] = ()
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict on two files; `sizes` are the bytes of baseline and candidate."""

    kind: CandidateKind
    digests: tuple[Digest, Digest]
    sizes: tuple[int, int]
    targets: tuple[TargetJudgement, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """Return the worst verdict of all targets."""
        return combine_verdicts(one.decision.verdict for one in self.targets)


def add_cause(result: GateResult, cause: str) -> GateResult:
    """Add a cause to the reason of a result, unless it passes or is advisory."""
    if not cause or result.verdict is Verdict.PASS or result.advisory:
        return result
    return replace(result, reason=f"{result.reason}; {cause}")


def make_parity_result(parity: ParityResult, metric: str) -> GateResult:
    """Return the result of a parity comparison, with this metric name."""
    result = GateResult(
        gate="parity",
        metric=metric,
        limit="≤ 1x tolerance",
        verdict=parity.verdict,
        reason=parity.reason,
    )
    if not parity.differences:
        return result
    worst = parity.worst
    return replace(
        result,
        estimate=None if worst.mismatch else worst.ratio,
        bound=1.0,
        unit="x",
        n=sum(d.rows for d in parity.differences if d.output == worst.output),
    )


def build_metric_gate(name: str | None, max_drop: float, *, lower_is_better: bool) -> MetricGate:
    """Return a gate that limits a metric.

    `max_drop` is the maximum drop, or the maximum relative increase if lower values are better.
    `name` is a metric or the reference of a custom metric. `lower_is_better` is used only for a
    custom metric.
    """
    gate = MetricGate(name=name)
    if name is not None and ":" in name:
        gate = MetricGate(use=name, higher_is_better=not lower_is_better)
    return (
        replace(gate, max_increase=max_drop)
        if gate.lower_is_better
        else replace(gate, max_drop=max_drop)
    )
