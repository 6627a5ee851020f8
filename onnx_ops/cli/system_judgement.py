"""`onnx-ops judge --system`: one verdict on a system and what will be deployed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from onnx_ops import codec
from onnx_ops.cli.common import (
    Markup,
    print_result,
    print_table,
    print_text,
    say,
    verdict_markup,
    writing,
)
from onnx_ops.errors import NotFoundError, UserError

if TYPE_CHECKING:
    from onnx_ops.app.context import Project
    from onnx_ops.domain.system_comparison import Tolerances
    from onnx_ops.measure.system_judgement import SystemJudgement
    from onnx_ops.measure.system_parity import System, SystemStep
    from onnx_ops.reporting.system_parity import SystemHeading


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemOptions:
    """The options of `onnx-ops judge --system`."""

    source: str
    candidate: str
    files: Path | None
    before: Sequence[str] | None
    after: Sequence[str] | None
    tolerances: Sequence[str] | None
    targets: Sequence[str] | None
    limit: int
    timeout: float
    page: str | None
    html: Path | None
    as_json: bool
    quiet: bool


def judge_system_command(options: SystemOptions, project: Project) -> None:
    """Judge a system, print the result, and exit with the code of the verdict."""
    from onnx_ops.cli.inspect import local_model
    from onnx_ops.cli.tools import guard_context, show_progress
    from onnx_ops.measure.system_inputs import list_raw_inputs
    from onnx_ops.measure.system_judgement import SystemRequest, judge_system
    from onnx_ops.measure.user_functions import importable

    if options.files is None:
        remedy = "Name a folder, or a .jsonl, .csv or .txt file: --files PLACE."
        raise UserError("a system needs raw inputs", where="--system", remedy=remedy)
    targets = [
        project.targets.load(name, where="--target")
        for name in dict.fromkeys(options.targets or ["cpu-1t"])
    ]
    inputs, total = list_raw_inputs(options.files, options.limit)
    with local_model(options.candidate) as model, importable(Path.cwd()):
        system = _load_system(options, model)
        request = SystemRequest(
            system=system,
            inputs=inputs,
            total=total,
            targets=targets,
            runtime=guard_context(project.context, options.timeout).runtime,
            tolerances=_parse_tolerances(
                options.tolerances or (), [one.name for one in system.steps]
            ),
        )
        quiet = options.quiet or options.as_json
        with show_progress("judge", options.source, options.candidate, quiet=quiet) as detail:
            judgement = judge_system(replace(request, report=detail))
    heading = _build_heading(options, judgement, system, total)
    _write_reports(judgement, heading, options)
    print_result(
        lambda: _build_document(judgement, heading, options),
        lambda: _print_judgement(judgement, heading, as_markdown=options.page == "-"),
        as_json=options.as_json,
    )
    raise typer.Exit(judgement.verdict.exit_code)


def _load_system(options: SystemOptions, model: Path) -> System:
    from onnx_ops.measure.system_parity import OUTPUT, System
    from onnx_ops.measure.user_functions import takes_model
    from onnx_ops.onnx_graph.model_info import read_model_info

    read_model_info(model)
    predict = _load(options.source, "--system")
    if takes_model(predict):
        # The stage `system` passes the trained model, which is unknown here. The function therefore
        # gets the path of the candidate.
        predict = partial(predict, model=model)
    before = tuple(_load_step(text, "--before") for text in options.before or ())
    after = tuple(_load_step(text, "--after") for text in options.after or ())
    names = [step.name for step in (*before, *after)]
    for name in names:
        if names.count(name) > 1 or name == OUTPUT:
            why = f"{OUTPUT!r} is the step of the model" if name == OUTPUT else ""
            raise UserError(f"two steps are called {name!r}", where="--before, --after", why=why)
    return System(
        predict=predict, reference=options.source, candidate=model, before=before, after=after
    )


def _load(reference: str, option: str) -> Any:
    from onnx_ops.config.functions import explain_missing_function
    from onnx_ops.measure.user_functions import load_function

    if problem := explain_missing_function(reference, Path.cwd()):
        remedy = "Name a function of the project: package.module:function."
        raise UserError(problem, where=option, remedy=remedy)
    return load_function(reference, option)


def _load_step(text: str, option: str) -> SystemStep:
    """Return a step from `NAME=package.module:function` or `NAME=FILE.onnx`."""
    from onnx_ops.measure.system_parity import SystemStep
    from onnx_ops.onnx_graph.model_info import read_model_info

    name, separator, place = text.partition("=")
    if not (name and separator and place):
        remedy = f"For example: {option} resize=project.steps:resize."
        raise UserError(f"{text!r} is not NAME=FUNCTION or NAME=FILE", where=option, remedy=remedy)
    if place.endswith((".onnx", ".ort")):
        path = Path(place)
        if not path.is_file():
            raise NotFoundError("no such file", where=f"{option} {text}")
        read_model_info(path)
        return SystemStep(name=name, reference=path.name, graph=path)
    return SystemStep(name=name, reference=place, function=_load(place, option))


def _parse_tolerances(texts: Sequence[str], steps: Sequence[str]) -> Tolerances:
    """Return the tolerances from `NAME=VALUE` texts.

    A name is that of a tolerance, or of a step, whose limits are then multiplied by the value.
    """
    from onnx_ops.config.messages import did_you_mean
    from onnx_ops.domain.system_comparison import Tolerances

    names = [one.name for one in fields(Tolerances) if one.name != "steps"]
    given: dict[str, Any] = {}
    factors: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        number = _parse_number(value)
        if number is None:
            remedy = "For example: --tolerance decoding=4 or --tolerance answers=2%."
            what = f"{text!r} is not NAME=VALUE with a value above 0"
            raise UserError(what, where="--tolerance", remedy=remedy)
        if name in names:
            given[name] = number
        elif name in steps:
            factors[name] = number
        else:
            known = [*names, *steps]
            hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
            raise UserError(f"no tolerance is called {name!r}{hint}", where="--tolerance")
    return Tolerances(**given, steps=factors)


def _parse_number(text: str) -> float | None:
    """Return a positive number, or a share with a percent sign; None if it is neither."""
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        return None
    number = number / 100 if text.endswith("%") else number
    return number if 0 < number < float("inf") else None


def _build_heading(
    options: SystemOptions, judgement: SystemJudgement, system: System, total: int
) -> SystemHeading:
    from onnx_ops.reporting.system_parity import SystemHeading

    count = judgement.inputs
    shown = f"{count} of {total}" if count < total else str(count)
    return SystemHeading(
        source=options.source,
        candidate=Path(options.candidate).name,
        steps=" → ".join(f"{step.name} ({step.reference})" for step in system.steps),
        inputs=f"{shown} of {options.files}" if count == total else f"{shown} in {options.files}",
        verdict=judgement.verdict,
        notes=judgement.notes,
    )


def _build_document(
    judgement: SystemJudgement, heading: SystemHeading, options: SystemOptions
) -> dict[str, Any]:
    from onnx_ops.reporting.system_parity import describe_reason

    return {
        "tool": "judge",
        "verdict": judgement.verdict.value,
        "reason": describe_reason(judgement.decisions),
        "exit_code": judgement.verdict.exit_code,
        "system": options.source,
        "candidate": {"path": options.candidate},
        "inputs": judgement.inputs,
        "steps": heading.steps,
        "first_step": judgement.step,
        "worst_input": "" if judgement.worst is None else judgement.worst.name,
        "targets": [
            {
                "target": decision.target,
                "verdict": decision.verdict.value,
                "results": [codec.to_json(result) for result in decision.results],
            }
            for decision in judgement.decisions
        ],
        "notes": list(heading.notes),
    }


def _write_reports(
    judgement: SystemJudgement, heading: SystemHeading, options: SystemOptions
) -> None:
    """Write the HTML report and the Markdown table to their files, if any are named."""
    from onnx_ops.reporting.system_parity import build_example, write_html, write_markdown

    if options.html:
        worst = judgement.worst
        example = (
            None
            if worst is None
            else build_example(judgement.step, worst.name, worst.reference, worst.value)
        )
        with writing("the report", f"--html {options.html}"):
            text = write_html(heading, judgement.decisions, example)
            options.html.write_text(text, encoding="utf-8")
    if options.page and options.page != "-":
        with writing("the table", f"--markdown {options.page}"):
            text = write_markdown(heading, judgement.decisions)
            Path(options.page).write_text(text, encoding="utf-8")


def _print_judgement(
    judgement: SystemJudgement, heading: SystemHeading, *, as_markdown: bool
) -> None:
    from onnx_ops.domain.decision import Verdict
    from onnx_ops.reporting.system_parity import describe_reason, list_cells, write_markdown

    if as_markdown:
        typer.echo(write_markdown(heading, judgement.decisions), nl=False)
        return
    where = ", ".join(decision.target for decision in judgement.decisions)
    title = f"{heading.candidate} against {heading.source} on {where}"
    print_text("{} {}", verdict_markup(heading.verdict), title)
    say(describe_reason(judgement.decisions))
    for name, text in (("steps", heading.steps), ("inputs", heading.inputs)):
        print_text("[dim]{}[/dim] {}", name, text, hang=7)
    for decision in judgement.decisions:
        rows = [
            (*cells, Markup("[dim]note[/dim]") if r.advisory else verdict_markup(r.verdict))
            for *cells, r in list_cells(decision.results)
        ]
        print_table((f"step on {decision.target}", "difference", "limit", "verdict"), rows)
        reason = describe_reason(judgement.decisions)
        for result in decision.results:
            if result.verdict is Verdict.PASS or reason == f"{result.metric}: {result.reason}":
                continue
            print_text("[bold]{}[/bold] {}", result.metric, result.reason)
    for note in heading.notes:
        print_text("[yellow]note[/yellow] {}", note)
