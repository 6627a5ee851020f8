"""Search for variants: try recipes, with some nodes in float, within a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onnx_ops import codec
from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.quantization import (
    Recipe,
    Role,
    SearchLogEntry,
    SearchRecord,
    Trial,
    list_search_recipes,
)
from onnx_ops.errors import StageError
from onnx_ops.measure.variants.trials import SearchContext, TrialRunner
from onnx_ops.onnx_graph.instrumentation import OPERATORS, list_quantizable_nodes
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import StageJournal
from onnx_ops.statistics.variants.search import (
    BuildTrial,
    ProbeNode,
    SearchState,
    StopSearch,
    assign_roles,
    choose_next_step,
    compute_pareto_front,
    find_closest_trial,
    list_node_contributions,
)

Reporter = Callable[[str], None]

_END = {"end": True}
"""Last line of the journal of a search that ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The record of a search, and the model and trial of each filled role.

    If no role was filled, `closest` is the model and trial with the least loss of the metric. It is
    None if no trial was measured.
    """

    record: SearchRecord
    models: Mapping[Role, tuple[Path, Trial]]
    closest: tuple[Path, Trial] | None = None


def search(context: SearchContext, journal: StageJournal, report: Reporter) -> SearchResult:
    """Try recipes until none remains or the budget is used up.

    An interrupted search resumes from its journal. A complete journal is cleared, since its result
    is being recomputed.

    Raises:
        StageError: a library wrote a different file for the same recipe.
    """
    context.folder.mkdir()
    recipes = _list_recipes(context)
    runner = TrialRunner(context, {recipe.name: recipe for recipe in recipes})
    state = SearchState(
        recipes=recipes,
        budget=context.budget,
        export_bytes=read_model_info(context.source).size_bytes,
    )
    state = _resume(state, journal, report)
    while not isinstance(step := choose_next_step(state), StopSearch):
        entry, text = _run_step(runner, step)
        # The journal is written before the state changes, so a later search repeats only the step
        # that is missing from the journal.
        journal.append(codec.to_json(entry))
        state = _add_entry(state, entry)
        report(f"{text}; {state.seconds:.0f} s of {60 * context.budget.max_minutes:.0f} s")
    record = _make_record(context, state, step)
    try:
        models = _make_models(context, runner, record, report)
    except StageError:
        # A repeated search builds all models again.
        journal.append(_END)
        raise
    place = None if models else find_closest_trial(state)
    closest = None if place is None else (runner.make(state.trials[place])[0], state.trials[place])
    journal.append(_END)
    return SearchResult(record=record, models=models, closest=closest)


def _list_recipes(context: SearchContext) -> tuple[Recipe, ...]:
    """Return the recipes that fit the machines and the model.

    Each recipe lists the nodes that it can quantize.
    """
    small = context.budget.size is not None or "small" in context.section.variants
    candidates = list_search_recipes(
        context.machines, calibrated=context.calibration is not None, small=small
    )
    candidates = tuple(
        replace(one, nodes=list_quantizable_nodes(context.source, one.method)) for one in candidates
    )
    return tuple(recipe for recipe in candidates if recipe.nodes or recipe.method not in OPERATORS)


def _resume(state: SearchState, journal: StageJournal, report: Reporter) -> SearchState:
    """Return the state after the steps of an interrupted search.

    A complete journal is cleared.
    """
    lines = journal.read()
    if _END in lines:
        journal.clear()
        return state
    for line in lines:
        state = _add_entry(state, codec.from_json(line, SearchLogEntry))
    if lines:
        report(f"resuming after {len(lines)} steps of an interrupted search")
    return state


def _run_step(runner: TrialRunner, step: BuildTrial | ProbeNode) -> tuple[SearchLogEntry, str]:
    """Run a step, and return its journal entry and its description."""
    if isinstance(step, BuildTrial):
        trial = runner.build(step)
        return SearchLogEntry(trial=trial), describe_trial(trial, "metric")
    probed = runner.probe(step)
    text = f"{step.recipe}, only {step.node}: " + (
        probed.failure or f"error {probed.error or 0.0:.3g}"
    )
    return SearchLogEntry(sensitivity=probed), text


def _make_models(
    context: SearchContext, runner: TrialRunner, record: SearchRecord, report: Reporter
) -> dict[Role, tuple[Path, Trial]]:
    """Build the model of each role again.

    A resumed search does not have the models of earlier trials.
    """
    name = context.section.name
    models: dict[Role, tuple[Path, Trial]] = {}
    for slot in record.slots:
        if slot.trial is None:
            report(f"{name}-{slot.role}: empty, {slot.reason}")
            continue
        trial = record.trials[slot.trial]
        path, _ = runner.make(trial)
        if digest_file(path) != trial.model:
            raise StageError(
                "the same recipe gave a different file",
                where=f"search {name}, {trial.recipe}",
                remedy="Run the command again. The search then builds all models again.",
            )
        models[slot.role] = (path, trial)
        report(f"{name}-{slot.role}: {describe_trial(trial, context.metric.label)}")
    return models


def _add_entry(state: SearchState, entry: SearchLogEntry) -> SearchState:
    if entry.trial is not None:
        return replace(state, trials=(*state.trials, entry.trial))
    if entry.sensitivity is not None:
        return replace(state, sensitivities=(*state.sensitivities, entry.sensitivity))
    return state


def _make_record(context: SearchContext, state: SearchState, stop: StopSearch) -> SearchRecord:
    roles = tuple(dict.fromkeys(context.section.variants))
    return SearchRecord(
        name=context.section.name,
        metric=context.metric.label,
        rows=len(context.tuning_data),
        export_bytes=state.export_bytes,
        targets=tuple(target.name for target in context.targets),
        budget=context.budget,
        recipes=state.recipes,
        trials=state.trials,
        sensitivities=state.sensitivities,
        contributions=list_node_contributions(state),
        pareto_front=compute_pareto_front(state),
        slots=assign_roles(
            state, context.section.name, roles, unfinished=stop.reason if stop.timed_out else ""
        ),
        stopped=stop.reason,
        timed_out=stop.timed_out,
        seconds=state.seconds,
    )


def describe_trial(trial: Trial, metric: str) -> str:
    """Describe a trial in one line."""
    if trial.failure:
        return f"{trial.label}: {trial.failure}"
    times = ", ".join(
        f"{one.estimate:.3g}x the time of fp32 on {name}"
        for name, one in sorted(trial.ratios.items())
    )
    drop = trial.drop or 0.0
    loss = f"{metric} {'better' if drop < 0 else 'worse'} by {100 * abs(drop):.3g}%"
    return f"{trial.label}: {loss}, {times}, {trial.size_bytes / 1e3:.4g} kB"


def describe_recipe(record: SearchRecord, trial: Trial) -> Sequence[str]:
    """Describe how a variant was found by search."""
    excluded = f"; in float: {', '.join(trial.excluded)}" if trial.excluded else ""
    origin = (
        f"found by search {record.name} among {len(record.trials)} trials, {record.rows} rows: "
    )
    return (origin + describe_trial(trial, record.metric) + excluded, *trial.notes)
