"""Tries one recipe of a search: builds it, scores it on the tuning rows, and times it against fp32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from onnx_ops.domain.artifact import MODEL_FILE, digest_file
from onnx_ops.domain.evidence import Interval
from onnx_ops.domain.metric import MetricDefinition
from onnx_ops.domain.pipeline import EXPORT, Quantize
from onnx_ops.domain.recipes import Arithmetic
from onnx_ops.domain.search import Budget, Recipe, Sensitivity, Trial
from onnx_ops.domain.target import Target
from onnx_ops.errors import OnnxOpsError, UserError
from onnx_ops.measure.activations import PAIRS_AT_ONCE
from onnx_ops.measure.answers import batches_of, read_answers
from onnx_ops.measure.files import rows
from onnx_ops.measure.scoring import Readings, Scorer, measure_metrics, read_model
from onnx_ops.measure.timing import feed_of, ratios_of
from onnx_ops.onnx_graph.files import external_names
from onnx_ops.onnx_graph.intermediate import computed_values, expose
from onnx_ops.onnx_graph.simulate import Range, activations, quantize_alone
from onnx_ops.ports import Dataset, OptimizeRequest, Ports, RaceSchedule, Runtime, Tensors
from onnx_ops.statistics.latency import session_interval
from onnx_ops.statistics.metrics import OwnMetric
from onnx_ops.statistics.scores import CANDIDATE
from onnx_ops.statistics.search import Build, Probe

PROBED, RANGED = 16, 16
"""Rows on which errors of the outputs are found, and ranges of activations for that."""

PAIRS, BLOCKS = 5, 2
TIMED_S = 1.5
"""Seconds that timing one model against fp32 may take, as far as a few runs allow; gates measure what counts."""

_ALPHA = 0.05
_RUNS = (3, 10)
_RUNS_P99 = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
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
    functions: Mapping[str, OwnMetric] = field(default_factory=dict)


class Workshop:
    """Does what a search wants done. What it knows of fp32 is found once."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._known: dict[str, Readings] = {}
        self._outputs: Tensors | None = None
        self._ranges: dict[str, Range] | None = None
        self._schedules: dict[str, RaceSchedule] = {}

    def build(self, action: Build) -> Trial:
        """Build and measure one model; a library that fails is told in the trial."""
        ground = self._ground
        begun = ground.ports.clock.monotonic()
        trial = Trial(recipe=action.recipe, excluded=action.excluded, why=action.why)
        try:
            path, notes = self.make(trial)
            trial = self._measured(replace(trial, notes=notes, size_bytes=_bytes(path), model=digest_file(path)), path)
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

    def probe(self, action: Probe) -> Sensitivity:
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
        scorer = Scorer(
            runtime=ground.ports.runtime(target.runtime),
            target=_quick(target),
            models={CANDIDATE: path, EXPORT: ground.source},
            dataset=ground.tune,
            seed=ground.seed,
            functions=ground.functions,
        )
        if target.name not in self._known:
            self._known[target.name] = read_model(scorer, EXPORT, [ground.metric])
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
        probed = rows(ground.tune.inputs, 0, PROBED)
        parts = read_answers(ground.ports.runtime(target.runtime), path, _quick(target), probed, lambda one: one)
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _activation_ranges(self) -> Mapping[str, Range]:
        """The smallest and largest value of each activation that a product reads."""
        if self._ranges is not None:
            return self._ranges
        ground = self._ground
        probed = rows(ground.calibration or ground.tune.inputs, 0, RANGED)
        read = {name for names in activations(ground.source).values() for name in names}
        found = {name: _range(probed[name]) for name in read & set(probed)}
        inner = [value.name for value in computed_values(ground.source) if value.name in read]
        copy = ground.source.with_name("ranges.onnx")
        target = ground.targets[0]
        for start in range(0, len(inner), PAIRS_AT_ONCE):
            names = inner[start : start + PAIRS_AT_ONCE]
            expose(ground.source, names, copy)
            feeds = tuple(feed for feed, _ in batches_of(copy, probed))
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
        runtime, feed = ground.ports.runtime(target.runtime), feed_of(ground.source, ground.tune.inputs, ground.batch)
        if target.name not in self._schedules:
            self._schedules[target.name] = _schedule(runtime, ground.source, target, feed, ground.seed)
        samples = runtime.race((ground.source, path), target, feed, self._schedules[target.name])
        estimate, low, high = session_interval(ratios_of(samples), _ALPHA)
        return Interval(estimate=math.exp(estimate), low=math.exp(low), high=math.exp(high))

    def _p99(self, path: Path, target: Target) -> float:
        ground = self._ground
        feed = feed_of(ground.source, ground.tune.inputs, ground.batch)
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


def _schedule(runtime: Runtime, source: Path, target: Target, feed: Tensors, seed: int) -> RaceSchedule:
    """As many runs as the time for a trial allows."""
    samples = runtime.sample(source, target, feed, runs=_RUNS[0], warmup=1)
    seconds = max(float(np.median(samples.nanoseconds.astype(np.float64))) / 1e9, 1e-6)
    affordable = int(TIMED_S / seconds / PAIRS / (2 * BLOCKS + 1))
    runs = min(max(affordable, _RUNS[0]), _RUNS[1])
    return RaceSchedule(heats=PAIRS, blocks=BLOCKS, runs=runs, warmup=max(1, runs // 2), seed=seed)


def _range(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Range:
    values = array[np.isfinite(array.astype(np.float64))] if array.dtype.kind == "f" else array
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)


def _bytes(path: Path) -> int:
    return sum((path.parent / name).stat().st_size for name in (path.name, *external_names(path)))
