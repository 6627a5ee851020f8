"""Judge whether a deployed system answers as the project's own code does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from scipy import stats

from onnx_ops.domain.decision import Decision, GateResult, Verdict, combine_verdicts
from onnx_ops.domain.evidence import SystemResult
from onnx_ops.domain.system_comparison import Tolerances
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, StageError, UserError
from onnx_ops.measure.system_inputs import RawInput, find_rate_change
from onnx_ops.measure.system_parity import (
    OUTPUT,
    StepMeasurement,
    System,
    SystemMeasurement,
    WorstCase,
    measure_system,
)
from onnx_ops.onnx_graph.model_kind import read_candidate_kind
from onnx_ops.ports import Runtime
from onnx_ops.statistics.step_values import StepExcess, rate_distance

GATE = "system"
ANSWER = "answer"
"""Name of the result of the final answers."""
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemRequest:
    """A system, its raw inputs, and the targets and tolerances of the judgement.

    `total` is the number of inputs from which `inputs` were chosen.
    """

    system: System
    inputs: Sequence[RawInput]
    total: int
    targets: Sequence[Target]
    runtime: Callable[[str], Runtime]
    tolerances: Tolerances = field(default_factory=Tolerances)
    report: Callable[[str], None] = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemJudgement:
    """The results on each target; `worst` is the input that a report shows.

    `step` names the first step that failed, apart from advisory steps. Otherwise, it is `ANSWER` if
    the final answers failed, and empty if they did not.
    """

    decisions: tuple[Decision, ...]
    notes: tuple[str, ...]
    inputs: int
    step: str = ""
    worst: WorstCase | None = None

    @property
    def verdict(self) -> Verdict:
        """Return the worst verdict of all targets."""
        return combine_verdicts(decision.verdict for decision in self.decisions)


def judge_system(request: SystemRequest) -> SystemJudgement:
    """Compare the project's own code with its deployment on every target."""
    judgements = [_try_target(request, target) for target in request.targets]
    shown = next((one for one in judgements if one.worst is not None), judgements[0])
    notes = dict.fromkeys(note for one in judgements for note in one.notes)
    return SystemJudgement(
        decisions=tuple(decision for one in judgements for decision in one.decisions),
        notes=tuple(notes),
        inputs=len(request.inputs),
        step=shown.step,
        worst=shown.worst,
    )


def _try_target(request: SystemRequest, target: Target) -> SystemJudgement:
    """Compare code and deployment on a target; an error of either one is a result."""
    try:
        return judge_target(request, target)
    except (UserError, MeasurementError, StageError) as error:
        failed = GateResult(
            gate=GATE, metric="system", limit="", verdict=Verdict.ERROR, reason=str(error)
        )
        return _make_judgement(request, target, [failed])


def judge_target(request: SystemRequest, target: Target) -> SystemJudgement:
    """Compare the project's own code with its deployment on one target.

    Raises:
        UserError: the source or a step raises an error.
        MeasurementError: the runtime could not run a graph.
        StageError: the source or a step fails because of the machine.
    """
    measured = measure_system(
        request.system,
        request.inputs,
        request.runtime(target.runtime),
        target,
        request.tolerances,
        request.report,
    )
    is_rounded = _is_rounded(request.system)
    steps = [
        _judge_step(step, request.tolerances, is_model=step.name == OUTPUT and is_rounded)
        for step in measured.steps
    ]
    results = [*steps, _judge_answers(measured, request.tolerances, steps)]
    results += _check_source(request, measured)
    binding = [result for result in steps if not result.advisory]
    first = next((one for one in binding if one.verdict is Verdict.FAIL), None)
    step = ANSWER if first is None and results[len(steps)].verdict is Verdict.FAIL else ""
    worst = measured.final if step else None
    if first is not None:
        step = first.metric
        worst = next(one.worst for one in measured.steps if one.name == step)
    found = _make_judgement(request, target, results)
    return replace(found, notes=_list_notes(request, measured), step=step, worst=worst)


def _make_judgement(
    request: SystemRequest, target: Target, results: Sequence[GateResult]
) -> SystemJudgement:
    decision = Decision(
        variant=request.system.candidate.name, target=target.name, results=tuple(results)
    )
    return SystemJudgement(decisions=(decision,), notes=(), inputs=len(request.inputs))


def _is_rounded(system: System) -> bool:
    """Return whether the candidate computes in another precision than float32."""
    return read_candidate_kind(system.candidate, system.candidate).candidate.precision != "float32"


def _judge_step(step: StepMeasurement, tolerances: Tolerances, *, is_model: bool) -> GateResult:
    """Return the result of one step; that of a rounded model is advisory."""
    blank = GateResult(
        gate=GATE, metric=step.name, limit="", verdict=Verdict.PASS, reason="", advisory=is_model
    )
    if not step.distances:
        return _describe_missing(blank, step)
    rated = [
        (rate_distance(distance, form, step.span, tolerances, step.name), name, distance)
        for name, form, distance in step.distances
    ]
    excess, name, distance = max(rated, key=lambda one: one[0].ratio)
    outside = sum(one[0].ratio > 1 for one in rated)
    result = replace(
        blank,
        limit=_describe_limit(excess),
        estimate=excess.value if math.isfinite(excess.value) else None,
        bound=excess.limit,
        unit=excess.unit,
        n=len(rated),
    )
    if not outside:
        return replace(result, reason=_describe_agreement(len(rated), excess))
    size = distance.mismatch or _describe_size(excess)
    reason = f"{outside} of {len(rated)} inputs differ; the worst is {name}: {size}"
    cause = step.explain()
    if is_model:
        reason += "; the model is rounded: the final answers decide, and `onnx-ops judge A B`"
    return replace(result, verdict=Verdict.FAIL, reason=f"{reason}; {cause}" if cause else reason)


def _describe_missing(blank: GateResult, step: StepMeasurement) -> GateResult:
    if not step.missing:
        return replace(
            blank,
            verdict=Verdict.INCONCLUSIVE,
            reason="the step did not run, because an earlier step differs",
        )
    remedy = f"mark it in the source: onnx_ops.record_step({step.name!r}, value)"
    reason = f"the source never recorded this step; {remedy}"
    return replace(blank, verdict=Verdict.INCONCLUSIVE, reason=reason)


def _describe_agreement(count: int, excess: StepExcess) -> str:
    if not excess.value:
        return f"{count} inputs are equal"
    return f"{count} inputs are equal within {excess.kind.partition(' ')[0]}"


def _describe_limit(excess: StepExcess) -> str:
    if excess.kind in ("form", "values"):
        return "equal"
    if excess.unit == "levels":
        return f"{excess.kind} ≤ {excess.limit:g}"
    return f"≤ {100 * excess.limit:g}%"


def _describe_size(excess: StepExcess) -> str:
    if excess.unit == "levels":
        return f"{excess.value:.3g} levels of 255 ({excess.kind})"
    if excess.kind == "values":
        return f"{100 * excess.value:.3g}% of the values differ"
    return f"a value differs by {100 * excess.value:.3g}%"


def _judge_answers(
    measured: SystemMeasurement, tolerances: Tolerances, steps: Sequence[GateResult]
) -> GateResult:
    """Return the result of the final answers, and of the number of inputs."""
    count, different = measured.inputs, len(measured.differing)
    result = GateResult(
        gate=GATE,
        metric=ANSWER,
        limit=f"≤ {100 * tolerances.answers:g}% differ",
        verdict=Verdict.PASS,
        reason="",
        estimate=different / count if count else None,
        bound=tolerances.answers,
        unit="1",
        n=count,
    )
    result = replace(result, high=_bound_share(different, count))
    first = next((s for s in steps if s.verdict is Verdict.FAIL and not s.advisory), None)
    if first is not None:
        verdict = Verdict.FAIL if different else Verdict.INCONCLUSIVE
        reason = f"{different} of {count} answers differ; the first step that differs: "
        return replace(result, verdict=verdict, reason=reason + first.metric)
    return _judge_share(result, measured, tolerances, steps)


def _judge_share(
    result: GateResult,
    measured: SystemMeasurement,
    tolerances: Tolerances,
    steps: Sequence[GateResult],
) -> GateResult:
    """Return the result of the final answers if no step failed, except advisory ones."""
    count, different = measured.inputs, len(measured.differing)
    # A share can exceed the limit by chance alone, so the exact binomial test decides.
    if different and stats.binom.sf(different - 1, count, tolerances.answers) < 1 - _CONFIDENCE:
        return replace(
            result,
            verdict=Verdict.FAIL,
            reason=f"{different} of {count} answers differ, although no step failed, except "
            f"advisory ones; the first is {measured.differing[0]}",
        )
    # Decoders and resize filters within their tolerances can change the answer to an input near a
    # decision boundary, so such differences are accepted.
    is_moved = any(step.unit == "levels" and step.estimate for step in steps)
    if different > tolerances.answers * count and not is_moved:
        reason = f"{different} of {count} answers differ; more inputs would decide"
        return replace(result, verdict=Verdict.INCONCLUSIVE, reason=reason)
    if count < tolerances.files:
        reason = f"{count} inputs are too few; give at least {tolerances.files:g}"
        return replace(result, verdict=Verdict.INCONCLUSIVE, reason=reason)
    if not measured.varies:
        reason = (
            f"the source gives the same answer to all {count} inputs, so they are not conclusive; "
            "use inputs with different answers"
        )
        return replace(result, verdict=Verdict.INCONCLUSIVE, reason=reason)
    reason = (
        f"{different} of {count} answers differ: with 95 % confidence, fewer than "
        f"{100 * (result.high or 0.0):.2g}% of the answers to such inputs differ"
    )
    if different and is_moved:
        reason += "; differences within the tolerances of the steps change these answers"
    return replace(result, reason=reason)


def _bound_share(different: int, count: int) -> float:
    """Return the upper 95 % bound of a share (Clopper and Pearson, 1934)."""
    if different >= count:
        return 1.0
    return float(stats.beta.ppf(_CONFIDENCE, different + 1, count - different))


def _check_source(request: SystemRequest, measured: SystemMeasurement) -> list[GateResult]:
    """Return an error if the source's answers depend on chance or on the recording."""
    if not measured.unstable:
        return []
    reason = (
        f"{request.system.reference} answered {measured.unstable} differently when it ran again "
        "without a recording; fix its random seed, or switch augmentation off"
    )
    return [GateResult(gate=GATE, metric="source", limit="", verdict=Verdict.ERROR, reason=reason)]


def _list_notes(request: SystemRequest, measured: SystemMeasurement) -> tuple[str, ...]:
    notes = []
    if measured.undeclared:
        shown = ", ".join(measured.undeclared)
        notes.append(f"the source records steps that are not declared for the candidate: {shown}")
    if measured.repeated:
        shown = ", ".join(measured.repeated)
        notes.append(
            f"steps that were recorded several times count with their first value: {shown}"
        )
    if rates := find_rate_change(list(request.inputs)):
        notes.append(rates)
    if not request.system.after and measured.steps[-1].name == OUTPUT:
        notes.append("no step after the model is declared: the model's output is the answer")
    return tuple(notes)


def write_results(judgement: SystemJudgement) -> tuple[SystemResult, ...]:
    """Return the results in the form in which evidence stores them."""
    return tuple(
        SystemResult(
            step=result.metric,
            verdict=result.verdict.value,
            limit=result.limit,
            reason=result.reason,
            estimate=result.estimate,
            high=result.high,
            bound=result.bound,
            unit=result.unit,
            inputs=result.n,
            advisory=result.advisory,
        )
        for decision in judgement.decisions
        for result in decision.results
    )
