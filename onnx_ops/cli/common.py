"""Code that all commands share: options, help, exit codes of errors, and output.

Output is one JSON document, or text: paragraphs and tables without breaks in words, paths or
intervals.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.text import Text
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from onnx_ops import codec
from onnx_ops.domain.decision import Verdict
from onnx_ops.errors import (
    ConfigError,
    InternalError,
    MissingPackageError,
    NotFoundError,
    OnnxOpsError,
    UserError,
    quoted,
    suggest,
)
from onnx_ops.plugins import has_extra, imported, missing_package
from onnx_ops.printable import disarm, show, show_json
from onnx_ops.scratch import storage_errors

if TYPE_CHECKING:
    from onnx_ops.app.context import Project
    from onnx_ops.release.reconcile import StepReport

F = TypeVar("F", bound=Callable[..., None])
P = ParamSpec("P")
R = TypeVar("R")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress, only the result.")]
Actor = Annotated[
    str,
    typer.Option(
        "--actor",
        help="User recorded in the ledger. Default: ONNX_OPS_ACTOR, else user@host.",
        show_default=False,
    ),
]
Reason = Annotated[
    str, typer.Option("--reason", "-m", help="Reason, recorded in the ledger.", show_default=False)
]


def complete_endpoint(incomplete: str) -> list[str]:
    """Return the names of endpoints that begin with a string, for the shell.

    A ledger in a cloud is not read, since the shell waits for the names.
    """
    try:
        project = open_project()
        if "://" in project.settings.ledger:
            return []
        names = project.context.ledger.endpoints()
    except (OnnxOpsError, OSError):
        return []  # During completion, the shell would show an error within the command line.
    return [name for name in names if name.startswith(incomplete) and "@" not in name]


Endpoint = Annotated[
    str, typer.Argument(help="Name of the endpoint.", autocompletion=complete_endpoint)
]
Endpoints = Annotated[
    list[str] | None,
    typer.Argument(help="Endpoints; all by default.", autocompletion=complete_endpoint),
]
SetValue = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a value, e.g. train.with.seed=3."),
]

_GROUPS = ("analysis", "keys", "ledger", "rollout", "webhooks")
"""Groups of commands that error messages write as `onnx-ops GROUP COMMAND`."""

_COLOURS = {
    Verdict.PASS: "green",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.ERROR: "magenta",
    Verdict.FAIL: "red",
}
_UNWRAPPED = 100_000
"""Width in columns of output without a terminal, so large that no line is broken."""
_CI = ("GITHUB_ACTIONS", "TF_BUILD")
"""Environment variables of CI services that execute commands in output lines."""

_GAP = 2
"""Number of spaces between the columns of a table."""

_WORD = re.compile(r"(?:\[[^\]\n]{1,40}\]|[^ \n])+")
"""Pattern of text without line breaks: a word, or a word with bracketed text.

Lines are therefore not broken inside the brackets of an interval such as `[1.2, 1.3] ms`.
"""

_LINE = re.compile(r".+")

KEEP = "\u00a0"
"""Space at which lines are not broken; it is printed as a normal space."""


@dataclass(slots=True)
class CollectedOutput:
    """Output of a command for a Python caller.

    The output consists of the command's document, and of the errors that `print_error` printed.
    """

    document: Any = None
    errors: list[OnnxOpsError] = field(default_factory=list)


collected_output: ContextVar[CollectedOutput | None] = ContextVar("collecting", default=None)


def handle_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Return a command that turns exceptions into a message and an exit code.

    No traceback is printed. The exit code of an error is never that of a failed gate.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        # With --json, standard output must contain only JSON. The output of libraries therefore
        # goes to standard error.
        redirect = (
            contextlib.redirect_stdout(sys.stderr)
            if kwargs.get("as_json")
            else contextlib.nullcontext()
        )
        try:
            with redirect, storage_errors():
                return command(*args, **kwargs)
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            text = (
                "interrupted; results of finished stages stay in the cache. Run the command again."
            )
            typer.echo(text, err=True)
            raise typer.Exit(130) from None
        except Exception as error:
            shown = _describe_error(error, command.__name__)
            print_error(shown, as_json=bool(kwargs.get("as_json")))
            raise typer.Exit(shown.exit_code) from error

    return wrapped


def _describe_error(error: Exception, function: str) -> OnnxOpsError:
    """Return the error to print for an exception of a command.

    The error for a missing package or a bug of onnx-ops names the command.
    """
    group, _, verb = function.partition("_")
    command = f"onnx-ops {f'{group} {verb}' if group in _GROUPS else function.replace('_', '-')}"
    shown: OnnxOpsError
    if isinstance(error, OnnxOpsError):
        shown = error
    elif isinstance(error, ModuleNotFoundError) and has_extra(imported(error)):
        shown = missing_package(imported(error), where="")
    else:
        frames = traceback.extract_tb(error.__traceback__)
        place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        why = f"{type(error).__name__}{place}: {quoted(error)}"
        remedy = (
            f"This is a bug of onnx-ops {version('onnx-ops')}: report it with this message and "
            "your input files."
        )
        shown = InternalError(
            "the command ended unexpectedly", where=command, why=why, remedy=remedy
        )
    if isinstance(shown, MissingPackageError):
        where = f"{command}{f', {shown.where}' if shown.where else ''}"
        shown = MissingPackageError(shown.what, where=where, why=shown.why, remedy=shown.remedy)
    return shown


def open_project() -> Project:
    """Return the project around the working directory."""
    from onnx_ops.app import context

    return context.open_project()


def parse_duration(text: str, option: str) -> float:
    """Return a duration in seconds; `m` is accepted for minutes."""
    from onnx_ops.config.quantities import parse_option

    return parse_option(re.sub(r"(?<=[0-9 ])m$", "min", text), "s", option)


def parse_version(text: str, command: str) -> tuple[str, str]:
    """Return model and version from a string `MODEL/VERSION`.

    `command` is part of the example in the error message.
    """
    model, _, number = text.rpartition("/")
    number = number.removeprefix("v")
    if not model or not number:
        raise UserError(
            f"{text!r} is not MODEL/VERSION", remedy=f"For example: onnx-ops {command} digits-mlp/3"
        )
    return model, number


def require_folder(option: str, file: Path) -> None:
    """Raise NotFoundError if the folder of an output file does not exist."""
    if not file.resolve().parent.is_dir():
        raise NotFoundError(
            "the folder of this file does not exist",
            where=f"{option} {file}",
            remedy="Create the folder, or choose another.",
        )


@contextlib.contextmanager
def writing(what: str, where: object) -> Iterator[None]:
    """Convert an OSError in this context to a UserError about writing `what`."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"{what} cannot be written", where=str(where), why=why) from error


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"onnx-ops {version('onnx-ops')}")
        raise typer.Exit


def program(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the version of onnx-ops and exit.",
        ),
    ] = False,
) -> None:
    """Define the options of `onnx-ops` itself."""


class Command(TyperCommand):
    """Command whose help joins the lines of each paragraph of its docstring.

    The help shows the values of options by names such as `FILE` and `N`, or as `a|b`.
    """

    def __init__(self, name: str | None, **settings: Any) -> None:
        paragraphs = inspect.cleandoc(settings.get("help") or "").split("\n\n")
        settings["help"] = "\n\n".join(" ".join(part.split()) for part in paragraphs)
        super().__init__(name, **settings)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters with the classes of this project, which show their values."""
        return _named(super().get_params(ctx))


def make_group(name: str, text: str, example: str) -> typer.Typer:
    """Return a command group without sub-commands."""
    return typer.Typer(
        name=name, cls=CommandGroup, no_args_is_help=True, help=text, epilog=f"Example: {example}"
    )


def add_command(group: typer.Typer, name: str) -> Callable[[F], F]:
    """Return a decorator that adds a function to the sub-commands of a group.

    Errors that the function raises become messages and exit codes.
    """

    def add(function: F) -> F:
        group.command(name, cls=Command)(handle_errors(function))
        return function

    return add


class CommandGroup(TyperGroup):
    """Group of commands whose help shows options as `Command` does."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters with the classes of this project, which show their values."""
        return _named(super().get_params(ctx))


def _convert(
    param: TyperArgument | TyperOption,
    convert: Callable[[Any, Any], Any],
    ctx: Any,
    value: Any,
) -> Any:
    """Return the value of a parameter, converted by Typer only if needed.

    Typer also converts texts and defaults, by pydantic, whose import takes 0.06 s.
    """
    kind = param.type_descriptor.annotation
    if value is None and not param.required:
        value = () if param.multiple or param.nargs == -1 else None
    elif kind is float and type(value) is int:
        value = float(value)
    elif kind not in (str, int, float) or type(value) is not kind:
        return convert(ctx, value)
    return value if param.callback is None else param.callback(ctx, param, value)


class _Argument(TyperArgument):
    def process_value(self, ctx: Any, value: Any) -> Any:
        """Return the converted value."""
        return _convert(self, super().process_value, ctx, value)

    @property
    def display_name_raw(self) -> str:
        name = str(self.name).upper()
        return self.metavar or (name if self.nargs == 1 else name.removesuffix("S"))

    def display_type_rich(self, ctx: Any) -> str | None:
        return None

    def _usage_display_name(self) -> str:
        name = self._rich_display_name()
        return name if self.required else f"[{name}]"


class _Option(TyperOption):
    def process_value(self, ctx: Any, value: Any) -> Any:
        """Return the converted value.

        The error for a misspelled choice suggests the most similar choice.
        """
        try:
            return _convert(self, super().process_value, ctx, value)
        except typer.BadParameter as error:
            given, *choices = re.findall(r"'([^']*)'", error.message) or [""]
            hint = suggest(given, choices, "") if choices else ""
            error.message = f"{error.message.removeprefix('Value error, ')} {hint}".rstrip()
            raise

    def display_type_rich(self, ctx: Any) -> str | None:
        if self.metavar is not None:
            return self.metavar
        if self.is_flag:
            return None
        kind = self.type_descriptor
        if kind.is_choice:
            return self.display_type(ctx).strip("<>").removeprefix("list[").removesuffix("]")
        return "N" if kind.is_ranged else "FILE" if kind.is_path else str(self.name).upper()


def _named(params: list[Any]) -> list[Any]:
    """Change the classes of parameters to those of this project.

    Typer creates the parameters itself and has no setting for their classes.
    """
    for param in params:
        if isinstance(param, TyperArgument):
            param.__class__ = _Argument
        elif isinstance(param, TyperOption):
            param.__class__ = _Option
    return params


def print_error(error: OnnxOpsError, *, as_json: bool) -> None:
    """Print an error as text on standard error, or as JSON on standard output."""
    if (collected := collected_output.get()) is not None:
        collected.errors.append(error)
    if as_json:
        print_json(error.as_document())
        return
    render_error(error_console(), error)


def print_errors(errors: Mapping[str, OnnxOpsError]) -> None:
    """Print errors as text on standard error."""
    for error in errors.values():
        print_error(error, as_json=False)


def print_json(document: Any) -> None:
    """Print one document on standard output."""
    output = sys.__stdout__ or sys.stdout
    output.write(
        show_json(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)) + "\n"
    )


def print_result(
    document: Callable[[], Any], report: Callable[[], None] | str, *, as_json: bool
) -> None:
    """Print the result of a command as JSON, or as a text or report.

    A caller in Python also gets the document.
    """
    if (collected := collected_output.get()) is not None:
        collected.document = document()
    if as_json:
        print_json(document())
    elif isinstance(report, str):
        say(report)
    else:
        report()


def print_steps(
    reports: Mapping[str, Sequence[StepReport]], errors: Mapping[str, OnnxOpsError] | None = None
) -> None:
    """Print the steps of reconciliations by endpoint, and their errors."""
    for name, steps in reports.items():
        for report in steps:
            say(f"{name}: {report.did + ': ' if report.did else ''}{report.why}")
        if steps[-1].registry_down:
            say(f"{name}: the registry could not be read: {steps[-1].registry_down}", err=True)
    print_errors(errors or {})


def documents(errors: Mapping[str, OnnxOpsError]) -> dict[str, Any]:
    """Return errors as JSON documents, by their names."""
    return {name: error.as_document() for name, error in errors.items()}


def steps_to_document(
    reports: Mapping[str, Sequence[StepReport]], errors: Mapping[str, OnnxOpsError]
) -> dict[str, Any]:
    """Return the list of steps of each endpoint as JSON.

    For an endpoint whose reconciliation ended with an error, the error is returned instead.
    """
    return {**codec.to_json(reports), **documents(errors)}


def exit_after_steps(
    reports: Mapping[str, Sequence[StepReport]], errors: Mapping[str, OnnxOpsError] | None = None
) -> None:
    """Exit with the highest exit code of the errors.

    Without errors, exit with 5 if a step was refused, or else with 4 if the registry could not be
    read. Otherwise, return.
    """
    if errors:
        raise typer.Exit(max(error.exit_code for error in errors.values()))
    if any(report.refused for steps in reports.values() for report in steps):
        raise typer.Exit(5)
    if any(steps[-1].registry_down for steps in reports.values()):
        raise typer.Exit(4)


class Markup(str):
    """Text in Rich's markup.

    Other strings are literal text as values of `markup` and `print_text`, and as cells of
    `print_table`. `SafeConsole.print` parses every string as markup.
    """

    __slots__ = ()


def markup(template: str, *values: object) -> Markup:
    """Return a template in Rich's markup with values inserted at its `{}`.

    Markup in values is printed literally, unless they are `Markup` themselves.
    """
    return Markup(
        template.format(
            *(value if isinstance(value, Markup) else escape(str(value)) for value in values)
        )
    )


class SafeConsole(Console):
    """Console that makes control sequences and CI commands in printed texts harmless.

    The console protects the terminal, and a CI service that executes commands in the output.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yield the segments of a renderable, without control characters in their texts."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(show(segment.text), segment.style)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects as Rich's console does.

        On a CI service, lines that its runner would execute as commands are changed.
        """
        if self.is_terminal or not any(name in os.environ for name in _CI):
            super().print(*objects, **options)
            return
        with self.capture() as written:
            super().print(*objects, **options)
        self.file.write(disarm(written.get()))


def console() -> Console:
    """Return a console on standard output.

    If standard output is not a terminal, the width is `_UNWRAPPED`, since programs read whole
    lines. Output for a Python caller is colored as on a terminal.
    """
    coloured = True if collected_output.get() is not None else None
    return SafeConsole(
        width=None if sys.stdout.isatty() else _UNWRAPPED,
        force_terminal=coloured,
        highlight=False,
        emoji=False,
    )


def error_console() -> Console:
    """Return a console on standard error."""
    return SafeConsole(
        stderr=True, width=None if sys.stderr.isatty() else _UNWRAPPED, highlight=False, emoji=False
    )


def print_line(text: str, *, err: bool = False) -> None:
    """Print one line of any length without wrapping."""
    typer.echo(disarm(text), err=err)


def verdict_markup(verdict: Verdict, *, advisory: bool = False, text: str = "") -> Markup:
    """Return a verdict, or `text` in its place, in the verdict's color.

    Verdicts of advisory gates are dim.
    """
    colour = "dim" if advisory else _COLOURS[verdict]
    return markup(f"[{colour}]{{}}[/{colour}]", text or verdict.value.upper())


def say(text: object, *, err: bool = False, indent: int = 0) -> None:
    """Print plain text as a paragraph, on standard output or standard error."""
    print_text("{}", text, out=error_console() if err else None, indent=indent)


def print_text(
    template: str, *values: object, out: Console | None = None, indent: int = 0, hang: int = 2
) -> None:
    """Print a paragraph; only on a terminal, it is wrapped between words.

    Args:
        template: template of `markup`.
        values: values of the template.
        out: console to print on; standard output by default.
        indent: spaces before the first line.
        hang: further spaces before the other lines.
    """
    _print_paragraph(out or console(), _parsed(markup(template, *values)), indent, hang)


def render_error(out: Console, error: OnnxOpsError, head: str = "error") -> None:
    """Print an error: the event and its place, then the cause, then the remedy.

    For a `ConfigError`, its problems are printed instead.
    """
    if isinstance(error, ConfigError):
        for problem in error.problems:
            print_text("{}", problem, out=out)
        return
    where = f"{error.where}: " if error.where and not head.startswith(error.where) else ""
    print_text("[red]{}[/red]: {}", head, where + error.what, out=out)
    for name, text in (("why", error.why), ("try", error.remedy)):
        if text:
            print_text("{}: {}", name, text, out=out, indent=2, hang=5)


def print_table(
    heads: Sequence[str], rows: Sequence[Sequence[str] | str], *, out: Console | None = None
) -> None:
    """Print rows of cells as a table.

    If words would have to be broken to fit the columns, each row is printed as a list of its cells.

    Args:
        heads: names of the columns.
        rows: cells of plain text or `Markup`, one per column; a string instead of a row is a
            heading inside the table.
        out: console to print on; standard output by default.
    """
    out = out or console()
    titles = [Text(head, style="dim") for head in heads]
    parsed = [
        _parsed(row) if isinstance(row, str) else [_parsed(cell) for cell in row] for row in rows
    ]
    columns = list(zip(titles, *(row for row in parsed if isinstance(row, list)), strict=True))
    least, most = (_measure_columns(columns, part) for part in (_WORD, _LINE))
    room = out.width - _GAP * (len(heads) - 1)
    fits = sum(least) <= room
    widths = _shared(least, most, room)
    if fits and any(heads):
        _print_row(out, titles, widths)
    for row in parsed:
        if isinstance(row, Text):
            _print_paragraph(out, row)
        elif fits:
            _print_row(out, row, widths)
        else:
            _print_list(out, titles, row)


def _measure_columns(columns: Iterable[Sequence[Text]], pattern: re.Pattern[str]) -> list[int]:
    """Return the width of the longest match of a pattern in each column of a table."""
    return [max(_longest(cell, pattern) for cell in column) for column in columns]


def _print_list(out: Console, titles: Sequence[Text], row: Sequence[Text]) -> None:
    """Print the first cell of a row, and below it the other cells with their titles.

    Empty cells are left out.
    """
    _print_paragraph(out, row[0])
    for title, cell in zip(titles[1:], row[1:], strict=True):
        if cell.plain:
            _print_paragraph(out, Text.assemble(title, " ", cell), indent=2)


def _parsed(cell: str) -> Text:
    return Text.from_markup(cell, emoji=False) if isinstance(cell, Markup) else Text(cell)


def _longest(cell: Text, pattern: re.Pattern[str]) -> int:
    """Return the width of the longest match of a pattern in a cell, in columns."""
    return max((Text(part).cell_len for part in pattern.findall(cell.plain)), default=0)


def _shared(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """Return the width of each column of a table, between `least` and `most`.

    `room` is the largest sum of the widths. Each character beyond `least` goes to the narrowest
    column that is still below its `most`.
    """
    widths = list(least)
    for _ in range(room - sum(widths)):
        wanting = [n for n, width in enumerate(widths) if width < most[n]]
        if not wanting:
            break
        widths[min(wanting, key=lambda n: widths[n])] += 1
    return widths


def _print_row(out: Console, cells: Sequence[Text], widths: Sequence[int]) -> None:
    parts = [_wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
    for number in range(max(map(len, parts))):
        line = Text()
        for part, width in zip(parts, widths, strict=True):
            cell = part[number] if number < len(part) else Text()
            line.append_text(cell).append(" " * (width - cell.cell_len + _GAP))
        line.rstrip()
        _print_line(out, line)


def _print_paragraph(out: Console, text: Text, indent: int = 0, hang: int = 2) -> None:
    lines = (
        _wrapped(text, out.width - indent - hang, first=out.width - indent)
        if out.is_terminal
        else [text]
    )
    for number, line in enumerate(lines):
        _print_line(out, Text(" " * (indent + (hang if number else 0))).append_text(line))


def _wrapped(text: Text, width: int, *, first: int | None = None) -> list[Text]:
    """Return lines of at most `width` columns, broken only at spaces and line ends.

    The first line can have `first` columns. A word that is longer than its line gets a separate
    line.
    """
    lines: list[Text] = []
    for paragraph in text.split("\n", allow_blank=True):
        breaks: list[int] = []
        start = 0
        for word in _WORD.finditer(paragraph.plain):
            limit = first if first is not None and not lines and not breaks else width
            if word.start() > start and Text(paragraph.plain[start : word.end()]).cell_len > limit:
                breaks.append(word.start())
                start = word.start()
        for line in paragraph.divide(breaks):
            line.rstrip()
            lines.append(line)
    return lines or [Text()]


def _print_line(out: Console, line: Text) -> None:
    line.plain = line.plain.replace(KEEP, " ")
    out.print(line, no_wrap=True, overflow="ignore", crop=False)
