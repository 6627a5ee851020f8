"""Judge: may one ONNX file take the place of another? One verdict on two files, without a pipeline.

A candidate in float must compute what its baseline computes. One that was made by rounding is judged by the parts of
rounding: each weight and activation, the function without rounding, and what rounding does to the task.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from onnx_ops.domain.artifact import Digest, digest_file
from onnx_ops.domain.decision import Decision, GateResult, Verdict, combine_verdicts
from onnx_ops.domain.evidence import ActivationMeasurement, Advice, Evidence, ParityMeasurement, WeightMeasurement
from onnx_ops.domain.gate import ACCURACY, MetricGate, ParityGate
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.measure.answers import read_answers, run_groups
from onnx_ops.measure.execution import inspect_execution
from onnx_ops.measure.predictions import join_predictions, read_prediction
from onnx_ops.measure.quantization import measure_activations, measure_weights
from onnx_ops.measure.scoring import ScoringRequest, TaskMetrics, measure_metrics
from onnx_ops.onnx_graph.dequantization import write_dequantized, write_with_fp16_weights, write_with_weights
from onnx_ops.onnx_graph.files import read_structure, resolve_external_files
from onnx_ops.onnx_graph.input_bounds import read_input_bounds
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.onnx_graph.model_kind import CandidateKind
from onnx_ops.onnx_graph.quantized_weights import read_quantized_weights
from onnx_ops.ports import Dataset, Runtime, Tensors
from onnx_ops.scratch import Scratch
from onnx_ops.statistics.judge import judge
from onnx_ops.statistics.metrics import CustomMetric
from onnx_ops.statistics.parity import measure_output, pool_noise
from onnx_ops.statistics.rules.common import join_lines
from onnx_ops.statistics.scores import CANDIDATE
from onnx_ops.tools.bench import (
    A,
    ComparisonResult,
    Conditions,
    Tell,
    benchmark_pair,
    build_pair_gates,
    read_runtime_facts,
)
from onnx_ops.tools.compare import REFERENCE, ParityResult, compare
from onnx_ops.tools.probing import SampleRows, build_groups

Part = Literal["parity", "latency"]

HALF = 2.0**-10
"""Spacing of float16 relative to its values."""

_LOOKED_AT, _COMPARED = 256, 128
"""Rows that activations are looked at on, and that the function is compared on."""

_LARGE_ROW = 1 << 14
"""Bytes of a row of which a quarter as many is enough: it has many values."""

_FIGURES = {"ratio": "latency", "load": "load time", "first": "first inference", "peak": "peak memory"}

_MADE_UP = frozenset({"saturation", "clipping"})
"""What of the activations only rows like those of use can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One point of the sweep: its name in results, the sizes of free dimensions, and the rows to feed."""

    name: str
    batch: int
    samples: SampleRows


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeRequest:
    """Two files, where and how they are held against each other, and how much the candidate may lose.

    `settings` is the sweep. `dataset` holds all rows that were brought, with labels if there are any; None where rows
    were made up. `metric` is the limit on the task metric. `runtime` gives a runtime by its name, `inside` is one for
    models that show what is inside them.
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
    tell: Tell = lambda _: None

    @property
    def exact(self) -> Runtime:
        return self.runtime(REFERENCE.runtime)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetJudgement:
    """What was found on one target. `paired` holds the timings, in the order of the sweep.

    `remedy` says what to do where something could not be measured.
    """

    target: str
    decision: Decision
    paired: tuple[ComparisonResult, ...] = ()
    advice: tuple[Advice, ...] = ()
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict on two files: the worst of those on all targets. `sizes` are bytes before and after."""

    kind: CandidateKind
    digests: tuple[Digest, Digest]
    sizes: tuple[int, int]
    targets: tuple[TargetJudgement, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        return combine_verdicts(one.decision.verdict for one in self.targets)


def judge_candidate(request: JudgeRequest) -> Judgement:
    """Measure what the kind of the candidate asks for, and judge it by the rules of a pipeline's gates.

    Raises:
        UserError: a file is not valid, the two take different inputs, or a metric does not fit them.
    """
    notes: dict[str, None] = {}
    rounding = tuple(_judge_rounding(request, notes)) if request.kind.is_rounded and request.only != "latency" else ()
    targets = tuple(_on_target(request, target, rounding, notes) for target in request.targets)
    return Judgement(
        kind=request.kind,
        digests=(digest_file(request.baseline), digest_file(request.candidate)),
        sizes=(read_model_info(request.baseline).size_bytes, read_model_info(request.candidate).size_bytes),
        targets=targets,
        notes=tuple(notes),
    )


def _on_target(
    request: JudgeRequest, target: Target, rounding: Sequence[GateResult], notes: dict[str, None]
) -> TargetJudgement:
    """A target on which something cannot be measured is an error of its own, and the others are judged all the same."""
    results, paired = list(rounding), list[ComparisonResult]()
    advice: tuple[Advice, ...] = ()
    remedy = ""
    try:
        runtime = request.runtime(target.runtime)
        read_runtime_facts(runtime, target, request.candidate)
        if request.only != "latency":
            found, advice = _judge_answers(request, runtime, target, notes)
            results += found
        if request.only != "parity":
            for number, setting in enumerate(request.settings):
                one = _time(request, runtime, target, setting, first=not number)
                paired.append(one)
                results += [_named(result, setting.name) for result in one.decision.results]
                advice = advice or one.evidence.advice
    except MeasurementError as error:
        why = f": {error.why}" if error.why else ""
        remedy = error.remedy
        reason = join_lines(f"{error.where}: {error.what}{why}" + (f". {remedy}" if remedy else ""))
        results.append(GateResult(gate="target", metric="", limit="", verdict=Verdict.ERROR, reason=reason))
    decision = Decision(variant=request.candidate.name, target=target.name, results=tuple(results))
    return TargetJudgement(target=target.name, decision=decision, paired=tuple(paired), advice=advice, remedy=remedy)


def _time(
    request: JudgeRequest, runtime: Runtime, target: Target, setting: SweepPoint, *, first: bool
) -> ComparisonResult:
    return benchmark_pair(
        runtime,
        target,
        request.baseline,
        request.candidate,
        setting.samples.feed(setting.batch),
        gates=build_pair_gates(request.max_regression, concurrency=request.concurrency, cold=request.cold and first),
        conditions=request.conditions,
        seed=request.seed,
        tell=request.tell,
    )


def _named(result: GateResult, setting: str) -> GateResult:
    """A result of one setting of the sweep, by what it is about."""
    figure = result.metric.removesuffix(f" vs {A}")
    return replace(result, metric=", ".join(part for part in (_FIGURES.get(figure, figure), setting) if part))


def _judge_answers(
    request: JudgeRequest, runtime: Runtime, target: Target, notes: dict[str, None]
) -> tuple[list[GateResult], tuple[Advice, ...]]:
    """The candidate's answers on one target: at every shape of the sweep as those of the baseline, and at the task."""
    results: list[GateResult] = []
    advice: tuple[Advice, ...] = ()
    if request.kind.is_rounded:
        examined = inspect_execution(runtime, request.baseline, request.candidate, target)
        advice = examined.advice
        evidence = replace(_evidence(request, runtime, target), coverage=examined.coverage)
        results += [r for r in judge((ParityGate(),), evidence).results if r.metric == "int8 coverage"]
        if request.kind.candidate.precision == "float16":
            results.append(_within_noise(request, runtime, target, "float16"))
    elif request.kind.baseline.precision != "float32":
        results.append(_within_noise(request, runtime, target, "baseline"))
    else:
        for setting in _shapes(request.settings):
            found = compare(
                runtime,
                target,
                request.baseline,
                request.candidate,
                setting.samples,
                request.tell,
                sizes=request.sizes,
                exact=request.exact,
            )
            notes |= dict.fromkeys(found.notes)
            results.append(_parity_result(found, "outputs", setting.name))
            advice = advice or found.advice
    results += _judge_task(request, runtime, target)
    return results, advice


def _shapes(settings: Sequence[SweepPoint]) -> Iterator[SweepPoint]:
    """The settings that differ in more than the batch, named without it."""
    seen = set()
    for setting in settings:
        name = ", ".join(part for part in setting.name.split(", ") if not part.startswith("batch "))
        if name not in seen:
            seen.add(name)
            yield replace(setting, name=name)


def _parity_result(found: ParityResult, metric: str, setting: str = "") -> GateResult:
    name, limit = ", ".join(part for part in (metric, setting) if part), "≤ 1x tolerance"
    if not found.differences:
        why = "; ".join(found.notes) or "both models answer with nothing"
        text = f"no answer can be compared: {why}"
        return GateResult(gate="parity", metric=name, limit=limit, verdict=Verdict.INCONCLUSIVE, reason=text)
    worst = found.worst
    return GateResult(
        gate="parity",
        metric=name,
        limit=limit,
        verdict=found.verdict,
        reason=found.reason,
        estimate=None if worst.mismatch else worst.ratio,
        bound=1.0,
        unit="x",
        n=sum(d.rows for d in found.differences if d.output == worst.output),
    )


def _within_noise(
    request: JudgeRequest, runtime: Runtime, target: Target, of: Literal["float16", "baseline"]
) -> GateResult:
    """The candidate's answers in units of the noise that its precision brings: the rule of the parity gate.

    For float16 that is what rounding the constants of the baseline does to its answers; for a quantized baseline, what
    the target's own graph optimisations do.
    """
    samples = request.settings[0].samples
    groups = [g for g in build_groups(samples, empty=False, bounds=read_input_bounds(request.baseline)) if g.inside]
    runs = {group.name: group.runs for group in groups}
    request.tell(f"running {request.candidate.name} on {len(groups)} groups of inputs")
    with Scratch() as folder:
        right = run_groups(request.exact, REFERENCE, request.baseline, runs)
        if of == "float16":
            rounded = folder / "halves.onnx"
            write_with_fp16_weights(request.baseline, rounded)
            rough = run_groups(request.exact, REFERENCE, rounded, runs)
        else:
            rough = run_groups(runtime, target, request.baseline, runs)
        answers = run_groups(runtime, target, request.candidate, runs)
    measured: list[ParityMeasurement] = []
    for name in runs:
        three = right[name], rough[name], answers[name]
        if isinstance(three[0], MeasurementError) or isinstance(three[1], MeasurementError):
            continue
        if isinstance(three[2], MeasurementError):
            text = f"B refuses these inputs, A does not: {three[2].why or three[2].what}"
            measured.append(_mismatch("*", name, text))
            continue
        exact, noisy, found = (_stacked(one) for one in three if not isinstance(one, MeasurementError))
        for output, expected in exact.items():
            if output not in found:
                measured.append(_mismatch(output, name, "B lacks this output"))
                continue
            epsilon = HALF if of == "float16" and expected.dtype.kind == "f" else 0.0
            one = measure_output(
                group=name, output=output, onnx=found[output], single=noisy[output], double=expected, epsilon=epsilon
            )
            measured.append(one)
    evidence = replace(_evidence(request, runtime, target), quantized=False, parity=pool_noise(measured))
    result = next(r for r in judge((ParityGate(),), evidence).results if r.gate == "parity")
    noise = "the noise of float16" if of == "float16" else "A's own noise"
    return replace(result, limit=f"≤ {ParityGate().noise_factor:g}x noise", reason=_worded(result.reason, noise))


def _worded(reason: str, noise: str) -> str:
    return reason.replace("the source's noise", noise).replace("the source gives", "A gives")


def _mismatch(output: str, group: str, text: str) -> ParityMeasurement:
    return ParityMeasurement(output=output, group=group, rows=0, error=0.0, noise=0.0, ratio=0.0, mismatch=text)


def _stacked(answers: Sequence[Tensors]) -> Tensors:
    return {name: np.concatenate([np.atleast_1d(one[name]) for one in answers]) for name in answers[0]}


def _judge_rounding(request: JudgeRequest, notes: dict[str, None]) -> Iterator[GateResult]:
    """The structural invariants of a pipeline's parity gate, and the function without rounding.

    Copies are looked at: files that show what is inside are written beside them.
    """
    a, b = request.baseline, request.candidate
    request.tell(f"comparing weights and activations of {b.name} with those of {a.name}")
    own = request.dataset is not None
    rows = _few(request.settings[0].samples.rows, _LOOKED_AT)
    weights: tuple[WeightMeasurement, ...] = ()
    activations: tuple[ActivationMeasurement, ...] = ()
    unread = ""
    function = _judge_function(request)  # in a process of its own: a model that crashes is told by it
    with Scratch() as folder:
        try:
            a, b = (_copied(path, folder / side) for path, side in ((a, "baseline"), (b, "candidate")))
            weights = measure_weights(a, b, request.inside, rows)
        except (MeasurementError, UserError) as error:
            unread = str(error)
        if request.kind.candidate.precision == "int8" and rows:
            try:
                found = measure_activations(request.inside, a, b, rows)
                activations = found if own else tuple(replace(one, clipping=None, stretch=None) for one in found)
            except (MeasurementError, UserError) as error:
                notes[f"activations were not looked at: {error}"] = None
    yield from _invariants(request, weights, activations, unread, own)
    yield function


def _copied(model: Path, folder: Path) -> Path:
    """The model and the files of its weights in a folder of its own."""
    for file in (model, *resolve_external_files(read_structure(model), model.parent)):
        place = folder / (file.name if file == model else file.relative_to(model.parent))
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    return folder / model.name


def _few(rows: Tensors, count: int) -> Tensors:
    """The first rows; fewer where one is large."""
    size = sum(array.nbytes for array in rows.values()) // max(1, max(map(len, rows.values()), default=1))
    return {name: array[: count if size < _LARGE_ROW else count // 4] for name, array in rows.items()}


def _invariants(
    request: JudgeRequest,
    weights: tuple[WeightMeasurement, ...],
    activations: tuple[ActivationMeasurement, ...],
    unread: str,
    own: bool,
) -> Iterator[GateResult]:
    target = request.targets[0]
    evidence = replace(
        _evidence(request, request.runtime(target.runtime), target), weights=weights, activations=activations
    )
    for result in judge((ParityGate(),), evidence).results:
        if result.gate != "parity" or result.metric == "export" or (not own and result.metric in _MADE_UP):
            continue
        if result.metric == "weights" and unread:
            yield replace(result, reason=join_lines(f"weights cannot be compared: {unread}"))
        else:
            yield result


def _judge_function(request: JudgeRequest) -> GateResult:
    """Whether the candidate, its rounding taken off, is the baseline with the candidate's weights."""
    with Scratch() as folder:
        plain, exact = folder / "baseline.onnx", folder / "candidate.onnx"
        try:
            weights = read_quantized_weights(request.baseline, request.candidate)
            write_with_weights(request.baseline, weights, plain)
            write_dequantized(request.baseline, request.candidate, exact)
            samples = request.settings[0].samples
            samples = replace(samples, rows=_few(samples.rows, _COMPARED))
            found = compare(request.exact, REFERENCE, plain, exact, samples, request.tell, sizes=request.sizes)
        except (MeasurementError, UserError) as error:
            return GateResult(
                gate="parity",
                metric="function",
                limit="≤ 1x tolerance",
                verdict=Verdict.INCONCLUSIVE,
                reason=join_lines(f"its rounding cannot be taken off: {error}"),
            )
    result = _parity_result(found, "function")
    told = "without its rounding, B computes " + (
        "what A does with B's weights" if found.verdict is Verdict.PASS else "something else than A"
    )
    return replace(result, reason=f"{told}: {result.reason}")


def _judge_task(request: JudgeRequest, runtime: Runtime, target: Target) -> list[GateResult]:
    """The task metric where there are labels, or none are needed; else how many answers change."""
    dataset, gate = request.dataset, request.metric
    label_free = gate.definition().label_free
    if dataset is not None and (dataset.label is not None or label_free):
        return _metric_results(request, runtime, target, dataset, gate)
    if not request.kind.is_rounded:
        return []
    rows = dataset.inputs if dataset is not None else request.settings[0].samples.rows
    found = _agreement(request, runtime, target, rows) if rows else None
    if found is None:
        remedy = "give --labels and --metric, or --metric cosine for embeddings"
        reason = f"what rounding costs the task is not shown: no output can be read as classes; {remedy}"
    elif dataset is None:
        reason = (
            f"what rounding costs the task is not shown: {found.reason}, but rows made up from the graph "
            "say nothing of yours: give --data, and --labels"
        )
    elif found.verdict is Verdict.PASS:
        return [replace(found, reason=f"{found.reason}; accuracy cannot drop by more")]
    else:
        reason = f"{found.reason}: whether for the worse, only labels tell; give --labels"
    blank = found or GateResult(gate="task", metric="agreement", limit="", verdict=Verdict.INCONCLUSIVE, reason="")
    return [replace(blank, verdict=Verdict.INCONCLUSIVE, reason=reason)]


def _metric_results(
    request: JudgeRequest, runtime: Runtime, target: Target, dataset: Dataset, gate: MetricGate
) -> list[GateResult]:
    definition = gate.definition()
    request.tell(f"scoring {definition.label} on {len(dataset)} rows")
    scorer = ScoringRequest(
        runtime=runtime,
        target=target,
        models={CANDIDATE: request.candidate, A: request.baseline},
        dataset=dataset,
        seed=request.seed,
        functions=request.functions,
    )
    return _judged(request, runtime, target, measure_metrics(scorer, (definition,)), gate)


def _judged(
    request: JudgeRequest, runtime: Runtime, target: Target, found: TaskMetrics, gate: MetricGate
) -> list[GateResult]:
    evidence = replace(
        _evidence(request, runtime, target), metrics=found.counts, scores=found.scores, grouped=found.grouped
    )
    results = [r for r in judge((gate,), evidence).results if r.gate == "metric"]
    return [replace(r, gate="task", metric=r.metric.removesuffix(f" vs {A}")) for r in results]


def _agreement(request: JudgeRequest, runtime: Runtime, target: Target, rows: Tensors) -> GateResult | None:
    """The share of answers that change, with A's own answers as labels; None where they are no classes."""
    try:
        parts = read_answers(
            runtime, request.baseline, target, rows, lambda outputs: read_prediction(ACCURACY, outputs)
        )
        reading = join_predictions(parts)
        label = (reading.values > 1 / 2).astype(np.int64) if reading.columns == 1 else reading.values
        gate = MetricGate(name="accuracy", max_drop=request.metric.max_drop or request.metric.max_increase)
        dataset = Dataset(inputs=rows, label=label)
        (found,) = [
            r
            for r in _metric_results(request, runtime, target, dataset, gate)
            if r.metric == "accuracy" and not r.advisory
        ]
    except (UserError, ValueError):
        return None
    if found.estimate is None or found.verdict is Verdict.ERROR:
        return None
    changed = round(-found.estimate * found.n)
    told = f"{changed} of {found.n} classes change, at most {-100 * (found.low or 0.0):.3g}% of such rows"
    return replace(found, metric="agreement", reason=told)


def _evidence(request: JudgeRequest, runtime: Runtime, target: Target) -> Evidence:
    """What the rules ask for; without a release, the file's digest stands for it."""
    digest = digest_file(request.candidate)
    return Evidence(
        pipeline="",
        variant="B",
        target=target.name,
        quantized=request.kind.is_rounded,
        release=digest,
        manifest=digest,
        target_digest=target.digest(),
        dedicated=target.dedicated,
        size_bytes=read_model_info(request.candidate).size_bytes,
        hardware=runtime.fingerprint(target),
        baseline=A,
    )


def build_metric_gate(name: str | None, max_drop: float, *, lower_is_better: bool) -> MetricGate:
    """The limit on a metric: a drop in percentage points, or of an error a growth as a share of the baseline's."""
    if name is not None and ":" in name:
        gate = MetricGate(use=name, higher_is_better=not lower_is_better)
        return replace(gate, max_increase=max_drop) if lower_is_better else replace(gate, max_drop=max_drop)
    gate = MetricGate(name=name)  # type: ignore[arg-type]
    grows = gate.definition().higher_is_better is False
    return replace(gate, max_increase=max_drop) if grows else replace(gate, max_drop=max_drop)
