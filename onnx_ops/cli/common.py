"""What every command shares: options, errors as exits, one document for machines."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from onnx_ops.errors import MissingPackageError, OnnxOpsError, UserError, storage_errors
from onnx_ops.plugins import has_extra, imported, missing_package

P = ParamSpec("P")
R = TypeVar("R")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")]
Actor = Annotated[str, typer.Option("--actor", help="Who is answerable; default: user@host.", show_default=False)]
Reason = Annotated[str, typer.Option("--reason", "-m", help="Why; recorded in the ledger.", show_default=False)]
SetValue = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override a value, e.g. train.with.seed=3.")
]

INTERRUPTED = 130


@dataclass(slots=True)
class Collected:
    """What a command that is called from Python leaves: its document, and the errors that it told and outlived."""

    document: Any = None
    errors: list[OnnxOpsError] = field(default_factory=list)


collecting: ContextVar[Collected | None] = ContextVar("collecting", default=None)


def reported(command: Callable[P, R]) -> Callable[P, R]:
    """Errors that onnx-ops raises on purpose become a message and an exit code, never a traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        # With --json standard output holds one document; what libraries print goes where the progress goes.
        talk = contextlib.redirect_stdout(sys.stderr) if kwargs.get("as_json") else contextlib.nullcontext()
        try:
            with talk, storage_errors():
                return command(*args, **kwargs)
        except OnnxOpsError as error:
            told = _of_command(error, command.__name__) if isinstance(error, MissingPackageError) else error
            complain(told, as_json=bool(kwargs.get("as_json")))
            raise typer.Exit(error.exit_code) from error
        except ModuleNotFoundError as error:
            if not has_extra(imported(error)):
                raise
            missing = _of_command(missing_package(imported(error), where=""), command.__name__)
            complain(missing, as_json=bool(kwargs.get("as_json")))
            raise typer.Exit(missing.exit_code) from error
        except KeyboardInterrupt:
            typer.echo("interrupted; what was finished is kept, run again to go on", err=True)
            raise typer.Exit(INTERRUPTED) from None

    return wrapped


def _of_command(error: MissingPackageError, command: str) -> MissingPackageError:
    """Return the error with the command that needs the package."""
    where = f"onnx-ops {command.replace('_', '-')}{f', {error.where}' if error.where else ''}"
    return MissingPackageError(error.what, where=where, why=error.why, remedy=error.remedy)


def complain(error: OnnxOpsError, *, as_json: bool) -> None:
    if (collected := collecting.get()) is not None:
        collected.errors.append(error)
    if as_json:
        print_json(error.as_document())
        return
    from onnx_ops.cli.terminal import error_console, print_error

    print_error(error_console(), error)


def print_json(document: Any) -> None:
    """One document on standard output; figures that are not numbers become null, as JSON has no NaN."""
    output = sys.__stdout__ or sys.stdout
    output.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def answer(document: Callable[[], Any], report: Callable[[], None], *, as_json: bool) -> None:
    """Print a result, for machines or for people; a caller in Python gets the document, too."""
    if (collected := collecting.get()) is not None:
        collected.document = document()
    if as_json:
        print_json(document())
    else:
        report()


def duration(text: str, option: str) -> float:
    """Return seconds; `m` is accepted for minutes, as in the shell of every other tool.

    Raises:
        UserError: it is no duration.
    """
    from onnx_ops.config.quantities import parse_quantity

    try:
        return float(parse_quantity(re.sub(r"(?<=[0-9 ])m$", "min", text), "s"))
    except ValueError as error:
        raise UserError(str(error), where=option) from error


def version_of(text: str, command: str) -> tuple[str, str]:
    """Model and version of `MODEL/VERSION`; `command` is shown in the example.

    Raises:
        UserError: it is not of that form.
    """
    model, _, number = text.rpartition("/")
    number = number.removeprefix("v")
    if not model or not number:
        raise UserError(f"{text!r} is not MODEL/VERSION", remedy=f"For example: onnx-ops {command} digits-mlp/3")
    return model, number
