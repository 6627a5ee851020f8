"""Tables and reports for people."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from onnx_ops.cli.common import collecting
from onnx_ops.domain.gate import Verdict
from onnx_ops.errors import OnnxOpsError
from onnx_ops.reporting.description import ResultRow, result_table

if TYPE_CHECKING:
    from onnx_ops.cli.targeting import Told
    from onnx_ops.domain.drift import Drift
    from onnx_ops.domain.finding import Finding
    from onnx_ops.domain.pipeline import Plan
    from onnx_ops.domain.release import Choice
    from onnx_ops.operations.explain import Explanation
    from onnx_ops.wiring.project import Project
    from onnx_ops.wiring.summary import Summary

_COLOURS = {Verdict.PASS: "green", Verdict.INCONCLUSIVE: "yellow", Verdict.ERROR: "magenta", Verdict.FAIL: "red"}


def console() -> Console:
    """Standard output; 120 columns where it is not a terminal, so that tables in logs stay whole."""
    coloured = True if collecting.get() is not None else None
    return Console(width=None if sys.stdout.isatty() else 120, force_terminal=coloured, highlight=False, emoji=False)


def error_console() -> Console:
    return Console(stderr=True, width=None if sys.stderr.isatty() else 120, highlight=False, emoji=False)


def plan_table(plan: Plan, would: Mapping[str, str]) -> None:
    table = Table(title=f"Plan of {escape(plan.pipeline)}", title_justify="left")
    for name in ("stage", "needs", "would"):
        table.add_column(name)
    for stage in plan.stages:
        verb = would[stage.id]
        style = "dim" if verb == "unchanged" else ""
        needs = ", ".join((*stage.needs, *(s for s in stage.tolerates if s not in stage.needs)))
        table.add_row(escape(stage.id), escape(_cut(needs, 60)), escape(verb), style=style)
    console().print(table)


def gate_report(out: Console, rows: Sequence[ResultRow]) -> None:
    """Variant × target × gate with verdict and figure, and below it the reason of everything that did not pass."""
    table = Table(title="Gates", title_justify="left")
    for name in ("variant", "target", "gate", "limit", "figure", "n", "verdict"):
        table.add_column(name, overflow="fold")
    last = ("", "")
    for row in rows:
        place = (row.variant, row.target)
        if last not in (place, ("", "")):
            table.add_section()
        shown = place if place != last else ("", "")
        cells = (*shown, _gate_name(row), row.limit, f"{row.figure} {row.interval}".strip(), row.counted)
        table.add_row(*(escape(cell) for cell in cells), _verdict(row))
        last = place
    out.print(table)
    for row in rows:
        if row.verdict is not Verdict.PASS:
            out.print(f" {_verdict(row)} {escape(f'{row.variant} on {row.target}, {_gate_name(row)}: {row.reason}')}")


def _gate_name(row: ResultRow) -> str:
    return f"{row.gate} {row.metric}" if row.metric and row.metric != row.gate else row.gate


def _verdict(row: ResultRow) -> str:
    colour = "dim" if row.advisory else _COLOURS[row.verdict]
    return f"[{colour}]{row.verdict.value.upper()}{' (advisory)' if row.advisory else ''}[/{colour}]"


def summary_report(summary: Summary, errors: Mapping[str, OnnxOpsError], project: Project) -> None:
    out = console()
    if summary.decisions:
        rows = result_table(summary.decisions)
        gate_report(out, [replace(row, reason=_without(errors, row.reason)) for row in rows])
    choice_lines(out, summary.choices, errors)
    if not summary.executed:
        out.print("Nothing changed: no stage was executed.")
    if summary.registration is not None:
        _release_lines(out, summary, project)


def choice_lines(out: Console, choices: Sequence[Choice], errors: Mapping[str, OnnxOpsError]) -> None:
    """Print what each target gets, and then each error of a stage, once."""
    for choice in choices:
        if choice.variant is not None:
            text = f"{escape(choice.target)}: {escape(choice.variant)} is chosen ({escape(choice.reason)})"
            out.print(f"[green]PASS[/green] {text}")
        else:
            colour = _COLOURS[choice.verdict]
            text = f"{escape(choice.target)}: no release. {escape(_without(errors, choice.reason))}"
            out.print(f"[{colour}]{choice.verdict.value.upper()}[/{colour}] {text}")
    for stage, error in errors.items():
        out.print(f"[red]{escape(stage)} failed[/red]: {escape(str(error))}")


def _without(errors: Mapping[str, OnnxOpsError], reason: str) -> str:
    """A reason that names a failed stage without the stage's error, which is printed below."""
    for stage, error in errors.items():
        reason = reason.replace(f"{stage}: {error}", f"{stage} failed")
    return reason


def _release_lines(out: Console, summary: Summary, project: Project) -> None:
    registration = summary.registration
    if registration is None:
        return
    versions = ", ".join(f"{variant} = {version}" for variant, version in registration.versions.items())
    out.print(f"Registered [bold]{escape(registration.model)}[/bold]: version {escape(versions)}")
    for target in summary.awaiting:
        choice = next(c for c in summary.choices if c.target == target)
        version = registration.versions.get(choice.variant or "", "?")
        command = f"onnx-ops promote {registration.model} {version} --target {target}"
        out.print(
            f"Awaiting promotion on {escape(target)}: set alias challenger-{escape(target)}, or: {escape(command)}"
        )
    from onnx_ops.operations.journal import siblings
    from onnx_ops.wiring.summary import where_to_read

    for target in dict.fromkeys(c.target for c in summary.choices):
        for state in siblings(project.ports, registration.model, target):
            config, stable = state.config, state.roles.stable
            address = None if config is None else project.ports.provider(config.provider).address(config)
            if config is None or address is None or stable is None:
                continue
            # A cloud passes on what is sent to this one path.
            path = f"v2/models/{registration.model}" if config.provider == "local" else "invocations"
            told = f"{stable.name} ({stable.variant}) at {address}/{path}"
            out.print(f"Endpoint [bold]{escape(state.endpoint)}[/bold] serves {escape(told)}", soft_wrap=True)
    out.print(f"Report: {escape(where_to_read(registration))}", soft_wrap=True)
    out.print(f"Evidence: {escape(registration.where)}", soft_wrap=True)


def explanation_report(version: str, explanations: Sequence[Explanation]) -> None:
    out = console()
    for one in explanations:
        gate_report(out, result_table([one.decision]))
        colour = _COLOURS[one.decision.verdict]
        verdict = f"[{colour}]{one.decision.verdict.value.upper()}[/{colour}]"
        out.print(f"{escape(version)} on {escape(one.target)}: {verdict}, {escape(one.decision.reason)}")
        same = "the same verdict" if one.reproduced else f"signed was {one.signed.record.verdict.value}"
        out.print(f"Judged again from stored evidence: {same}. Signature {escape(one.signature)}.")
        hardware = one.evidence.hardware
        used = ", ".join(one.evidence.runtime.used) if one.evidence.runtime is not None else "unknown"
        where = f"{hardware.cpu_model}, {hardware.cores} cores, {hardware.runtime} {hardware.runtime_version}, {used}"
        out.print(f"Measured on {escape(where)}; decided {escape(one.signed.record.decided_at)}.")


def champions_table(found: Sequence[Drift]) -> None:
    table = Table(title="Champions, measured again", title_justify="left")
    for name in ("model", "version", "target", "variant", "verdict", "why"):
        table.add_column(name, overflow="fold")
    for one in found:
        colour = _COLOURS[one.verdict]
        verdict = f"[{colour}]{'DRIFTED' if one.drifted else one.verdict.value.upper()}[/{colour}]"
        table.add_row(one.model, one.version, one.target, one.variant, verdict, escape(one.reason))
    console().print(table)


def doctor_table(findings: Sequence[Finding]) -> None:
    table = Table()
    for name in ("", "check", "found", "remedy"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        mark = "[green]ok[/green]" if finding.ok else "[red]!![/red]"
        remedy = "" if finding.ok else finding.remedy
        table.add_row(mark, escape(finding.check), escape(finding.found), escape(remedy))
    console().print(table)


def targets_table(told: Sequence[Told]) -> None:
    table = Table()
    for name in ("target", "from", "provider", "this machine"):
        table.add_column(name, overflow="fold")
    for one in told:
        said = "can measure it" if one.here else "not measured here" if one.here is False else "not looked at"
        more = ". ".join(part for part in (f"{said}: {one.why}" if one.why else said, one.remedy) if part)
        colour = "green" if one.here else "yellow"
        table.add_row(
            escape(one.name), escape(one.source), escape(one.provider), f"[{colour}]{escape(more)}[/{colour}]"
        )
    console().print(table)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
