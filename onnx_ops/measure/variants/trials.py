"""Build the models of a search, and measure their metric loss, error and time."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from onnx_ops.domain.arithmetic import Arithmetic
from onnx_ops.domain.artifact import MODEL_FILE, digest_file
from onnx_ops.domain.evidence import EXPORT, Interval
from onnx_ops.domain.gate import MetricDefinition
from onnx_ops.domain.pipeline import Quantize
from onnx_ops.domain.quantization import Budget, Recipe, Sensitivity, Trial
from onnx_ops.domain.target import Target
from onnx_ops.errors import OnnxOpsError, UserError
from onnx_ops.measure.answers import read_answers, read_values, split_batches, temporary_copy
from onnx_ops.measure.files import slice_rows
from onnx_ops.measure.quantization import PAIRS_AT_ONCE
from onnx_ops.measure.scoring import (
    ModelPredictions,
    ScoringRequest,
    TaskMetrics,
    measure_metrics,
    read_predictions,
)
from onnx_ops.measure.timing import build_feed, compute_log_ratios
from onnx_ops.onnx_graph.channel_balance import write_balanced
from onnx_ops.onnx_graph.files import list_external_names
from onnx_ops.onnx_graph.instrumentation import (
    ValueRange,
    list_activations,
    list_computed_values,
    write_with_quantized_node,
)
from onnx_ops.ports import (
    Context,
    Dataset,
    OptimizeRequest,
    PairedBenchmarkSchedule,
    Runtime,
    Tensors,
)
from onnx_ops.statistics.latency import session_interval
from onnx_ops.statistics.scores import CANDIDATE, CustomMetric
from onnx_ops.statistics.variants.search import BuildTrial, ProbeNode

PROBED, RANGED = 16, 16
"""Number of rows to measure output errors, and to compute ranges of probed nodes."""

PAIRS, BLOCKS = 5, 2
TIMED_S = 1.5
"""Target time in seconds to time one model against fp32.

Slow models take longer, since each block has at least three runs. The time allows only a few runs;
the gates make the final measurement.
"""

_ALPHA = 0.05
_RUNS = (3, 10)
_RUNS_P99 = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchContext:
    """The inputs of a search.

    `source` is the export; `folder` receives the built models. `machines` has the arithmetic of the
    target machines, on which recipes depend. The metric is measured on the rows of `tuning_data`;
    `lower` is True if lower values are better. Activation ranges come from `calibration`. `batch`
    is the number of rows of one timed request.
    """

    project: Context
    section: Quantize
    source: Path
    folder: Path
    targets: tuple[Target, ...]
    machines: tuple[Arithmetic, ...]
    tuning_data: Dataset
    calibration: Tensors | None
    metric: MetricDefinition
    lower: bool
    batch: int
    budget: Budget
    seed: int
    functions: Mapping[str, CustomMetric] = field(default_factory=dict)


class TrialRunner:
    """Runner of trials, which builds and measures the models of a search.

    The answers of fp32 are read once for each kind of target. Times of fp32 are measured beside
    each model.
    """

    def __init__(self, context: SearchContext, recipes: Mapping[str, Recipe]) -> None:
        self._context, self._recipes = context, recipes
        self._predictions: dict[str, ModelPredictions] = {}
        self._schedules: dict[str, PairedBenchmarkSchedule] = {}

    def build(self, action: BuildTrial) -> Trial:
        """Build and measure one model; an error is recorded in the trial."""
        context = self._context
        started = context.project.clock.monotonic()
        trial = Trial(recipe=action.recipe, excluded=action.excluded, why=action.why)
        try:
            path, notes = self.make(trial)
            size = sum(
                (path.parent / name).stat().st_size
                for name in (path.name, *list_external_names(path))
            )
            trial = self._measure(
                replace(trial, notes=notes, size_bytes=size, model=digest_file(path)), path
            )
        except OnnxOpsError as error:
            trial = replace(trial, failure=str(error).splitlines()[0])
        return replace(trial, seconds=context.project.clock.monotonic() - started)

    def make(self, trial: Trial) -> tuple[Path, tuple[str, ...]]:
        """Build the model of a trial; return its path and the notes of the optimizer."""
        context, recipe = self._context, self._recipes[trial.recipe]
        folder = context.folder / f"trial-{len(list(context.folder.iterdir()))}"
        folder.mkdir()
        section = replace(
            context.section,
            method=recipe.method,
            exclude=trial.excluded,
            options=recipe.options,
            budget=None,
            tuning_data=None,
        )
        request = OptimizeRequest(
            section=section,
            source=context.source,
            path=folder / MODEL_FILE,
            calibration=context.calibration,
            machines=context.machines,
            values=context.tuning_data.values,
        )
        return request.path, context.project.optimizer(recipe.method, None).optimize(request)

    def probe(self, action: ProbeNode) -> Sensitivity:
        """Measure the error of the outputs if only one node is quantized.

        A failure is recorded in the result.
        """
        context = self._context
        started = context.project.clock.monotonic()
        sensitivity = Sensitivity(recipe=action.recipe, node=action.node)
        static = self._recipes[action.recipe].method == "static"
        levels = 63 if any(machine.saturates for machine in context.machines) else 127
        try:
            ranges = self._activation_ranges if static else None
            with temporary_copy(self._balanced, "alone") as copy:
                write_with_quantized_node(
                    self._balanced, action.node, copy, ranges=ranges, weight_levels=levels
                )
                sensitivity = replace(sensitivity, error=self._measure_error(copy))
        except (OnnxOpsError, ValueError) as error:
            sensitivity = replace(sensitivity, failure=str(error).splitlines()[0])
        return replace(sensitivity, seconds=context.project.clock.monotonic() - started)

    def _measure(self, trial: Trial, path: Path) -> Trial:
        context = self._context
        kinds = {  # Targets of the same kind give the same answers, so one of them is measured.
            (t.runtime, tuple(p.name for p in t.providers), t.session.graph_level): t
            for t in reversed(context.targets)
        }
        drop = max(self._measure_drop(path, target) for target in kinds.values())
        trial = replace(trial, drop=drop, error=self._measure_error(path))
        feed = build_feed(context.source, context.tuning_data.inputs, context.batch)
        ratios = {
            target.name: self._measure_ratio(path, target, feed) for target in context.targets
        }
        p99: dict[str, float] = {}
        if context.budget.p99 is not None and drop <= context.budget.metric_drop:
            p99 = {target.name: self._measure_p99(path, target, feed) for target in context.targets}
        return replace(trial, ratios=ratios, p99=p99)

    def _measure_ratio(self, path: Path, target: Target, feed: Tensors) -> Interval:
        """Return the ratio of a model's time to fp32's."""
        context = self._context
        runtime, name = context.project.runtime(target.runtime), target.name
        if name not in self._schedules:
            self._schedules[name] = _plan_rounds(
                runtime, context.source, target, feed, context.seed
            )
        pairs = runtime.benchmark((context.source, path), target, feed, self._schedules[name])
        estimate, low, high = session_interval(compute_log_ratios(pairs), _ALPHA)
        return Interval(estimate=math.exp(estimate), low=math.exp(low), high=math.exp(high))

    def _measure_p99(self, path: Path, target: Target, feed: Tensors) -> float:
        """Return the 99th percentile of a model's run times in seconds."""
        runtime = self._context.project.runtime(target.runtime)
        samples = runtime.sample(path, target, feed, runs=_RUNS_P99, warmup=_RUNS[1])
        return float(np.quantile(samples.nanoseconds.astype(np.float64), 0.99)) / 1e9

    def _measure_drop(self, path: Path, target: Target) -> float:
        """Return a model's loss of the metric relative to fp32 on the same rows."""
        context = self._context
        request = ScoringRequest(
            runtime=context.project.runtime(target.runtime),
            target=_use_all_cores(target),
            models={CANDIDATE: path, EXPORT: context.source},
            dataset=context.tuning_data,
            seed=context.seed,
            functions=context.functions,
        )
        if target.name not in self._predictions:
            self._predictions[target.name] = read_predictions(request, EXPORT, [context.metric])
        metrics = measure_metrics(
            replace(request, known={EXPORT: self._predictions[target.name]}), [context.metric]
        )
        drop = _read_drop(metrics, lower=context.lower)
        if drop is None:
            why = next(
                (why for s in metrics.scores if (why := s.broken or s.failed or s.undefined)),
                "it needs labels",
            )
            what = f"{context.metric.label} cannot be measured on the tuning rows"
            raise UserError(what, where=context.section.name, why=why)
        return drop

    def _measure_error(self, path: Path) -> float:
        """Return the result of `compute_worst_error` on a few rows."""
        return compute_worst_error(self._exact_outputs, self._run(path))

    @functools.cached_property
    def _exact_outputs(self) -> Tensors:
        return self._run(self._context.source)

    def _run(self, path: Path) -> Tensors:
        context = self._context
        target = context.targets[0]
        probed = slice_rows(context.tuning_data.inputs, 0, PROBED)
        parts = read_answers(
            context.project.runtime(target.runtime),
            path,
            _use_all_cores(target),
            probed,
            lambda one: one,
        )
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    @functools.cached_property
    def _balanced(self) -> Path:
        """Return the source with the channels balanced as the quantizers do."""
        source, path = self._context.source, self._context.folder / "balanced.onnx"
        return path if write_balanced(source, path) else source

    @functools.cached_property
    def _activation_ranges(self) -> Mapping[str, ValueRange]:
        """Return the smallest and largest value of each activation that a product reads."""
        context, source = self._context, self._balanced
        probed = slice_rows(context.calibration or context.tuning_data.inputs, 0, RANGED)
        read = {name for names in list_activations(source).values() for name in names}
        ranges = {name: _find_range(probed[name]) for name in read & set(probed)}
        inner = [value.name for value in list_computed_values(source) if value.name in read]
        runtime, target = (
            context.project.runtime(context.targets[0].runtime),
            _use_all_cores(context.targets[0]),
        )
        feeds = tuple(feed for feed, _ in split_batches(source, probed))
        for start in range(0, len(inner), PAIRS_AT_ONCE):
            names = inner[start : start + PAIRS_AT_ONCE]
            for values in read_values(runtime, source, target, names, feeds):
                for name in set(names) & set(values):
                    ranges[name] = _join_ranges(ranges.get(name), _find_range(values[name]))
        return ranges


def compute_worst_error(exact: Tensors, answers: Tensors) -> float:
    """Return the root mean square error of the worst float output.

    The unit is the standard deviation of the output. NaN and infinite values of `exact` must be
    equal in `answers`, and have no error.

    Raises:
        UserError: an exact value or its answer is NaN or infinite, and the two differ.
    """
    errors = [0.0]
    for name, values in exact.items():
        if values.dtype.kind != "f" or not values.size or name not in answers:
            continue
        truth, found = values.astype(np.float64), answers[name].astype(np.float64)
        usable = np.isfinite(truth)
        same = (truth == found) | (np.isnan(truth) & np.isnan(found))
        if not np.where(usable, np.isfinite(found), same).all():
            raise UserError(f"NaN or infinite values of output {name} differ from those of fp32")
        if usable.any():
            difference = found[usable] - truth[usable]
            errors.append(float(np.sqrt(np.mean(difference**2)) / (np.std(truth[usable]) or 1.0)))
    return max(errors)


def _read_drop(metrics: TaskMetrics, *, lower: bool) -> float | None:
    """Return the loss relative to fp32; None if it was not measured.

    For a metric that counts rows, the loss is a share of rows. For another metric, it is the change
    of the score: relative if lower is better, otherwise absolute.
    """
    for counts in metrics.counts:
        if counts.against == EXPORT:
            return (counts.only_baseline - counts.only_candidate) / counts.n
    for score in (score for score in metrics.scores if score.against == EXPORT):
        if lower and score.ratio is not None:
            return score.ratio.estimate - 1
        if not lower and score.difference is not None:
            return -score.difference.estimate
    return None


def _use_all_cores(target: Target) -> Target:
    """Return the target with all cores, for runs whose timing does not matter."""
    return replace(target, session=replace(target.session, intra_op_threads=0))


def _plan_rounds(
    runtime: Runtime, source: Path, target: Target, feed: Tensors, seed: int
) -> PairedBenchmarkSchedule:
    """Return a schedule with as many runs as the time for a trial allows."""
    samples = runtime.sample(source, target, feed, runs=_RUNS[0], warmup=1)
    seconds = max(float(np.median(samples.nanoseconds.astype(np.float64))) / 1e9, 1e-6)
    affordable = int(TIMED_S / seconds / PAIRS / (2 * BLOCKS + 1))
    runs = min(max(affordable, _RUNS[0]), _RUNS[1])
    return PairedBenchmarkSchedule(
        rounds=PAIRS, blocks=BLOCKS, runs=runs, warmup=max(1, runs // 2), seed=seed
    )


def _find_range(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> ValueRange:
    values = array[np.isfinite(array.astype(np.float64))] if array.dtype.kind == "f" else array
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)


def _join_ranges(one: ValueRange | None, other: ValueRange) -> ValueRange:
    return other if one is None else (min(one[0], other[0]), max(one[1], other[1]))
