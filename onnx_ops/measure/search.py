"""Search: recipes and exclusions tried under a budget, and the variants that are worth measuring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import MODEL_FILE, Digest, Manifest, digest_file
from onnx_ops.domain.metric import MetricDefinition
from onnx_ops.domain.pipeline import Quantize, Stage
from onnx_ops.domain.recipes import Arithmetic, searched
from onnx_ops.domain.search import SEARCH_FILE, Budget, Entry, Recipe, Role, SearchRecord, Trial
from onnx_ops.domain.target import Target
from onnx_ops.errors import StageError
from onnx_ops.measure.files import MODEL, checkout, get_dataset, put_document, put_folder
from onnx_ops.measure.trying import Ground, Workshop
from onnx_ops.measure.user_code import importable, load_function
from onnx_ops.onnx_graph.inspect import info
from onnx_ops.onnx_graph.simulate import OPERATORS, products
from onnx_ops.ports import Journal, Ports
from onnx_ops.scratch import Scratch
from onnx_ops.statistics.front import assign, front
from onnx_ops.statistics.search import Build, Known, Stop, next_action, purchases

Tell = Callable[[str], None]


def execute(stage: Stage, key: Digest, inputs: Mapping[str, Manifest], ports: Ports) -> Manifest:
    """Models of the roles that a variant was found for, under `<role>/`, and everything that was tried."""
    settings: Mapping[str, Any] = stage.settings
    hints: Mapping[str, Any] = stage.hints
    section = codec.from_json(settings["section"], Quantize, where=stage.id)
    metric = codec.from_json(settings["metric"]["definition"], MetricDefinition, where=stage.id)
    calibration = None
    if section.calibrate is not None:
        calibration = get_dataset(ports.store, inputs[f"data/{section.calibrate.data}"], inputs["export"])
        calibration = calibration.head(section.calibrate.samples)
    with Scratch() as folder, importable(ports.root):
        source = checkout(ports.store, inputs["export"], MODEL, folder / "source") / MODEL_FILE
        ground = Ground(
            ports=ports,
            section=section,
            source=source,
            folder=folder / "trials",
            targets=tuple(codec.from_json(one, Target, where=stage.id) for one in hints["targets"]),
            machines=tuple(codec.from_json(one, Arithmetic, where=stage.id) for one in settings["machines"]),
            tune=get_dataset(ports.store, inputs[f"data/{settings['data']}"], inputs["export"]).head(
                settings["samples"]
            ),
            calibration=calibration.inputs if calibration else None,
            metric=metric,
            lower=bool(settings["metric"]["lower"]),
            batch=settings["batch"],
            budget=section.budget or Budget(),
            seed=int(key[-8:], 16),
            functions={metric.use: load_function(metric.use, "gates")} if metric.use else {},
        )
        found = search(ground, ports.journal(key), ports.tell)
        files = {SEARCH_FILE: put_document(ports.store, found.record)}
        for role, (path, trial) in found.models.items():
            files |= put_folder(ports.store, path.parent, f"{role}/{MODEL}")
            files[f"{role}/trial.json"] = put_document(ports.store, trial)
    return Manifest(files=files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search saw, and the model and trial of each role that it found one for."""

    record: SearchRecord
    models: Mapping[Role, tuple[Path, Trial]]


def search(ground: Ground, journal: Journal, tell: Tell) -> Found:
    """Try until nothing is left to try or the budget is spent; go on from the journal if there is one.

    A journal whose search had ended is that of a result that somebody wants anew.

    Raises:
        StageError: a library gives another file for the same recipe.
    """
    ground.folder.mkdir()
    recipes = _recipes(ground)
    ground = replace(ground, recipes={recipe.name: recipe for recipe in recipes})
    workshop = Workshop(ground)
    known = Known(recipes=recipes, budget=ground.budget, export_bytes=info(ground.source).size_bytes)
    known = _resumed(known, journal, tell)
    while not isinstance(action := next_action(known), Stop):
        if isinstance(action, Build):
            entry = Entry(trial=workshop.build(action))
        else:
            entry = Entry(sensitivity=workshop.probe(action))
        journal.append(codec.to_json(entry))
        known = _with(known, entry)
        tell(f"{_told(entry)}; {known.seconds:.0f} s of {60 * ground.budget.max_minutes:.0f} s")
    record = _record(ground, known, action)
    models: dict[Role, tuple[Path, Trial]] = {}
    for slot in record.slots:
        if slot.trial is not None:
            trial = record.trials[slot.trial]
            models[slot.role] = (_made(workshop, trial, ground.section.name), trial)
            tell(f"{ground.section.name}-{slot.role}: {describe(trial, ground.metric.label)}")
        else:
            tell(f"{ground.section.name}-{slot.role}: empty, {slot.reason}")
    journal.append(_END)
    return Found(record=record, models=models)


_END = {"end": True}


def _resumed(known: Known, journal: Journal, tell: Tell) -> Known:
    lines = journal.read()
    if _END in lines:
        journal.clear()
        lines = ()
    for line in lines:
        known = _with(known, codec.from_json(line, Entry))
    if lines:
        tell(f"going on after {len(lines)} steps of a search that was stopped")
    return known


def _with(known: Known, entry: Entry) -> Known:
    if entry.trial is not None:
        return replace(known, trials=(*known.trials, entry.trial))
    if entry.sensitivity is not None:
        return replace(known, sensitivities=(*known.sensitivities, entry.sensitivity))
    return known


def _recipes(ground: Ground) -> tuple[Recipe, ...]:
    """Those that the machines allow, with the nodes of the model that each may keep in float."""
    small = ground.budget.size is not None or "small" in ground.section.keep
    named = searched(ground.machines, calibrated=ground.calibration is not None, small=small)
    found = [replace(recipe, nodes=products(ground.source, recipe.method)) for recipe in named]
    return tuple(recipe for recipe in found if recipe.nodes or recipe.method not in OPERATORS)


def _record(ground: Ground, known: Known, stop: Stop) -> SearchRecord:
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
        bought=purchases(known),
        front=front(known),
        slots=assign(known, ground.section.name, roles, unfinished=stop.reason if stop.timed_out else ""),
        stopped=stop.reason,
        timed_out=stop.timed_out,
        seconds=known.seconds,
    )


def _made(workshop: Workshop, trial: Trial, name: str) -> Path:
    """The model of a trial, built again: what was measured is what is given on."""
    path, _ = workshop.make(trial)
    if digest_file(path) != trial.model:
        raise StageError(
            "the same recipe gave another file than before",
            where=f"search {name}, {trial.recipe}",
            remedy="Search anew: `--fresh search`.",
        )
    return path


def describe(trial: Trial, metric: str) -> str:
    """A trial in a line."""
    count = len(trial.excluded)
    kept = f" with {count} node{'s' if count > 1 else ''} in float" if count else ""
    if trial.failure:
        return f"{trial.recipe}{kept}: {trial.failure}"
    times = ", ".join(f"{one.estimate:.3g}x the time on {name}" for name, one in sorted(trial.ratios.items()))
    drop = trial.drop or 0.0
    return f"{trial.recipe}{kept}: {metric} {0.0 - 100 * drop:+.3g} points, {times}, {trial.size_bytes / 1e3:.4g} kB"


def _told(entry: Entry) -> str:
    if entry.trial is not None:
        return describe(entry.trial, "metric")
    one = entry.sensitivity
    if one is None:
        return ""
    return f"{one.recipe}, only {one.node}: " + (one.failure or f"error {one.error or 0.0:.3g}")


def recipe_notes(record: SearchRecord, trial: Trial) -> Sequence[str]:
    """How a variant that was found by search came to be, in sentences."""
    kept = f"; in float: {', '.join(trial.excluded)}" if trial.excluded else ""
    tried = f"found by search {record.name} among {len(record.trials)} models, {record.rows} rows: "
    return (tried + describe(trial, record.metric) + kept, *trial.notes)
