"""Search for variants: recipes and exclusions tried under a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from onnx_ops import codec
from onnx_ops.domain.artifact import MODEL_FILE, digest_file
from onnx_ops.domain.evidence import Interval
from onnx_ops.domain.gate import MetricDefinition
from onnx_ops.domain.pipeline import EXPORT, Quantize
from onnx_ops.domain.quantization import (
    Arithmetic,
    Budget,
    Recipe,
    Role,
    SearchLogEntry,
    SearchRecord,
    Sensitivity,
    Trial,
    list_search_recipes,
)
from onnx_ops.domain.target import Target
from onnx_ops.errors import OnnxOpsError, StageError, UserError
from onnx_ops.measure.answers import read_answers, split_batches
from onnx_ops.measure.files import slice_rows
from onnx_ops.measure.quantization import PAIRS_AT_ONCE
from onnx_ops.measure.scoring import ModelPredictions, ScoringRequest, measure_metrics, read_predictions
from onnx_ops.measure.timing import build_feed, compute_log_ratios
from onnx_ops.onnx_graph.files import external_names
from onnx_ops.onnx_graph.instrumentation import (
    OPERATORS,
    Range,
    activations,
    computed_values,
    expose,
    products,
    quantize_alone,
)
from onnx_ops.onnx_graph.model_info import info
from onnx_ops.ports import Dataset, OptimizeRequest, PairedBenchmarkSchedule, Ports, Runtime, StageJournal, Tensors
from onnx_ops.statistics.latency import session_interval
from onnx_ops.statistics.metrics import CustomMetric
from onnx_ops.statistics.scores import CANDIDATE
from onnx_ops.statistics.search import (
    BuildTrial,
    ProbeNode,
    SearchState,
    StopSearch,
    assign_roles,
    choose_next_step,
    compute_pareto_front,
    list_node_contributions,
)

Tell = Callable[[str], None]

PROBED, RANGED = 16, 16
"""Rows on which errors of the outputs are found, and ranges of activations for that."""

PAIRS, BLOCKS = 5, 2
TIMED_S = 1.5
"""Seconds that timing one model against fp32 may take, as far as a few runs allow; gates measure what counts."""

_ALPHA = 0.05
_RUNS = (3, 10)
_RUNS_P99 = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search saw, and the model and trial of each role that it found one for."""

    record: SearchRecord
    models: Mapping[Role, tuple[Path, Trial]]


def search(ground: SearchContext, journal: StageJournal, tell: Tell) -> SearchResult:
    """Try until nothing is left to try or the budget is spent; go on from the journal if there is one.

    A journal whose search had ended is that of a result that somebody wants anew.

    Raises:
        StageError: a library gives another file for the same recipe.
    """
    ground.folder.mkdir()
    recipes = _recipes(ground)
    ground = replace(ground, recipes={recipe.name: recipe for recipe in recipes})
    workshop = TrialRunner(ground)
    known = SearchState(recipes=recipes, budget=ground.budget, export_bytes=info(ground.source).size_bytes)
    known = _resumed(known, journal, tell)
    while not isinstance(action := choose_next_step(known), StopSearch):
        if isinstance(action, BuildTrial):
            entry = SearchLogEntry(trial=workshop.build(action))
        else:
            entry = SearchLogEntry(sensitivity=workshop.probe(action))
        journal.append(codec.to_json(entry))
        known = _with(known, entry)
        tell(f"{_told(entry)}; {known.seconds:.0f} s of {60 * ground.budget.max_minutes:.0f} s")
    record = _record(ground, known, action)
    models: dict[Role, tuple[Path, Trial]] = {}
    for slot in record.slots:
        if slot.trial is not None:
            trial = record.trials[slot.trial]
            models[slot.role] = (_made(workshop, trial, ground.section.name), trial)
            tell(f"{ground.section.name}-{slot.role}: {describe_trial(trial, ground.metric.label)}")
        else:
            tell(f"{ground.section.name}-{slot.role}: empty, {slot.reason}")
    journal.append(_END)
    return SearchResult(record=record, models=models)


_END = {"end": True}


def _resumed(known: SearchState, journal: StageJournal, tell: Tell) -> SearchState:
    lines = journal.read()
    if _END in lines:
        journal.clear()
        lines = ()
    for line in lines:
        known = _with(known, codec.from_json(line, SearchLogEntry))
    if lines:
        tell(f"going on after {len(lines)} steps of a search that was stopped")
    return known


def _with(known: SearchState, entry: SearchLogEntry) -> SearchState:
    if entry.trial is not None:
        return replace(known, trials=(*known.trials, entry.trial))
    if entry.sensitivity is not None:
        return replace(known, sensitivities=(*known.sensitivities, entry.sensitivity))
    return known


def _recipes(ground: SearchContext) -> tuple[Recipe, ...]:
    """Those that the machines allow, with the nodes of the model that each may keep in float."""
    small = ground.budget.size is not None or "small" in ground.section.keep
    named = list_search_recipes(ground.machines, calibrated=ground.calibration is not None, small=small)
    found = [replace(recipe, nodes=products(ground.source, recipe.method)) for recipe in named]
    return tuple(recipe for recipe in found if recipe.nodes or recipe.method not in OPERATORS)


def _record(ground: SearchContext, known: SearchState, stop: StopSearch) -> SearchRecord:
    roles = tuple(dict.fromkeys(ground.section.keep))
    return SearchRecord(
        name=ground.section.name,
        metric=ground.metric.label,
        rows=len(ground.tune),
        export_bytes=known.export_bytes,
        targets=tuple(target.name for target in ground.targets),
        budget=ground.budget,
        recipes=known.recipes,
        trials=known.trials,
        sensitivities=known.sensitivities,
        bought=list_node_contributions(known),
        front=compute_pareto_front(known),
        slots=assign_roles(known, ground.section.name, roles, unfinished=stop.reason if stop.timed_out else ""),
        stopped=stop.reason,
        timed_out=stop.timed_out,
        seconds=known.seconds,
    )


def _made(workshop: TrialRunner, trial: Trial, name: str) -> Path:
    """The model of a trial, built again: what was measured is what is given on."""
    path, _ = workshop.make(trial)
    if digest_file(path) != trial.model:
        raise StageError(
            "the same recipe gave another file than before",
            where=f"search {name}, {trial.recipe}",
            remedy="Search anew: `--fresh search`.",
        )
    return path


def describe_trial(trial: Trial, metric: str) -> str:
    """A trial in a line."""
    count = len(trial.excluded)
    kept = f" with {count} node{'s' if count > 1 else ''} in float" if count else ""
    if trial.failure:
        return f"{trial.recipe}{kept}: {trial.failure}"
    times = ", ".join(f"{one.estimate:.3g}x the time on {name}" for name, one in sorted(trial.ratios.items()))
    drop = trial.drop or 0.0
    return f"{trial.recipe}{kept}: {metric} {0.0 - 100 * drop:+.3g} points, {times}, {trial.size_bytes / 1e3:.4g} kB"


def _told(entry: SearchLogEntry) -> str:
    if entry.trial is not None:
        return describe_trial(entry.trial, "metric")
    one = entry.sensitivity
    if one is None:
        return ""
    return f"{one.recipe}, only {one.node}: " + (one.failure or f"error {one.error or 0.0:.3g}")


def describe_recipe(record: SearchRecord, trial: Trial) -> Sequence[str]:
    """How a variant that was found by search came to be, in sentences."""
    kept = f"; in float: {', '.join(trial.excluded)}" if trial.excluded else ""
    tried = f"found by search {record.name} among {len(record.trials)} models, {record.rows} rows: "
    return (tried + describe_trial(trial, record.metric) + kept, *trial.notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchContext:
    """What a search stands on. `source` is the export in a folder of its own, `folder` takes the models it builds.

    `lower` says that less of the metric is better; `tune` are the rows it decides by, `calibration` those for ranges.
    """

    ports: Ports
    section: Quantize
    source: Path
    folder: Path
    targets: tuple[Target, ...]
    machines: tuple[Arithmetic, ...]
    tune: Dataset
    calibration: Tensors | None
    metric: MetricDefinition
    lower: bool
    batch: int
    budget: Budget
    seed: int
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    functions: Mapping[str, CustomMetric] = field(default_factory=dict)


class TrialRunner:
    """Does what a search wants done. What it knows of fp32 is found once."""

    def __init__(self, ground: SearchContext) -> None:
        self._ground = ground
        self._known: dict[str, ModelPredictions] = {}
        self._outputs: Tensors | None = None
        self._ranges: dict[str, Range] | None = None
        self._schedules: dict[str, PairedBenchmarkSchedule] = {}

    def build(self, action: BuildTrial) -> Trial:
        """Build and measure one model; a library that fails is told in the trial."""
        ground = self._ground
        begun = ground.ports.clock.monotonic()
        trial = Trial(recipe=action.recipe, excluded=action.excluded, why=action.why)
        try:
            path, notes = self.make(trial)
            trial = self._measured(
                replace(trial, notes=notes, size_bytes=_count_bytes(path), model=digest_file(path)), path
            )
        except OnnxOpsError as error:
            trial = replace(trial, failure=str(error).splitlines()[0])
        return replace(trial, seconds=ground.ports.clock.monotonic() - begun)

    def make(self, trial: Trial) -> tuple[Path, tuple[str, ...]]:
        """The model of a trial in a folder of its own; the same recipe always gives the same file."""
        ground, recipe = self._ground, self._ground.recipes[trial.recipe]
        folder = ground.folder / f"trial-{len(list(ground.folder.iterdir()))}"
        folder.mkdir()
        section = replace(
            ground.section, method=recipe.method, exclude=trial.excluded, options=recipe.options, budget=None, tune=None
        )
        request = OptimizeRequest(
            section=section,
            source=ground.source,
            path=folder / MODEL_FILE,
            calibration=ground.calibration,
            machines=ground.machines,
        )
        return request.path, ground.ports.optimizer(recipe.method).optimize(request)

    def probe(self, action: ProbeNode) -> Sensitivity:
        """The error of the outputs if only one node were quantized."""
        ground = self._ground
        begun = ground.ports.clock.monotonic()
        found = Sensitivity(recipe=action.recipe, node=action.node)
        copy = ground.folder / "alone.onnx"
        static = ground.recipes[action.recipe].method == "static"
        levels = 63 if any(machine.saturates for machine in ground.machines) else 127
        try:
            ranges = self._activation_ranges() if static else None
            quantize_alone(ground.source, action.node, copy, ranges=ranges, weight_levels=levels)
            found = replace(found, error=self._error(copy))
        except (OnnxOpsError, ValueError) as error:
            found = replace(found, failure=str(error).splitlines()[0])
        finally:
            for file in (copy, copy.with_name(f"{copy.name}.data")):
                file.unlink(missing_ok=True)
        return replace(found, seconds=ground.ports.clock.monotonic() - begun)

    def _measured(self, trial: Trial, path: Path) -> Trial:
        ground = self._ground
        drop = max(self._drop(path, target) for target in _kinds(ground.targets))
        trial = replace(trial, drop=drop, error=self._error(path))
        ratios = {target.name: self._ratio(path, target) for target in ground.targets}
        trial = replace(trial, ratios=ratios)
        if ground.budget.p99 is None or drop > ground.budget.metric_drop:
            return trial
        return replace(trial, p99={target.name: self._p99(path, target) for target in ground.targets})

    def _drop(self, path: Path, target: Target) -> float:
        """What it loses of the metric against fp32 on the same rows."""
        ground = self._ground
        scorer = ScoringRequest(
            runtime=ground.ports.runtime(target.runtime),
            target=_quick(target),
            models={CANDIDATE: path, EXPORT: ground.source},
            dataset=ground.tune,
            seed=ground.seed,
            functions=ground.functions,
        )
        if target.name not in self._known:
            self._known[target.name] = read_predictions(scorer, EXPORT, [ground.metric])
        found = measure_metrics(replace(scorer, known={EXPORT: self._known[target.name]}), [ground.metric])
        for counts in found.counts:
            if counts.against == EXPORT:
                return (counts.only_baseline - counts.only_candidate) / counts.n
        for score in found.scores:
            if score.against == EXPORT and ground.lower and score.ratio is not None:
                return score.ratio.estimate - 1
            if score.against == EXPORT and not ground.lower and score.difference is not None:
                return -score.difference.estimate
        why = next((why for s in found.scores if (why := s.broken or s.failed or s.undefined)), "it needs labels")
        raise UserError(f"{ground.metric.label} cannot be told on the tuning rows", where=ground.section.name, why=why)

    def _error(self, path: Path) -> float:
        """Root mean square distance of the float outputs on a few rows, in their standard deviations."""
        if self._outputs is None:
            self._outputs = self._answers(self._ground.source)
        answers = self._answers(path)
        found = [0.0]
        for name, exact in self._outputs.items():
            if exact.dtype.kind == "f" and exact.size and name in answers:
                truth = exact.astype(np.float64)
                away = answers[name].astype(np.float64) - truth
                found.append(float(np.sqrt(np.mean(away**2)) / (np.std(truth) or 1.0)))
        worst = max(found)
        return worst if math.isfinite(worst) else math.inf

    def _answers(self, path: Path) -> Tensors:
        ground = self._ground
        target = ground.targets[0]
        probed = slice_rows(ground.tune.inputs, 0, PROBED)
        parts = read_answers(ground.ports.runtime(target.runtime), path, _quick(target), probed, lambda one: one)
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _activation_ranges(self) -> Mapping[str, Range]:
        """The smallest and largest value of each activation that a product reads."""
        if self._ranges is not None:
            return self._ranges
        ground = self._ground
        probed = slice_rows(ground.calibration or ground.tune.inputs, 0, RANGED)
        read = {name for names in activations(ground.source).values() for name in names}
        found = {name: _range(probed[name]) for name in read & set(probed)}
        inner = [value.name for value in computed_values(ground.source) if value.name in read]
        copy = ground.source.with_name("ranges.onnx")
        target = ground.targets[0]
        for start in range(0, len(inner), PAIRS_AT_ONCE):
            names = inner[start : start + PAIRS_AT_ONCE]
            expose(ground.source, names, copy)
            feeds = tuple(feed for feed, _ in split_batches(copy, probed))
            for outputs in ground.ports.runtime(target.runtime).run(copy, _quick(target), feeds):
                for name in set(names) & set(outputs):
                    low, high = _range(outputs[name])
                    before = found.get(name, (low, high))
                    found[name] = min(low, before[0]), max(high, before[1])
            copy.unlink()
        self._ranges = found
        return found

    def _ratio(self, path: Path, target: Target) -> Interval:
        ground = self._ground
        runtime, feed = (
            ground.ports.runtime(target.runtime),
            build_feed(ground.source, ground.tune.inputs, ground.batch),
        )
        if target.name not in self._schedules:
            self._schedules[target.name] = _schedule(runtime, ground.source, target, feed, ground.seed)
        samples = runtime.race((ground.source, path), target, feed, self._schedules[target.name])
        estimate, low, high = session_interval(compute_log_ratios(samples), _ALPHA)
        return Interval(estimate=math.exp(estimate), low=math.exp(low), high=math.exp(high))

    def _p99(self, path: Path, target: Target) -> float:
        ground = self._ground
        feed = build_feed(ground.source, ground.tune.inputs, ground.batch)
        runs, warmup = _RUNS_P99, _RUNS[1]
        samples = ground.ports.runtime(target.runtime).sample(path, target, feed, runs=runs, warmup=warmup)
        return float(np.quantile(samples.nanoseconds.astype(np.float64), 0.99)) / 1e9


def _kinds(targets: tuple[Target, ...]) -> list[Target]:
    """One target of each kind that may answer otherwise."""
    kinds = {(t.runtime, tuple(p.name for p in t.providers), t.session.graph_level): t for t in reversed(targets)}
    return list(kinds.values())


def _quick(target: Target) -> Target:
    """The same on all cores, where only answers count."""
    return replace(target, session=replace(target.session, intra_op_threads=0))


def _schedule(runtime: Runtime, source: Path, target: Target, feed: Tensors, seed: int) -> PairedBenchmarkSchedule:
    """As many runs as the time for a trial allows."""
    samples = runtime.sample(source, target, feed, runs=_RUNS[0], warmup=1)
    seconds = max(float(np.median(samples.nanoseconds.astype(np.float64))) / 1e9, 1e-6)
    affordable = int(TIMED_S / seconds / PAIRS / (2 * BLOCKS + 1))
    runs = min(max(affordable, _RUNS[0]), _RUNS[1])
    return PairedBenchmarkSchedule(heats=PAIRS, blocks=BLOCKS, runs=runs, warmup=max(1, runs // 2), seed=seed)


def _range(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Range:
    values = array[np.isfinite(array.astype(np.float64))] if array.dtype.kind == "f" else array
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)


def _count_bytes(path: Path) -> int:
    return sum((path.parent / name).stat().st_size for name in (path.name, *external_names(path)))
