"""Terminal output of a plan, a run and gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from onnx_ops.cli.common import (
    KEEP,
    Markup,
    console,
    markup,
    print_table,
    print_text,
    render_error,
    say,
    verdict_markup,
)
from onnx_ops.cli.progress import format_seconds
from onnx_ops.domain.decision import Decision, Verdict
from onnx_ops.errors import OnnxOpsError
from onnx_ops.reporting.description import ResultRow, result_table, worst_first
from onnx_ops.reporting.formatting import (
    format_figure,
    format_interval,
    result_figure,
    result_interval,
)

if TYPE_CHECKING:
    from onnx_ops.app.context import Project
    from onnx_ops.app.results import Summary
    from onnx_ops.domain.evidence import Evidence
    from onnx_ops.domain.ledger import ReleaseState
    from onnx_ops.domain.release import Choice, Registration
    from onnx_ops.reporting.comparison import ModelComparison, VariantRow

_REASONS = 2
"""Maximum number of gates that did not pass, per variant, in the short report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """What a run would do with a stage.

    Attributes:
        pool: Work pool whose workers run the stage; empty for this machine.
        seconds: Duration of the last execution; None if the stage is cached or skipped, or has not
            run yet.
        price: Price of this duration, if it is known, for a benchmark on a target with a price;
            otherwise None.
    """

    stage: str
    needs: tuple[str, ...]
    would: str
    pool: str = ""
    seconds: float | None = None
    price: float | None = None


def plan_table(pipeline: str, stages: Sequence[PlannedStage]) -> None:
    """Print the stages of a plan.

    If any stage has a pool, the pool of each stage to run is printed, or that it runs here.
    """
    print_text("[bold]Plan of {}[/bold]", pipeline)
    placed = any(stage.pool for stage in stages)
    rows = []
    for stage in stages:
        needs = ", ".join(stage.needs)
        cells = (
            stage.stage,
            _describe_work(stage, placed=placed),
            needs if len(needs) <= 60 else needs[:59] + "…",
        )
        is_dim = stage.would == "unchanged"
        rows.append([markup("[dim]{}[/dim]", text) if is_dim and text else text for text in cells])
    print_table(("stage", "would", "needs"), rows)
    _print_total(stages)


def _describe_work(stage: PlannedStage, *, placed: bool) -> str:
    """Return what a run would do with a stage, how long it takes and its price.

    With `placed`, the pool of a stage to run is included.
    """
    text = stage.would
    if placed and stage.would == "run":
        text += f" in pool {stage.pool}" if stage.pool else " here"
    if stage.seconds is not None:
        text += f", {format_seconds(stage.seconds).replace(' ', KEEP)}"
    if stage.price is not None:
        text += f", price {stage.price:.2g}"
    return text


def _print_total(stages: Sequence[PlannedStage]) -> None:
    """Print the total time and price of the stages to run, from their last executions.

    The number of stages without a known time is printed too. Nothing is printed if
    all times are unknown.
    """
    seconds = [stage.seconds for stage in stages if stage.seconds is not None]
    if not seconds:
        return
    text = f"about {format_seconds(sum(seconds))} of work"
    prices = [stage.price for stage in stages if stage.price is not None]
    if prices:
        text += f", price {sum(prices):.2g}"
    new_count = sum(stage.would == "run" for stage in stages) - len(seconds)
    if new_count:
        text += f"; stages without a known time: {new_count}"
    say(text)


def gate_report(rows: Sequence[ResultRow]) -> None:
    """Print every gate of every variant and target.

    The reason of each gate that did not pass is printed too, and the slices of gates on slices.
    """
    cells: list[Sequence[str] | str] = []
    last = ("", "")
    for row in rows:
        if (row.variant, row.target) != last:
            last = (row.variant, row.target)
            cells.append(markup("[bold]{} on {}[/bold]", *last))
        measured = _figure(result_figure(row.result), result_interval(row.result))
        cells.append((row.describe_gate(), _verdict(row), row.result.limit, measured, row.counted))
    print_table(("gate", "verdict", "limit", "measured", "n"), cells)
    for row in rows:
        if row.result.verdict is not Verdict.PASS:
            text = f"{row.variant} on {row.target}, {row.describe_gate()}: {row.result.reason}"
            print_text("{} {}", _verdict(row), text, indent=1)
    slice_report([row for row in rows if row.result.slices])


def slice_report(rows: Sequence[ResultRow]) -> None:
    """Print the slices of the gates on slices, the worst first."""
    if not rows:
        return
    from onnx_ops.reporting.slices import HEADS, SliceTable

    cells: list[Sequence[str] | str] = []
    for row in rows:
        table = SliceTable(variant=row.variant, target=row.target, result=row.result)
        cells.append(markup("[bold]{}[/bold]", table.title))
        cells += [(name, verdict_markup(v), *rest) for v, (name, *rest) in table.list_worst()]
        if omitted := table.describe_rest():
            cells.append(markup("[dim]{}[/dim]", omitted))
    print_table(HEADS, cells)


def _verdict(row: ResultRow) -> Markup:
    verdict = verdict_markup(row.result.verdict, advisory=row.result.advisory)
    return markup("{} [dim](advisory)[/dim]", verdict) if row.result.advisory else verdict


def _figure(figure: str, interval: str) -> str:
    """Return a value with its interval; a line can be broken only between them."""
    return f"{figure.replace(' ', KEEP)} {interval.replace(' ', KEEP)}".strip()


def summary_report(
    summary: Summary,
    errors: Mapping[str, OnnxOpsError],
    project: Project,
    evidence: Mapping[tuple[str, str], Evidence],
    *,
    details: bool,
) -> None:
    """Print the results of a run.

    With `details`, every gate result is printed instead of key metrics and failures.
    """
    decisions = _without(errors, summary.decisions)
    if details and decisions:
        gate_report(result_table(decisions))
        for choice in summary.choices:
            _print_choice(choice, decisions)
    else:
        hidden = sum(_target_report(choice, decisions, evidence) for choice in summary.choices)
        if hidden:
            report = "" if summary.registration is None else ", or read the report"
            print_text("[dim]All {} gate results: add --details{}.[/dim]", hidden, report)
    _print_errors(errors)
    if not summary.executed:
        say("All results are unchanged: no stage was executed.")
    if summary.registration is not None:
        _release_lines(summary, summary.registration, project)


def _target_report(
    choice: Choice, decisions: Sequence[Decision], evidence: Mapping[tuple[str, str], Evidence]
) -> int:
    """Print the choice, the key metrics and the failures of a target.

    Return the number of gate results; 0 if nothing was measured.
    """
    from onnx_ops.reporting.metrics import sampled_rows

    decisions = [decision for decision in decisions if decision.target == choice.target]
    _print_choice(choice, decisions)
    if _is_unmeasured(decisions):
        return 0

    console().print()
    _print_variants(decisions, evidence)
    if sampled := sampled_rows(
        one for (_, target), one in evidence.items() if target == choice.target
    ):
        print_text("[dim]{}[/dim]", sampled, indent=2)

    console().print()
    has_failures = _print_failures(decisions)
    has_notes = _print_advisories(
        [decision for decision in decisions if decision.variant == choice.variant]
    )
    if has_failures or has_notes:
        console().print()
    return sum(len(decision.results) for decision in decisions)


def _print_variants(
    decisions: Sequence[Decision], evidence: Mapping[tuple[str, str], Evidence]
) -> None:
    """Print the key metrics of each variant of a target.

    Columns that no variant fills are left out.
    """
    from onnx_ops.reporting.comparison import variant_rows
    from onnx_ops.reporting.metrics import headline

    measured = [
        record for d in decisions if (record := evidence.get((d.variant, d.target))) is not None
    ]
    metric, against = headline(decisions, measured), _find_reference(decisions)
    rows = [
        _describe_row(row, decision, metric, against)
        for row, decision in zip(variant_rows(decisions, measured), decisions, strict=False)
    ]
    latency_head = f"latency vs {against}" if against else ""
    heads = ["  variant", "verdict", metric, "median latency", latency_head, "size"]
    used = [n for n, head in enumerate(heads) if n < 2 or (head and any(row[n] for row in rows))]
    print_table([heads[n] for n in used], [[row[n] for n in used] for row in rows])


def _find_reference(decisions: Sequence[Decision]) -> str:
    """Return the name of the model with which latency was compared.

    If there are several such models, the champion takes precedence. Without a comparison, the
    result is empty.
    """
    prefix = "ratio vs "
    metrics = {result.metric for decision in decisions for result in decision.results}
    names = {metric.removeprefix(prefix) for metric in metrics if metric.startswith(prefix)}
    return "champion" if "champion" in names else min(names, default="")


def _print_advisories(decisions: Sequence[Decision]) -> bool:
    """Print the advisory gates that did not pass; return whether there are any."""
    rows = [
        row
        for row in result_table(decisions)
        if row.result.advisory and row.result.verdict is not Verdict.PASS
    ]
    for row in rows:
        print_text("[dim]note[/dim] {}: {}", row.variant, _reason(row), indent=2)
    return bool(rows)


def _describe_row(row: VariantRow, decision: Decision, metric: str, against: str) -> list[str]:
    """Return the cells of a variant.

    The cells are its name, verdict, metric, median latency, ratio against another model, and size.
    """
    ratio = next(
        (r for r in decision.results if r.gate == "latency" and r.metric == f"ratio vs {against}"),
        None,
    )
    figures = (row.metrics.get(metric), row.latency)
    return [
        f"  {row.variant}",
        verdict_markup(decision.verdict),
        *(
            "" if each is None else _interval(each.estimate, each.low, each.high, each.unit)
            for each in figures
        ),
        "" if ratio is None else _interval(ratio.estimate, ratio.low, ratio.high, "x"),
        "" if row.size_bytes is None else format_figure(row.size_bytes, "B").replace(" ", KEEP),
    ]


def _is_unmeasured(decisions: Sequence[Decision]) -> bool:
    """Return whether no variant was measured, because stages failed.

    The errors of these stages are printed separately.
    """
    return all(
        result.gate == "measurement" for decision in decisions for result in decision.results
    )


def _print_choice(choice: Choice, decisions: Sequence[Decision]) -> None:
    head = markup("{} [bold]{}[/bold]", verdict_markup(choice.verdict), choice.target)
    if choice.variant is not None:
        print_text("{}: [bold]{}[/bold] is chosen ({})", head, choice.variant, choice.reason)
        return
    decisions = [decision for decision in decisions if decision.target == choice.target]
    # Variants can pass their gates without a choice: the correction for the number of variants can
    # make the result insignificant.
    if any(decision.verdict is Verdict.PASS for decision in decisions):
        print_text("{}: no release. {}", head, choice.reason)
    elif _is_unmeasured(decisions):
        reasons = {result.reason for decision in decisions for result in decision.results}
        print_text(
            "{}: no release, {}",
            head,
            reasons.pop() if len(reasons) == 1 else "the measurements are missing",
        )
    else:
        print_text("{}: no release, each variant fails a gate or leaves it undecided", head)


def _interval(estimate: float | None, low: float | None, high: float | None, unit: str) -> str:
    return _figure(format_figure(estimate, unit), format_interval(low, high, unit, near=estimate))


def _reason(row: ResultRow) -> str:
    """Return the gate and its reason, without a repeated name of the metric."""
    return f"{row.describe_gate()}: {row.result.reason.removeprefix(f'{row.result.metric}: ')}"


def _print_failures(decisions: Sequence[Decision]) -> bool:
    """Print the reasons of variants that did not pass; return whether there are any.

    Variants with the same reasons are printed together.
    """
    shared: dict[tuple[Verdict, tuple[str, ...]], list[str]] = {}
    for decision in decisions:
        if decision.verdict is Verdict.PASS:
            continue
        rows = worst_first(
            row
            for row in result_table([decision])
            if not (row.result.advisory or row.result.verdict is Verdict.PASS)
        )
        reasons = [
            row.result.reason if row.result.gate == "measurement" else _reason(row) for row in rows
        ]
        if (more := len(reasons) - _REASONS) > 0:
            reasons[_REASONS:] = [f"{more} more gate{'s do' if more > 1 else ' does'} not pass"]
        shared.setdefault((decision.verdict, tuple(reasons or [decision.reason])), []).append(
            decision.variant
        )
    for (verdict, texts), names in shared.items():
        for text in texts:
            print_text("{} {}: {}", verdict_markup(verdict), ", ".join(names), text, indent=2)
    return bool(shared)


def comparison_report(comparisons: Sequence[ModelComparison]) -> None:
    """Print each metric of the release beside the same metric of another model."""
    for comparison in comparisons:
        if comparison.rows:
            title = markup(
                "[bold]{}: {} against {}[/bold]",
                comparison.target,
                comparison.ours,
                comparison.theirs,
            )
            cells = [(row.metric, row.change, row.ours, row.theirs) for row in comparison.rows]
            print_table(("metric", "change", "this release", "compared with"), [title, *cells])
    for note in dict.fromkeys(comparison.note for comparison in comparisons if comparison.note):
        print_text("[dim]{}[/dim]", note)


def choice_lines(summary: Summary, errors: Mapping[str, OnnxOpsError]) -> None:
    """Print the choice of each target in short form, and then the errors of stages.

    Failures have one line each, and each error is printed once.
    """
    for choice in summary.choices:
        decisions = _without(
            errors, [one for one in summary.decisions if one.target == choice.target]
        )
        _print_choice(choice, decisions)
        if choice.variant is None and not _is_unmeasured(decisions):
            _print_failures(decisions)
    _print_errors(errors)


def _print_errors(errors: Mapping[str, OnnxOpsError]) -> None:
    """Print each error once, with all stages that ended with it."""
    stages: dict[str, list[str]] = {}
    for stage, error in errors.items():
        stages.setdefault(str(error), []).append(stage)
    for names in stages.values():
        render_error(console(), errors[names[0]], f"{', '.join(names)} failed")


def _without(errors: Mapping[str, OnnxOpsError], decisions: Sequence[Decision]) -> list[Decision]:
    """Return the decisions with reasons that name failed stages without their errors.

    The errors are printed separately, each only once.
    """

    def shorten(reason: str) -> str:
        for stage, error in errors.items():
            reason = reason.replace(f"{stage}: {error}", f"{stage} failed")
        return reason

    return [
        replace(d, results=tuple(replace(r, reason=shorten(r.reason)) for r in d.results))
        for d in decisions
    ]


def _release_lines(summary: Summary, registration: Registration, project: Project) -> None:
    """Print the versions of a release, promotions to make, and the model's endpoints."""
    from onnx_ops.app.results import locate_report
    from onnx_ops.release.journal import list_sibling_states

    out = console()
    versions = ", ".join(
        f"{variant} = {version}" for variant, version in registration.versions.items()
    )
    print_text("Registered [bold]{}[/bold]: version {}", registration.model, versions)
    for target in summary.awaiting:
        choice = next(c for c in summary.choices if c.target == target)
        version = registration.versions.get(choice.variant or "", "?")
        say(f"Awaiting promotion on {target}: set alias challenger-{target} in MLflow, or")
        command = f"  onnx-ops promote {registration.model}/{version} --target {target}"
        out.print(markup("{}", command), soft_wrap=True)
    for promotion in summary.left:
        out.print(markup("{}", promotion.explain_left()), soft_wrap=True)
    for target in dict.fromkeys(c.target for c in summary.choices):
        for state in list_sibling_states(project.context, registration.model, target):
            _print_endpoint(state, registration.model, project)
    out.print(markup("Report: {}", locate_report(registration)), soft_wrap=True)
    out.print(markup("Evidence: {}", registration.where), soft_wrap=True)


def _print_endpoint(state: ReleaseState, model: str, project: Project) -> None:
    """Print the version, the URL and the rollout of an endpoint.

    Endpoints that lack a stable version or an address are skipped.
    """
    config, stable = state.config, state.roles.stable
    if config is None:
        return
    address = project.context.provider(config.provider).address(config)
    if address is None or stable is None:
        return
    # Cloud services forward requests to the path `invocations`, which replicas serve too.
    path = f"v2/models/{model}" if config.provider == "local" else "invocations"
    text = f"{stable.name} ({stable.variant}) at {address}/{path}"
    console().print(
        markup("Endpoint [bold]{}[/bold] serves {}", state.endpoint, text), soft_wrap=True
    )
    if state.roles.candidate is not None:
        say(
            f"Rollout of {state.roles.candidate.name} has started: "
            f"onnx-ops rollout status {state.endpoint}"
        )
        say("The reconciler advances it: onnx-ops reconcile --watch")
