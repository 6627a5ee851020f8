"""Judge whether one ONNX file can replace another, without a pipeline.

A float candidate must compute the same function as its baseline. A rounded candidate is judged by
each weight and activation, by the function without rounding, and by the effect of rounding on the
task. The modules for rounded candidates and for task metrics are imported at first use. A pair of
float32 files needs them only to judge a task metric.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.decision import Decision, GateResult, Verdict
from onnx_ops.domain.evidence import Advice
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.measure.execution import explain_saturation, inspect_execution
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import Runtime
from onnx_ops.statistics.judge import judge
from onnx_ops.statistics.rules.common import join_lines
from onnx_ops.statistics.rules.parity_rules import INT8_COVERAGE
from onnx_ops.statistics.rules.performance import PROCESS_FIGURES
from onnx_ops.tools.bench import (
    A,
    ComparisonResult,
    benchmark_pair,
    build_pair_gates,
    make_evidence,
    read_runtime_facts,
)
from onnx_ops.tools.compare import REFERENCE, ParityResult, compare
from onnx_ops.tools.generated_rows import settle_samples
from onnx_ops.tools.judgement import (
    Judgement,
    JudgeRequest,
    TargetJudgement,
    add_cause,
    make_parity_result,
)

_METRIC_NAMES = {"ratio": "latency", **PROCESS_FIGURES}

_BASIC = "set `session: {graph_level: basic}` in the target file"
_OPTIMIZED = (
    "with graph level basic, the result passes, so an optimization of ONNX Runtime causes the "
    f"failure; {_BASIC}"
)
_RUNS_BASIC = f"With graph level basic, the model runs: {_BASIC}."


def judge_candidate(request: JudgeRequest) -> Judgement:
    """Measure what the candidate's kind requires, and judge the evidence by gates.

    Raises:
        UserError: a file is invalid or does not fit a target, or the two files have different
            inputs. The same error is raised if a metric does not fit them.
    """
    notes: dict[str, None] = {}
    try:
        request = _settle(request)
    except MeasurementError as error:
        targets = tuple(_make_unmeasured(request, target, (), error) for target in request.targets)
        return _make_judgement(request, targets, notes)
    rounding: Sequence[GateResult] = ()
    if request.kind.is_rounded and request.only != "latency" and not request.retrained:
        from onnx_ops.tools.rounding_judgement import judge_rounding

        rounding = tuple(judge_rounding(request, notes))
    targets = tuple(_judge_target(request, target, rounding, notes) for target in request.targets)
    return _make_judgement(request, targets, notes)


def _make_judgement(
    request: JudgeRequest, targets: tuple[TargetJudgement, ...], notes: Mapping[str, None]
) -> Judgement:
    return Judgement(
        kind=request.kind,
        digests=(digest_file(request.baseline), digest_file(request.candidate)),
        sizes=(
            read_model_info(request.baseline).size_bytes,
            read_model_info(request.candidate).size_bytes,
        ),
        targets=targets,
        notes=tuple(notes),
    )


def _settle(request: JudgeRequest) -> JudgeRequest:
    """Return the request with generated inputs that the baseline accepts.

    A request with a data set is returned unchanged.
    """
    if request.dataset is not None:
        return request
    target = replace(REFERENCE, custom_ops=request.targets[0].custom_ops)
    settings = [
        replace(
            setting,
            samples=settle_samples(request.exact, target, request.baseline, setting.samples),
        )
        for setting in request.settings
    ]
    return replace(request, settings=settings)


def _make_unmeasured(
    request: JudgeRequest, target: Target, results: Sequence[GateResult], error: MeasurementError
) -> TargetJudgement:
    """Return the judgement of a target on which a measurement failed."""
    why = f": {error.why}" if error.why else ""
    remedy = _find_running_level(request, target) or error.remedy
    reason = join_lines(f"{error.where}: {error.what}{why}" + (f". {remedy}" if remedy else ""))
    failed = GateResult(gate="target", metric="", limit="", verdict=Verdict.ERROR, reason=reason)
    decision = Decision(
        variant=request.candidate.name, target=target.name, results=(*results, failed)
    )
    return TargetJudgement(target=target.name, decision=decision, remedy=remedy)


def _judge_target(
    request: JudgeRequest, target: Target, rounding: Sequence[GateResult], notes: dict[str, None]
) -> TargetJudgement:
    """Judge one target; a failed measurement is an error of this target only."""
    results, paired = list(rounding), list[ComparisonResult]()
    advice: tuple[Advice, ...] | None = None
    try:
        runtime = request.runtime(target.runtime)
        read_runtime_facts(runtime, target, request.candidate)
        if request.only != "latency":
            answers, advice = _judge_answers(request, runtime, target, notes)
            results += _name_optimization_faults(request, runtime, target, answers)
        if request.only != "parity":
            for number, setting in enumerate(request.settings):
                cold = request.cold and not number
                comparison = benchmark_pair(
                    request.arrange(runtime, setting),
                    target,
                    request.baseline,
                    request.candidate,
                    setting.samples.feed(setting.batch),
                    gates=build_pair_gates(
                        request.max_regression, concurrency=request.concurrency, cold=cold
                    ),
                    conditions=request.conditions,
                    seed=request.seed,
                    report=request.report,
                )
                paired.append(comparison)
                results += _name_timings(comparison.decision, setting.name)
        if advice is None:
            advice = inspect_execution(runtime, request.baseline, request.candidate, target).advice
    except MeasurementError as error:
        return replace(
            _make_unmeasured(request, target, results, error),
            paired=tuple(paired),
            advice=advice or (),
        )
    decision = Decision(variant=request.candidate.name, target=target.name, results=tuple(results))
    return TargetJudgement(
        target=target.name, decision=decision, paired=tuple(paired), advice=advice
    )


def _name_timings(decision: Decision, setting: str) -> Iterator[GateResult]:
    """Yield the results with the names of their quantities and of the setting."""
    for result in decision.results:
        metric = result.metric.removesuffix(f" vs {A}")
        parts = (_METRIC_NAMES.get(metric, metric), setting)
        yield replace(result, metric=", ".join(part for part in parts if part))


def _name_optimization_faults(
    request: JudgeRequest, runtime: Runtime, target: Target, answers: Sequence[GateResult]
) -> list[GateResult]:
    """Return the results, with graph optimizations named as the cause of failures.

    Optimizations are the cause if the failure does not occur with fewer optimizations.
    """
    plain = _with_fewer_optimizations(target)
    if plain is None or not any(r.verdict is Verdict.FAIL and not r.advisory for r in answers):
        return list(answers)
    request.report(f"running again with graph level {plain.session.graph_level}")
    again, _ = _judge_answers(request, runtime, plain, {})
    passed = {result.metric for result in again if result.verdict is Verdict.PASS}
    return [
        replace(result, reason=f"{result.reason}; {_OPTIMIZED}")
        if result.verdict is Verdict.FAIL and result.metric in passed
        else result
        for result in answers
    ]


def _find_running_level(request: JudgeRequest, target: Target) -> str:
    """Return the remedy if a candidate runs only with fewer graph optimizations.

    Otherwise, the text is empty.
    """
    plain, feed = _with_fewer_optimizations(target), request.settings[0].samples.feed(1)

    def runs(place: Target) -> bool:
        try:
            request.arrange(request.runtime(place.runtime)).run(request.candidate, place, (feed,))
        except (MeasurementError, UserError):
            return False
        return True

    return _RUNS_BASIC if plain is not None and not runs(target) and runs(plain) else ""


def _with_fewer_optimizations(target: Target) -> Target | None:
    """Return the target at graph level basic.

    Return None if the target's graph level is basic or disabled, or if its runtime is not ONNX
    Runtime on this machine.
    """
    if target.runtime != REFERENCE.runtime or target.session.graph_level in ("disabled", "basic"):
        return None
    return replace(target, session=replace(target.session, graph_level="basic"))


def _judge_answers(
    request: JudgeRequest, runtime: Runtime, target: Target, notes: dict[str, None]
) -> tuple[list[GateResult], tuple[Advice, ...] | None]:
    """Judge the candidate's answers on one target.

    A float32 pair is compared at every setting of the sweep, but with one batch size. Candidates
    with a rounded baseline, and float16 candidates, are compared at the first setting. The answers
    of other rounded candidates are not compared. All are also judged by `_judge_task`, and a
    retrained candidate only by it. The advice is None if the execution of the candidate was not
    inspected.
    """
    if request.retrained:
        return _judge_task(request, runtime, target), None
    results: list[GateResult] = []
    advice: tuple[Advice, ...] | None = None
    if request.kind.is_rounded:
        examined = inspect_execution(runtime, request.baseline, request.candidate, target)
        advice = examined.advice
        evidence = replace(
            make_evidence(runtime, target, request.candidate),
            quantized=True,
            coverage=examined.coverage,
        )
        results += [
            r for r in judge((ParityGate(),), evidence).results if r.metric == INT8_COVERAGE.metric
        ]
        if request.kind.candidate.precision == "float16":
            results.append(_judge_within_noise(request, runtime, target, "float16"))
    elif request.kind.baseline.precision != "float32":
        results.append(_judge_within_noise(request, runtime, target, "baseline"))
    else:
        for name, parity in _compare_settings(request, runtime, target):
            notes |= dict.fromkeys(parity.notes)
            results.append(make_parity_result(parity, f"outputs, {name}" if name else "outputs"))
            advice = advice or parity.advice
    saturation = explain_saturation(runtime, request.candidate, target, "B")
    results += [add_cause(result, saturation) for result in _judge_task(request, runtime, target)]
    return results, advice


def _judge_within_noise(
    request: JudgeRequest, runtime: Runtime, target: Target, rounded: Literal["float16", "baseline"]
) -> GateResult:
    from onnx_ops.tools.rounding_judgement import judge_within_noise

    return judge_within_noise(request, runtime, target, rounded)


def _judge_task(request: JudgeRequest, runtime: Runtime, target: Target) -> list[GateResult]:
    """Judge the task metric, or the share of answers that a rounded candidate changes."""
    if not (request.has_metric or request.kind.is_rounded):
        return []
    from onnx_ops.tools.task_judgement import judge_task

    return judge_task(request, runtime, target)


def _compare_settings(
    request: JudgeRequest, runtime: Runtime, target: Target
) -> Iterator[tuple[str, ParityResult]]:
    """Yield the comparison at each setting of the sweep.

    Settings that differ only in the batch are compared once.
    """
    compared = set()
    for setting in request.settings:
        name = ", ".join(part for part in setting.name.split(", ") if not part.startswith("batch "))
        if name in compared:
            continue
        compared.add(name)
        yield (
            name,
            compare(
                runtime,
                target,
                request.baseline,
                request.candidate,
                setting.samples,
                request.report,
                sizes=request.sizes,
                exact=request.exact,
            ),
        )
