"""Shared by all commands: options, help, errors as exit codes, one JSON document, the steps of a reconciliation."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from onnx_ops import codec
from onnx_ops.errors import MissingPackageError, OnnxOpsError, UserError, storage_errors
from onnx_ops.plugins import has_extra, imported, missing_package

if TYPE_CHECKING:
    from onnx_ops.app.project import Project
    from onnx_ops.release.reconcile import StepReport

F = TypeVar("F", bound=Callable[..., None])
P = ParamSpec("P")
R = TypeVar("R")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress, only the result.")]
Actor = Annotated[
    str, typer.Option("--actor", help="User recorded in the audit log (default: user@host).", show_default=False)
]
Reason = Annotated[str, typer.Option("--reason", "-m", help="Reason, recorded in the ledger.", show_default=False)]
Endpoints = Annotated[list[str] | None, typer.Argument(help="Endpoints; all by default.")]
SetValue = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override a value, e.g. train.with.seed=3.")
]

_GROUPS = ("drift", "keys", "rollout", "webhooks")
"""Commands that have sub-commands."""


@dataclass(slots=True)
class CollectedOutput:
    """The output of a command for a Python caller: its document, and the errors that did not end it."""

    document: Any = None
    errors: list[OnnxOpsError] = field(default_factory=list)


collected_output: ContextVar[CollectedOutput | None] = ContextVar("collecting", default=None)


def handle_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn errors that onnx-ops raises on purpose into a message and an exit code, never a traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        # With --json standard output holds one document; what libraries print goes where the progress goes.
        redirect = contextlib.redirect_stdout(sys.stderr) if kwargs.get("as_json") else contextlib.nullcontext()
        try:
            with redirect, storage_errors():
                return command(*args, **kwargs)
        except (OnnxOpsError, ModuleNotFoundError) as error:
            if not isinstance(error, OnnxOpsError) and not has_extra(imported(error)):
                raise
            shown = error if isinstance(error, OnnxOpsError) else missing_package(imported(error), where="")
            if isinstance(shown, MissingPackageError):  # name the command: `rollout_status` is `rollout status`
                group, _, verb = command.__name__.partition("_")
                name = f"{group} {verb}" if group in _GROUPS else command.__name__.replace("_", "-")
                where = f"onnx-ops {name}{f', {shown.where}' if shown.where else ''}"
                shown = MissingPackageError(shown.what, where=where, why=shown.why, remedy=shown.remedy)
            print_error(shown, as_json=bool(kwargs.get("as_json")))
            raise typer.Exit(shown.exit_code) from error
        except KeyboardInterrupt:
            typer.echo("interrupted; finished work is kept, run again to continue", err=True)
            raise typer.Exit(130) from None

    return wrapped


def print_error(error: OnnxOpsError, *, as_json: bool) -> None:
    """Print an error for people or, as JSON, for machines."""
    if (collected := collected_output.get()) is not None:
        collected.errors.append(error)
    if as_json:
        print_json(error.as_document())
        return
    from onnx_ops.cli.terminal import error_console, render_error

    render_error(error_console(), error)


def print_errors(errors: Mapping[str, OnnxOpsError]) -> None:
    """Print errors for people."""
    for error in errors.values():
        print_error(error, as_json=False)


def print_json(document: Any) -> None:
    """Print one document on standard output."""
    output = sys.__stdout__ or sys.stdout
    output.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def print_result(document: Callable[[], Any], report: Callable[[], None], *, as_json: bool) -> None:
    """Print a result for machines or for people. A caller in Python gets the document, too."""
    if (collected := collected_output.get()) is not None:
        collected.document = document()
    if as_json:
        print_json(document())
    else:
        report()


def open_project() -> Project:
    """Return the project around the working directory."""
    from onnx_ops.app import project

    return project.open_project()


def parse_duration(text: str, option: str) -> float:
    """Return a duration in seconds; `m` is accepted for minutes."""
    from onnx_ops.config.quantities import parse_quantity

    try:
        return float(parse_quantity(re.sub(r"(?<=[0-9 ])m$", "min", text), "s"))
    except ValueError as error:
        raise UserError(str(error), where=option) from error


def parse_version(text: str, command: str) -> tuple[str, str]:
    """Return model and version of `MODEL/VERSION`. `command` is shown in the example."""
    model, _, number = text.rpartition("/")
    number = number.removeprefix("v")
    if not model or not number:
        raise UserError(f"{text!r} is not MODEL/VERSION", remedy=f"For example: onnx-ops {command} digits-mlp/3")
    return model, number


@contextlib.contextmanager
def writing(what: str, where: object) -> Iterator[None]:
    """Turn what keeps a file from being written into a UserError."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"{what} cannot be written", where=str(where), why=why) from error


def print_steps(reports: Mapping[str, Sequence[StepReport]], errors: Mapping[str, OnnxOpsError] | None = None) -> None:
    """Print the steps of reconciliations by endpoint, and the errors that ended some."""
    from onnx_ops.cli.terminal import say

    for name, steps in reports.items():
        for report in steps:
            say(f"{name}: {report.did + ': ' if report.did else ''}{report.why}")
        if steps[-1].registry_down:
            say(f"{name}: the registry does not answer: {steps[-1].registry_down}", err=True)
    print_errors(errors or {})


def documents(errors: Mapping[str, OnnxOpsError]) -> dict[str, Any]:
    """Return errors for --json."""
    return {name: error.as_document() for name, error in errors.items()}


def steps_to_document(
    reports: Mapping[str, Sequence[StepReport]], errors: Mapping[str, OnnxOpsError]
) -> dict[str, Any]:
    """Return by endpoint a list of its steps, or the error that it ended with."""
    return {**codec.to_json(reports), **documents(errors)}


def exit_after_steps(
    reports: Mapping[str, Sequence[StepReport]], errors: Mapping[str, OnnxOpsError] | None = None
) -> None:
    """Exit with the worst error's code, else 5 if something was refused, 4 if the registry did not answer."""
    if errors:
        raise typer.Exit(max(error.exit_code for error in errors.values()))
    if any(report.refused for steps in reports.values() for report in steps):
        raise typer.Exit(5)
    if any(steps[-1].registry_down for steps in reports.values()):
        raise typer.Exit(4)


class Command(TyperCommand):
    """A command whose docstring can break its lines anywhere, with `FILE`, `N` or `a|b` for the values of options."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        paragraphs = inspect.cleandoc(settings.get("help") or "").split("\n\n")
        settings["help"] = "\n\n".join(" ".join(part.split()) for part in paragraphs)
        super().__init__(name, **settings)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, shown by their names."""
        return _named(super().get_params(ctx))


def make_group(name: str, text: str, example: str) -> typer.Typer:
    """Return a command whose sub-commands are still to be added."""
    return typer.Typer(name=name, cls=CommandGroup, no_args_is_help=True, help=text, epilog=f"Example: {example}")


def add_command(group: typer.Typer, name: str) -> Callable[[F], F]:
    """Add a function to the sub-commands of a group; the errors that it raises become exit codes."""

    def add(function: F) -> F:
        group.command(name, cls=Command)(handle_errors(function))
        return function

    return add


class CommandGroup(TyperGroup):
    """A group whose own options are shown like those of its commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, shown by their names."""
        return _named(super().get_params(ctx))


class _Argument(TyperArgument):
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
    """Change the classes of parameters: Typer makes them itself and has no setting for that."""
    for param in params:
        if isinstance(param, TyperArgument):
            param.__class__ = _Argument
        elif isinstance(param, TyperOption):
            param.__class__ = _Option
    return params
