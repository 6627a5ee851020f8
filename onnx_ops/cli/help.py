"""Help of commands: paragraphs that fit any width, and names of values in place of Python types."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from onnx_ops.cli.common import handle_errors

F = TypeVar("F", bound=Callable[..., None])


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
