"""Tables and reports for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from onnx_ops.cli.terminal import KEEP, console, print_table, print_text, render_error, verdict_markup
from onnx_ops.domain.decision import Decision, Verdict
from onnx_ops.errors import OnnxOpsError
from onnx_ops.reporting.description import ResultRow, result_table
from onnx_ops.reporting.formatting import format_figure, format_interval

if TYPE_CHECKING:
    from onnx_ops.app.project import Project
    from onnx_ops.app.results import Summary
    from onnx_ops.cli.machine import TargetStatus
    from onnx_ops.domain.decision import Drift
    from onnx_ops.domain.evidence import Evidence
    from onnx_ops.domain.pipeline import Plan
    from onnx_ops.domain.release import Choice
    from onnx_ops.domain.target import Diagnosis
    from onnx_ops.release.audit import ReevaluatedDecision
    from onnx_ops.reporting.comparison import ModelComparison

_REASONS = 2
"""Failed gates of a variant that the short report explains."""


def plan_table(plan: Plan, would: Mapping[str, str]) -> None:
    """Print the stages of a plan."""
    out = console()
    print_text(out, f"[bold]Plan of {escape(plan.pipeline)}[/bold]")
    rows = []
    for stage in plan.stages:
        needs = ", ".join((*stage.needs, *(s for s in stage.tolerates if s not in stage.needs)))
        verb = would[stage.id]
        rows.append([_dim(text) if verb == "unchanged" else escape(text) for text in (stage.id, verb, _cut(needs, 60))])
    print_table(out, ("stage", "would", "needs"), rows)


def _dim(text: str) -> str:
    return f"[dim]{escape(text)}[/dim]" if text else ""


def gate_report(out: Console, rows: Sequence[ResultRow]) -> None:
    """Print every gate of every variant and target, and the reason of each that did not pass."""
    cells: list[Sequence[str] | str] = []
    last = ("", "")
    for row in rows:
        if (row.variant, row.target) != last:
            last = (row.variant, row.target)
            cells.append(f"[bold]{escape(row.variant)} on {escape(row.target)}[/bold]")
        figure = _figure(row.figure, row.interval)
        cells.append([escape(row.describe_gate()), _verdict(row), escape(row.limit), figure, escape(row.counted)])
    print_table(out, ("gate", "verdict", "limit", "measured", "n"), cells)
    for row in rows:
        if row.verdict is not Verdict.PASS:
            text = f"{row.variant} on {row.target}, {row.describe_gate()}: {row.reason}"
            print_text(out, f"{_verdict(row)} {escape(text)}", indent=1)


def _verdict(row: ResultRow) -> str:
    return verdict_markup(row.verdict, advisory=row.advisory) + (" [dim](advisory)[/dim]" if row.advisory else "")


def _figure(figure: str, interval: str) -> str:
    """Return a metric with its interval; a line may break between the two only."""
    return escape(f"{figure.replace(' ', KEEP)} {interval.replace(' ', KEEP)}".strip())


def summary_report(
    summary: Summary,
    errors: Mapping[str, OnnxOpsError],
    project: Project,
    evidence: Mapping[tuple[str, str], Evidence],
    *,
    details: bool,
) -> None:
    """Print what a run came to.

    Args:
        summary: what it came to.
        errors: of failed stages.
        project: whose endpoints serve it.
        evidence: by variant and target.
        details: print every gate result instead of key metrics and failures.
    """
    out, decisions = console(), _without(errors, summary.decisions)
    if details and decisions:
        gate_report(out, result_table(decisions))
        for choice in summary.choices:
            print_text(out, _choice_line(choice, decisions))
    else:
        hidden = sum(_target_report(out, choice, decisions, evidence) for choice in summary.choices)
        if hidden:
            print_text(out, f"[dim]All {hidden} gate results: add --details, or read the report.[/dim]")
    _error_lines(out, errors)
    if not summary.executed:
        out.print("Nothing changed: no stage was executed.")
    if summary.registration is not None:
        _release_lines(out, summary, project)


def _target_report(
    out: Console,
    choice: Choice,
    decisions: Sequence[Decision],
    evidence: Mapping[tuple[str, str], Evidence],
) -> int:
    """Print the choice of a target, the key metrics of each variant and what failed; return the number of results."""
    from onnx_ops.reporting.metrics import sampled_rows

    decisions = [decision for decision in decisions if decision.target == choice.target]
    print_text(out, _choice_line(choice, decisions))
    if _is_unmeasured(decisions):
        return 0
    out.print()
    heads, rows = _key_metrics(decisions, evidence)
    print_table(out, heads, rows)
    if sampled := sampled_rows(one for (_, target), one in evidence.items() if target == choice.target):
        print_text(out, f"[dim]{escape(sampled)}[/dim]", indent=2)
    out.print()
    is_explained = _failure_lines(out, decisions)
    for row in result_table([decision for decision in decisions if decision.variant == choice.variant]):
        if row.advisory and row.verdict is not Verdict.PASS:
            text = f"{row.variant}: {row.describe_gate()}: {_plain(row)}"
            print_text(out, f"[dim]note[/dim] {escape(text)}", indent=2)
            is_explained = True
    if is_explained:
        out.print()
    return sum(len(decision.results) for decision in decisions)


def _is_unmeasured(decisions: Sequence[Decision]) -> bool:
    """Return whether all that is known of each variant is the stage that failed; its error is printed for itself."""
    return all(result.gate == "measurement" for decision in decisions for result in decision.results)


def _choice_line(choice: Choice, decisions: Sequence[Decision]) -> str:
    head = f"{verdict_markup(choice.verdict)} [bold]{escape(choice.target)}[/bold]"
    if choice.variant is not None:
        return f"{head}: [bold]{escape(choice.variant)}[/bold] is chosen ({escape(choice.reason)})"
    decisions = [decision for decision in decisions if decision.target == choice.target]
    if any(decision.verdict is Verdict.PASS for decision in decisions):  # not enough, among so many
        return f"{head}: no release. {escape(choice.reason)}"
    if _is_unmeasured(decisions):
        reasons = dict.fromkeys(result.reason for decision in decisions for result in decision.results)
        return f"{head}: no release, {escape(next(iter(reasons)) if len(reasons) == 1 else 'nothing was measured')}"
    return f"{head}: no release, no variant passes"


def _key_metrics(
    decisions: Sequence[Decision], evidence: Mapping[tuple[str, str], Evidence]
) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: the task metric, the median latency, the paired ratio and the size of each variant."""
    from onnx_ops.reporting.metrics import headline, median_latency, task_metric

    measured_here = [one for d in decisions if (one := evidence.get((d.variant, d.target))) is not None]
    metric, against = headline(decisions, measured_here), _baseline(decisions)
    rows = []
    for decision in decisions:
        one = evidence.get((decision.variant, decision.target))
        measured = [] if one is None else [task_metric(one, metric), median_latency(one.latency)]
        figures = [
            "" if each is None else _interval(each.estimate, each.low, each.high, each.unit) for each in measured
        ]
        ratio = next((r for r in decision.results if r.gate == "latency" and r.metric == f"ratio vs {against}"), None)
        cells = [*(figures or ["", ""]), "" if ratio is None else _interval(ratio.estimate, ratio.low, ratio.high, "x")]
        size = "" if one is None else format_figure(one.size_bytes, "B").replace(" ", KEEP)
        rows.append([f"  {escape(decision.variant)}", verdict_markup(decision.verdict), *cells, size])
    heads = ["  variant", "verdict", metric, "median latency", f"latency vs {against}" if against else "", "size"]
    used = [n for n, head in enumerate(heads) if n < _NAMES or (head and any(row[n] for row in rows))]
    return [heads[n] for n in used], [[row[n] for n in used] for row in rows]


_NAMES = 2
"""The first columns of the key metrics, which are always shown."""


def _baseline(decisions: Sequence[Decision]) -> str:
    """Return what latency was compared with: the champion, else the export."""
    names = {
        r.metric.removeprefix("ratio vs ") for d in decisions for r in d.results if r.metric.startswith("ratio vs ")
    }
    return "champion" if "champion" in names else min(names, default="")


def _interval(estimate: float | None, low: float | None, high: float | None, unit: str) -> str:
    return _figure(format_figure(estimate, unit), format_interval(low, high, unit, near=estimate))


def _plain(row: ResultRow) -> str:
    """Return the reason without the metric's name, where that stands before it already."""
    return row.reason.removeprefix(f"{row.metric}: ")


def _failure_lines(out: Console, decisions: Sequence[Decision]) -> bool:
    failures = [(verdict, names, text) for verdict, names, reasons in _failures(decisions) for text in reasons]
    for verdict, names, text in failures:
        print_text(out, f"{verdict_markup(verdict)} {escape(f'{names}: {text}')}", indent=2)
    return bool(failures)


def _failures(decisions: Sequence[Decision]) -> list[tuple[Verdict, str, list[str]]]:
    """Return verdict, variants and reasons of what does not pass; variants with the same reasons stand together."""
    shared: dict[tuple[Verdict, tuple[str, ...]], list[str]] = {}
    for decision in decisions:
        if decision.verdict is Verdict.PASS:
            continue
        rows = [row for row in result_table([decision]) if not row.advisory and row.verdict is not Verdict.PASS]
        rows.sort(key=lambda row: -row.verdict.rank)
        reasons = [row.reason if row.gate == "measurement" else f"{row.describe_gate()}: {_plain(row)}" for row in rows]
        if (more := len(reasons) - _REASONS) > 0:
            reasons[_REASONS:] = [f"{more} more gate{'s do' if more > 1 else ' does'} not pass"]
        shared.setdefault((decision.verdict, tuple(reasons or [decision.reason])), []).append(decision.variant)
    return [(verdict, ", ".join(names), list(reasons)) for (verdict, reasons), names in shared.items()]


def comparison_report(comparisons: Sequence[ModelComparison]) -> None:
    """Print each metric of the release beside that of another model."""
    out = console()
    for one in comparisons:
        if one.rows:
            title = f"{one.target}: {one.ours} against {one.theirs}"
            cells = [[escape(cell) for cell in (row.metric, row.change, row.ours, row.theirs)] for row in one.rows]
            print_table(
                out, ("metric", "change", "this release", "compared with"), [f"[bold]{escape(title)}[/bold]", *cells]
            )
    for note in dict.fromkeys(one.note for one in comparisons if one.note):
        print_text(out, f"[dim]{escape(note)}[/dim]")


def choice_lines(out: Console, summary: Summary, errors: Mapping[str, OnnxOpsError]) -> None:
    """Print what each target gets, what failed in a line each, and then each error of a stage, once."""
    for choice in summary.choices:
        decisions = _without(errors, [one for one in summary.decisions if one.target == choice.target])
        print_text(out, _choice_line(choice, decisions))
        if choice.variant is None and not _is_unmeasured(decisions):
            _failure_lines(out, decisions)
    _error_lines(out, errors)


def _error_lines(out: Console, errors: Mapping[str, OnnxOpsError]) -> None:
    """Print each error once, with all stages that ended with it."""
    stages: dict[str, list[str]] = {}
    for stage, error in errors.items():
        stages.setdefault(str(error), []).append(stage)
    for names in stages.values():
        render_error(out, errors[names[0]], f"{', '.join(names)} failed")


def _without(errors: Mapping[str, OnnxOpsError], decisions: Sequence[Decision]) -> list[Decision]:
    """Return decisions that name a failed stage without its error, which is printed once."""
    return [
        replace(one, results=tuple(replace(r, reason=_shortened(errors, r.reason)) for r in one.results))
        for one in decisions
    ]


def _shortened(errors: Mapping[str, OnnxOpsError], reason: str) -> str:
    for stage, error in errors.items():
        reason = reason.replace(f"{stage}: {error}", f"{stage} failed")
    return reason


def _release_lines(out: Console, summary: Summary, project: Project) -> None:
    registration = summary.registration
    if registration is None:
        return
    versions = ", ".join(f"{variant} = {version}" for variant, version in registration.versions.items())
    print_text(out, f"Registered [bold]{escape(registration.model)}[/bold]: version {escape(versions)}")
    for target in summary.awaiting:
        choice = next(c for c in summary.choices if c.target == target)
        version = registration.versions.get(choice.variant or "", "?")
        command = f"onnx-ops promote {registration.model} {version} --target {target}"
        print_text(out, f"Awaiting promotion on {escape(target)}: set alias challenger-{escape(target)} in MLflow, or")
        out.print(f"  {escape(command)}", soft_wrap=True)
    from onnx_ops.app.results import locate_report
    from onnx_ops.release.journal import list_sibling_states

    for target in dict.fromkeys(c.target for c in summary.choices):
        for state in list_sibling_states(project.ports, registration.model, target):
            config, stable = state.config, state.roles.stable
            address = None if config is None else project.ports.provider(config.provider).address(config)
            if config is None or address is None or stable is None:
                continue
            # A cloud passes on what is sent to this one path.
            path = f"v2/models/{registration.model}" if config.provider == "local" else "invocations"
            text = f"{stable.name} ({stable.variant}) at {address}/{path}"
            out.print(f"Endpoint [bold]{escape(state.endpoint)}[/bold] serves {escape(text)}", soft_wrap=True)
            if state.roles.candidate is not None:
                follow = f"onnx-ops reconcile --watch moves it on; onnx-ops rollout status {state.endpoint} shows it"
                print_text(out, f"Rollout of {escape(state.roles.candidate.name)} has begun: {escape(follow)}")
    out.print(f"Report: {escape(locate_report(registration))}", soft_wrap=True)
    out.print(f"Evidence: {escape(registration.where)}", soft_wrap=True)


def explanation_report(version: str, explanations: Sequence[ReevaluatedDecision]) -> None:
    """Print re-evaluated decisions beside the signed ones."""
    out = console()
    for explanation in explanations:
        decision = explanation.decision
        gate_report(out, result_table([decision]))
        verdict = f"{verdict_markup(decision.verdict)}, {escape(decision.reason)}"
        print_text(out, f"{escape(version)} on {escape(explanation.target)}: {verdict}")
        same = "the same verdict" if explanation.reproduced else f"signed was {explanation.signed.record.verdict.value}"
        print_text(out, f"Judged again from stored evidence: {same}. Signature {escape(explanation.signature)}.")
        hardware = explanation.evidence.hardware
        used = ", ".join(explanation.evidence.runtime.used) if explanation.evidence.runtime is not None else "unknown"
        where = f"{hardware.cpu_model}, {hardware.cores} cores, {hardware.runtime} {hardware.runtime_version}, {used}"
        print_text(out, f"Measured on {escape(where)}; decided {escape(explanation.signed.record.decided_at)}.")


def drift_table(results: Sequence[Drift]) -> None:
    """Print the drift of champions."""
    rows = [
        [
            *map(escape, (result.model, result.version, result.target, result.variant)),
            verdict_markup(result.verdict, text="DRIFTED" if result.drifted else ""),
            escape(result.reason),
        ]
        for result in results
    ]
    print_table(console(), ("model", "version", "target", "variant", "verdict", "why"), rows)


def doctor_table(findings: Sequence[Diagnosis]) -> None:
    """Print the findings of `doctor`."""
    rows = [
        [
            "[yellow]--[/yellow]" if finding.absent else "[green]ok[/green]" if finding.ok else "[red]!![/red]",
            escape(finding.check).replace(" ", KEEP),
            escape(finding.found) + (f"\n[bold]{escape(finding.remedy)}[/bold]" if finding.remedy and is_open else ""),
        ]
        for finding in findings
        for is_open in (finding.absent or not finding.ok,)
    ]
    print_table(console(), ("", "check", "found"), rows)


def targets_table(told: Sequence[TargetStatus]) -> None:
    """Print targets, and which this machine can measure."""
    rows = []
    for one in told:
        said = "can measure it" if one.here else "not measured here" if one.here is False else "not looked at"
        more = ". ".join(part for part in (f"{said}: {one.why}" if one.why else said, one.remedy) if part)
        colour = "green" if one.here else "yellow"
        rows.append([*map(escape, (one.name, one.source, one.provider)), f"[{colour}]{escape(more)}[/{colour}]"])
    print_table(console(), ("target", "from", "provider", "this machine"), rows)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
