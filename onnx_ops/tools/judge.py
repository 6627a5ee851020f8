"""Judge whether one ONNX file may replace another, without a pipeline.

A float candidate must compute the same function as its baseline. A rounded one is judged by the parts of rounding: each
weight and activation, the function without rounding, and the effect of rounding on the task.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from onnx_ops.domain.artifact import Digest, digest_file
from onnx_ops.domain.decision import Decision, GateResult, Verdict, combine_verdicts
from onnx_ops.domain.evidence import ActivationMeasurement, Advice, ParityMeasurement, WeightMeasurement
from onnx_ops.domain.gate import ACCURACY, MetricGate, ParityGate
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.measure.answers import GroupAnswers, explain_rejection, read_answers, run_groups
from onnx_ops.measure.execution import explain_saturation, inspect_execution
from onnx_ops.measure.parity import make_mismatch
from onnx_ops.measure.predictions import join_predictions, read_prediction
from onnx_ops.measure.quantization import choose_source_form, measure_activations, measure_paired_weights
from onnx_ops.measure.rounding import measure_roundings
from onnx_ops.measure.row_layout import arrange_runtime
from onnx_ops.measure.scoring import ScoringRequest, measure_metrics
from onnx_ops.onnx_graph.dequantization import write_dequantized, write_with_fp16_weights, write_with_weights
from onnx_ops.onnx_graph.files import copy_model
from onnx_ops.onnx_graph.input_bounds import read_input_bounds
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.onnx_graph.model_kind import CandidateKind
from onnx_ops.onnx_graph.quantized_weights import pair_quantized_weights, read_float_weights
from onnx_ops.ports import Dataset, Runtime, Tensors
from onnx_ops.scratch import Scratch
from onnx_ops.statistics.judge import judge
from onnx_ops.statistics.metrics import CustomMetric
from onnx_ops.statistics.parity import WHOLE, Rounding, measure_output
from onnx_ops.statistics.rules.common import join_lines
from onnx_ops.statistics.rules.parity import is_compensating
from onnx_ops.statistics.rules.performance import PROCESS_FIGURES
from onnx_ops.statistics.scores import CANDIDATE
from onnx_ops.tools.bench import (
    A,
    ComparisonResult,
    Conditions,
    Reporter,
    benchmark_pair,
    build_pair_gates,
    make_evidence,
    read_runtime_facts,
)
from onnx_ops.tools.compare import REFERENCE, ParityResult, compare
from onnx_ops.tools.generated_rows import settle_samples
from onnx_ops.tools.sample_rows import SampleRows, build_groups

Part = Literal["parity", "latency"]

HALF = 2.0**-10
"""Spacing of float16 relative to its values."""

_ACTIVATION_ROWS, _FUNCTION_ROWS = 256, 128
"""Rows for measuring activations, and rows for comparing the function."""

_LARGE_ROW = 1 << 14
"""Bytes of a row from which on a quarter as many rows are enough."""

_NAMED = 3
"""Weights that a note names."""

_METRIC_NAMES = {"ratio": "latency", **PROCESS_FIGURES}

_OPTIMIZED = (
    "at graph level basic it is right: the fault is in an optimization of ONNX Runtime, not in the file; "
    "target file: session: {graph_level: basic}"
)

_NEEDS_REAL_ROWS = frozenset({"saturation", "clipping"})
"""Activation metrics that need rows like those of use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One point of the sweep: its name in results, the batch, and the rows to feed."""

    name: str
    batch: int
    samples: SampleRows


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeRequest:
    """Two files, how they are compared, and how much the candidate may lose.

    `settings` is the sweep. `runtime` returns one by its name; `inside` runs models that expose their intermediate
    values. Without a dataset, rows are generated. Custom metrics are in `functions` by reference. `max_regression` None
    takes the defaults; `concurrency` None measures no throughput. At dimensions named in `sizes`, one size is enough.
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
    sizes: frozenset[str] = frozenset()
    seed: int = 0
    report: Reporter = lambda _: None

    @property
    def exact(self) -> Runtime:
        """Return the runtime that computes the reference answers."""
        return self.runtime(REFERENCE.runtime)

    def arrange(self, runtime: Runtime, setting: SweepPoint | None = None) -> Runtime:
        """Return a runtime that takes rows on axis 0, and adds the inputs without rows of a point of the sweep."""
        return arrange_runtime(runtime, (setting or self.settings[0]).samples.read_layout(self.baseline))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetJudgement:
    """The results on one target; `paired` is in the order of the sweep.

    `remedy` is what to do where something could not be measured.
    """

    target: str
    decision: Decision
    paired: tuple[ComparisonResult, ...] = ()
    advice: tuple[Advice, ...] = ()
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict on two files. `sizes` are bytes before and after."""

    kind: CandidateKind
    digests: tuple[Digest, Digest]
    sizes: tuple[int, int]
    targets: tuple[TargetJudgement, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """Return the worst verdict of all targets."""
        return combine_verdicts(one.decision.verdict for one in self.targets)


def judge_candidate(request: JudgeRequest) -> Judgement:
    """Measure what the candidate's kind requires, and judge it by gates.

    Raises:
        UserError: a file is not valid, the two have different inputs, or a metric does not fit them.
    """
    notes: dict[str, None] = {}
    try:
        request = _settle(request)
    except MeasurementError as error:
        targets = tuple(_make_unmeasured(request, target, (), error) for target in request.targets)
        return _make_judgement(request, targets, notes)
    rounding = tuple(_judge_rounding(request, notes)) if request.kind.is_rounded and request.only != "latency" else ()
    targets = tuple(_judge_target(request, target, rounding, notes) for target in request.targets)
    return _make_judgement(request, targets, notes)


def _make_judgement(
    request: JudgeRequest, targets: tuple[TargetJudgement, ...], notes: Mapping[str, None]
) -> Judgement:
    return Judgement(
        kind=request.kind,
        digests=(digest_file(request.baseline), digest_file(request.candidate)),
        sizes=(read_model_info(request.baseline).size_bytes, read_model_info(request.candidate).size_bytes),
        targets=targets,
        notes=tuple(notes),
    )


def _settle(request: JudgeRequest) -> JudgeRequest:
    """Return the request with generated inputs that the baseline takes."""
    if request.dataset is not None:
        return request
    target = replace(REFERENCE, custom_ops=request.targets[0].custom_ops)
    settings = [
        replace(setting, samples=settle_samples(request.exact, target, request.baseline, setting.samples))
        for setting in request.settings
    ]
    return replace(request, settings=settings)


def _make_unmeasured(
    request: JudgeRequest, target: Target, results: Sequence[GateResult], error: MeasurementError
) -> TargetJudgement:
    """Return the judgement of a target where something could not be measured."""
    why = f": {error.why}" if error.why else ""
    remedy = _find_running_level(request, target) or error.remedy
    reason = join_lines(f"{error.where}: {error.what}{why}" + (f". {remedy}" if remedy else ""))
    failed = GateResult(gate="target", metric="", limit="", verdict=Verdict.ERROR, reason=reason)
    decision = Decision(variant=request.candidate.name, target=target.name, results=(*results, failed))
    return TargetJudgement(target=target.name, decision=decision, remedy=remedy)


def _judge_target(
    request: JudgeRequest, target: Target, rounding: Sequence[GateResult], notes: dict[str, None]
) -> TargetJudgement:
    """Judge one target; a failed measurement is an error of that target only."""
    results, paired = list(rounding), list[ComparisonResult]()
    advice: tuple[Advice, ...] = ()
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
                    gates=build_pair_gates(request.max_regression, concurrency=request.concurrency, cold=cold),
                    conditions=request.conditions,
                    seed=request.seed,
                    report=request.report,
                )
                paired.append(comparison)
                for result in comparison.decision.results:
                    metric = result.metric.removesuffix(f" vs {A}")
                    parts = (_METRIC_NAMES.get(metric, metric), setting.name)
                    results.append(replace(result, metric=", ".join(part for part in parts if part)))
                advice = advice or comparison.evidence.advice
    except MeasurementError as error:
        return replace(_make_unmeasured(request, target, results, error), paired=tuple(paired), advice=advice)
    decision = Decision(variant=request.candidate.name, target=target.name, results=tuple(results))
    return TargetJudgement(target=target.name, decision=decision, paired=tuple(paired), advice=advice)


def _name_optimization_faults(
    request: JudgeRequest, runtime: Runtime, target: Target, answers: Sequence[GateResult]
) -> list[GateResult]:
    """Return the results; a failure that ends with fewer graph optimizations names them as its cause."""
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
    """Return the remedy for a candidate that runs with fewer graph optimizations only; or ""."""
    plain, feed = _with_fewer_optimizations(target), request.settings[0].samples.feed(1)

    def runs(place: Target) -> bool:
        try:
            request.arrange(request.runtime(place.runtime)).run(request.candidate, place, (feed,))
        except (MeasurementError, UserError):
            return False
        return True

    return _OPTIMIZED if plain is not None and not runs(target) and runs(plain) else ""


def _with_fewer_optimizations(target: Target) -> Target | None:
    """Return the target at graph level basic; None if it optimizes no more than that."""
    if target.runtime != REFERENCE.runtime or target.session.graph_level in ("disabled", "basic"):
        return None
    return replace(target, session=replace(target.session, graph_level="basic"))


def _judge_answers(
    request: JudgeRequest, runtime: Runtime, target: Target, notes: dict[str, None]
) -> tuple[list[GateResult], tuple[Advice, ...]]:
    """Judge the candidate's answers on one target: at every shape of the sweep, and at the task."""
    results: list[GateResult] = []
    advice: tuple[Advice, ...] = ()
    if request.kind.is_rounded:
        examined = inspect_execution(runtime, request.baseline, request.candidate, target)
        advice = examined.advice
        evidence = replace(
            make_evidence(runtime, target, request.candidate), quantized=True, coverage=examined.coverage
        )
        results += [r for r in judge((ParityGate(),), evidence).results if r.metric == "int8 coverage"]
        if request.kind.candidate.precision == "float16":
            results.append(_judge_within_noise(request, runtime, target, "float16"))
    elif request.kind.baseline.precision != "float32":
        results.append(_judge_within_noise(request, runtime, target, "baseline"))
    else:
        seen = set()
        for setting in request.settings:
            name = ", ".join(part for part in setting.name.split(", ") if not part.startswith("batch "))
            if name in seen:  # it differs from another one in the batch only
                continue
            seen.add(name)
            parity = compare(
                runtime,
                target,
                request.baseline,
                request.candidate,
                setting.samples,
                request.report,
                sizes=request.sizes,
                exact=request.exact,
            )
            notes |= dict.fromkeys(parity.notes)
            results.append(_parity_result(parity, f"outputs, {name}" if name else "outputs"))
            advice = advice or parity.advice
    saturation = explain_saturation(runtime, request.candidate, target, "B")
    results += [_add_cause(result, saturation) for result in _judge_task(request, runtime, target)]
    return results, advice


def _add_cause(result: GateResult, cause: str) -> GateResult:
    """Add the cause of a difference to the reason of a result that does not pass."""
    if not cause or result.verdict is Verdict.PASS or result.advisory:
        return result
    return replace(result, reason=f"{result.reason}; {cause}")


def _parity_result(parity: ParityResult, metric: str) -> GateResult:
    result = GateResult(
        gate="parity", metric=metric, limit="≤ 1x tolerance", verdict=parity.verdict, reason=parity.reason
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


def _judge_within_noise(
    request: JudgeRequest, runtime: Runtime, target: Target, of: Literal["float16", "baseline"]
) -> GateResult:
    """Judge the answers in units of the noise of their precision, by the rule of the parity gate.

    For float16 the noise is the effect of rounding the baseline's constants, by column; for a quantized baseline, that
    of the target's own graph optimizations. It moves single elements by whole steps, which the columns share, so that
    the output is measured as a whole. Where the baseline's sums saturate on the target, that noise is no measure of
    rounding: then only equal answers pass.
    """
    samples = request.settings[0].samples
    groups = [g for g in build_groups(samples, empty=False, bounds=read_input_bounds(request.baseline)) if g.inside]
    runs = {group.name: group.runs for group in groups}
    exactly, runtime = request.arrange(request.exact), request.arrange(runtime)
    request.report(f"running {request.candidate.name} on {len(groups)} groups of inputs")
    with Scratch() as folder:
        right = run_groups(exactly, REFERENCE, request.baseline, runs)
        roundings: Mapping[str, Mapping[str, Rounding]] = {}
        if of == "float16":
            rounded = folder / "halves.onnx"
            narrowed = {pair.origin for pair in pair_quantized_weights(request.baseline, request.candidate).pairs}
            write_with_fp16_weights(request.baseline, rounded, narrowed)
            rough = run_groups(exactly, REFERENCE, rounded, runs)
            roundings = measure_roundings(exactly, request.baseline, runs)
        else:
            rough = run_groups(runtime, target, request.baseline, runs)
        answers = run_groups(runtime, target, request.candidate, runs)
    measured: list[ParityMeasurement] = []
    for name in runs:
        exact, noisy, answer = right[name], rough[name], answers[name]
        if isinstance(exact, MeasurementError) or isinstance(noisy, MeasurementError):
            continue
        if isinstance(answer, MeasurementError):
            text = f"B rejects these inputs, A does not: {explain_rejection(answer)}"
            measured.append(make_mismatch("*", name, text))
            continue
        double, single, onnx = _stack_runs(exact), _stack_runs(noisy), _stack_runs(answer)
        for output, expected in double.items():
            if output not in onnx:
                measured.append(make_mismatch(output, name, "B lacks this output"))
                continue
            epsilon = HALF if of == "float16" and expected.dtype.kind == "f" else 0.0
            measured.append(
                measure_output(
                    group=name,
                    output=output,
                    onnx=onnx[output],
                    single=single[output],
                    double=expected,
                    epsilon=epsilon,
                    rounding=roundings.get(name, {}).get(output, WHOLE),
                )
            )
    evidence = replace(make_evidence(runtime, target, request.candidate), parity=tuple(measured))
    result = next(r for r in judge((ParityGate(),), evidence).results if r.gate == "parity")
    noise = "the noise of float16" if of == "float16" else "A's own noise"
    reason = result.reason.replace("the source's noise", noise).replace("the source gives", "A gives")
    result = replace(result, limit=f"≤ {ParityGate().noise_factor:g}x noise", reason=reason)
    saturation = explain_saturation(runtime, request.baseline, target, "A") if of == "baseline" else ""
    if saturation and result.verdict is Verdict.PASS and not _are_equal(rough, answers):
        result = replace(result, verdict=Verdict.INCONCLUSIVE)
    return _add_cause(result, saturation)


def _are_equal(one: GroupAnswers, other: GroupAnswers) -> bool:
    """Return whether two models give equal answers to all groups of inputs that both accept."""
    for name, runs in one.items():
        others = other[name]
        if isinstance(runs, MeasurementError) or isinstance(others, MeasurementError):
            continue
        mine, theirs = _stack_runs(runs), _stack_runs(others)
        if mine.keys() != theirs.keys():
            return False
        if not all(np.array_equal(mine[n], theirs[n], equal_nan=mine[n].dtype.kind == "f") for n in mine):
            return False
    return True


def _stack_runs(answers: Sequence[Tensors]) -> Tensors:
    return {name: np.concatenate([np.atleast_1d(one[name]) for one in answers]) for name in answers[0]}


def _judge_rounding(request: JudgeRequest, notes: dict[str, None]) -> Iterator[GateResult]:
    """Judge the structural invariants of a pipeline's parity gate, and the function without rounding.

    Copies are measured, since files that expose intermediate values are written beside them. Weights that cannot be
    compared are a note: the task metric decides about them.
    """
    a, b = request.baseline, request.candidate
    request.report(f"comparing weights and activations of {b.name} with those of {a.name}")
    is_real, inside = request.dataset is not None, request.arrange(request.inside)
    rows = _take_few(request.settings[0].samples.rows, _ACTIVATION_ROWS)
    weights: tuple[WeightMeasurement, ...] = ()
    activations: tuple[ActivationMeasurement, ...] = ()
    with Scratch() as folder:
        try:
            a, b = _copy_pair(a, b, folder)
            a = choose_source_form(inside, a, b, folder / "simplified.onnx")
            weights, unpaired = measure_paired_weights(a, b, inside, rows)
            if unpaired:
                notes[_describe_unpaired(unpaired)] = None
        except (MeasurementError, UserError) as error:
            notes[f"weights were not compared: {error}"] = None
        if request.kind.candidate.precision == "int8" and rows:
            try:
                activations = measure_activations(inside, a, b, rows)
                if not is_real:
                    activations = tuple(replace(one, clipping=None, stretch=None) for one in activations)
            except (MeasurementError, UserError) as error:
                notes[f"activations were not measured: {error}"] = None
        corrected = {weight.tensor for weight in weights if weight.bias and is_compensating(weight)}
        function = _judge_function(request, a, corrected, notes)  # in its own process, so that a crash is reported
    target = request.targets[0]
    evidence = replace(
        make_evidence(request.runtime(target.runtime), target, request.candidate),
        quantized=True,
        weights=weights,
        activations=activations,
    )
    for result in judge((ParityGate(),), evidence).results:
        if result.gate != "parity" or result.metric == "export" or (not is_real and result.metric in _NEEDS_REAL_ROWS):
            continue
        if result.metric != "weights" or weights:
            yield result
    yield from function


def _copy_pair(a: Path, b: Path, folder: Path) -> tuple[Path, Path]:
    """Copy two models into folders of their own and return the copies."""
    copies = folder / "baseline" / a.name, folder / "candidate" / b.name
    for path, copy in zip((a, b), copies, strict=True):
        copy.parent.mkdir()
        copy_model(path, copy)
    return copies


def _describe_unpaired(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    count = "1 weight was" if len(names) == 1 else f"{len(names)} weights were"
    return f"{count} not compared, since A has no original of them ({shown}): the task metric decides about them"


def _take_few(rows: Tensors, count: int) -> Tensors:
    """Return the first rows; fewer if one is large."""
    size = sum(array.nbytes for array in rows.values()) // max(1, max(map(len, rows.values()), default=1))
    return {name: array[: count if size < _LARGE_ROW else count // 4] for name, array in rows.items()}


def _judge_function(
    request: JudgeRequest, baseline: Path, corrected: Collection[str], notes: dict[str, None]
) -> list[GateResult]:
    """Judge whether the candidate without its rounding is the baseline with the candidate's weights.

    `corrected` names biases that the quantizer moved to compensate for rounding.

    Nothing is returned where that cannot be computed; the task metric decides then, and a note gives the reason.
    """
    with Scratch() as folder:
        plain, exact = folder / "baseline.onnx", folder / "candidate.onnx"
        try:
            paired = pair_quantized_weights(baseline, request.candidate)
            if paired.unpaired:
                return []
            biases = [w for w in read_float_weights(baseline, request.candidate) if w.name in corrected]
            write_with_weights(baseline, (*paired.pairs, *biases), plain)
            write_dequantized(baseline, request.candidate, exact)
            samples = request.settings[0].samples
            samples = replace(samples, rows=_take_few(samples.rows, _FUNCTION_ROWS))
            parity = compare(request.exact, REFERENCE, plain, exact, samples, request.report, sizes=request.sizes)
        except (MeasurementError, UserError) as error:
            notes[f"the function without rounding was not compared: {error}"] = None
            return []
    result = _parity_result(parity, "function")
    text = "without its rounding, B computes " + (
        "what A computes with B's weights" if parity.verdict is Verdict.PASS else "something else than A"
    )
    return [replace(result, reason=f"{text}: {result.reason}")]


def _judge_task(request: JudgeRequest, runtime: Runtime, target: Target) -> list[GateResult]:
    """Judge the task metric if labels exist or are not needed; otherwise how many answers change."""
    dataset, gate, runtime = request.dataset, request.metric, request.arrange(runtime)
    label_free = gate.definition().label_free
    if dataset is not None and (dataset.label is not None or label_free):
        return _judge_metric(request, runtime, target, dataset, gate)
    if not request.kind.is_rounded:
        return []
    rows = dataset.inputs if dataset is not None else request.settings[0].samples.rows
    agreement = _judge_agreement(request, runtime, target, rows) if rows else None
    if agreement is None:
        remedy = "give --labels and --metric, or --metric cosine for embeddings"
        reason = f"the cost of rounding for the task is unknown: no output can be read as classes; {remedy}"
    elif dataset is None:
        reason = (
            f"the cost of rounding for the task is unknown: {agreement.reason}, but generated rows "
            "are not representative of yours: supply --data and --labels"
        )
    elif agreement.verdict is Verdict.PASS:
        return [replace(agreement, reason=f"{agreement.reason}; accuracy cannot drop by more")]
    else:
        reason = f"{agreement.reason}: whether it is worse, only labels can show; add --labels"
    blank = agreement or GateResult(gate="task", metric="agreement", limit="", verdict=Verdict.INCONCLUSIVE, reason="")
    return [replace(blank, verdict=Verdict.INCONCLUSIVE, reason=reason)]


def _judge_metric(
    request: JudgeRequest, runtime: Runtime, target: Target, dataset: Dataset, gate: MetricGate
) -> list[GateResult]:
    definition = gate.definition()
    request.report(f"scoring {definition.label} on {len(dataset)} rows")
    scoring = ScoringRequest(
        runtime=runtime,
        target=target,
        models={CANDIDATE: request.candidate, A: request.baseline},
        dataset=dataset,
        seed=request.seed,
        functions=request.functions,
    )
    metrics = measure_metrics(scoring, (definition,))
    evidence = replace(
        make_evidence(runtime, target, request.candidate),
        quantized=request.kind.is_rounded,
        metrics=metrics.counts,
        scores=metrics.scores,
        grouped=metrics.grouped,
    )
    results = [r for r in judge((gate,), evidence).results if r.gate == "metric"]
    return [replace(r, gate="task", metric=r.metric.removesuffix(f" vs {A}")) for r in results]


def _judge_agreement(request: JudgeRequest, runtime: Runtime, target: Target, rows: Tensors) -> GateResult | None:
    """Judge the share of answers that change, with A's answers as labels; None if they are not classes."""
    try:
        parts = read_answers(
            runtime, request.baseline, target, rows, lambda outputs: read_prediction(ACCURACY, outputs)
        )
        reading = join_predictions(parts)
        label = (reading.values > 1 / 2).astype(np.int64) if reading.columns == 1 else reading.values
        gate = MetricGate(name="accuracy", max_drop=request.metric.max_drop or request.metric.max_increase)
        dataset = Dataset(inputs=rows, label=label)
        (accuracy,) = [
            r
            for r in _judge_metric(request, runtime, target, dataset, gate)
            if r.metric == "accuracy" and not r.advisory
        ]
    except (UserError, ValueError):
        return None
    if accuracy.estimate is None or accuracy.verdict is Verdict.ERROR:
        return None
    changed = round(-accuracy.estimate * accuracy.n)
    text = f"{changed} of {accuracy.n} classes change, at most {-100 * (accuracy.low or 0.0):.3g}% of such rows"
    return replace(accuracy, metric="agreement", reason=text)


def build_metric_gate(name: str | None, max_drop: float, *, lower_is_better: bool) -> MetricGate:
    """Build the limit on a metric: an absolute drop, or a relative growth."""
    gate = MetricGate(name=name)  # type: ignore[arg-type]
    if name is not None and ":" in name:
        gate = MetricGate(use=name, higher_is_better=not lower_is_better)
    return replace(gate, max_increase=max_drop) if gate.lower_is_better else replace(gate, max_drop=max_drop)
