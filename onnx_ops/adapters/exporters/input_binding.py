"""Bindings of the data's inputs to the inputs of a model.

Inputs are bound by name, or in a declared order if the model has no names for inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from onnx_ops.errors import UserError, suggest

WHERE = "data inputs"

_SHOWN = 12
"""Largest number of names that a message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBinding:
    """Assignment of inputs to the arguments of a function call.

    Args:
        positional: the parameter of each input that is passed by position, in order.
        keyword: the inputs that are passed by keyword; each is the name of a parameter.
        variadic: name of the `*parameter` that receives all positional inputs; empty if there is
            none.
    """

    positional: Mapping[str, str]
    keyword: tuple[str, ...]
    variadic: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the inputs in the order of the call."""
        return (*self.positional, *self.keyword)

    def pack(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments from values by input name."""
        return tuple(values[name] for name in self.positional), {
            name: values[name] for name in self.keyword
        }

    def by_parameter(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values by parameter from values by input; a tuple for the `*parameter`."""
        keyword = {name: values[name] for name in self.keyword}
        if self.variadic:
            return {self.variadic: tuple(values[name] for name in self.positional), **keyword}
        return {parameter: values[name] for name, parameter in self.positional.items()} | keyword


def bind_call(
    function: Callable[..., Any],
    inputs: Collection[str],
    *,
    owner: str,
    ordered: bool,
    renamed: bool = True,
) -> CallBinding:
    """Return the binding of inputs to the parameters with the same names.

    With `renamed`, a single input can have a different name from the only required parameter, or
    from the first parameter if none is required. A function that takes all inputs in one
    `*parameter` has no names for them. The order of several inputs must then be declared.

    Args:
        owner: the name that errors show.
        ordered: whether the order of the inputs is declared.
        renamed: whether a single input can have a different name from its parameter.

    Raises:
        UserError: an input lacks a parameter of its name, a required parameter lacks an input, or
            the order is not declared.
    """
    parameters = inspect.signature(function).parameters
    named = _list_named(parameters)
    required = [name for name, parameter in named.items() if parameter.default is Parameter.empty]
    variadic = next(
        (name for name, p in parameters.items() if p.kind is Parameter.VAR_POSITIONAL), ""
    )
    if variadic and not required and not named.keys() & set(inputs):
        check_order(
            inputs, ordered=ordered, owner=owner, why=f"it takes all inputs in `*{variadic}`"
        )
        return CallBinding(
            positional=dict.fromkeys(inputs, variadic), keyword=(), variadic=variadic
        )
    if renamed and (only := _find_only(named, required, inputs)):
        return CallBinding(positional=dict.fromkeys(inputs, only), keyword=())
    if variadic and (unnamed := [name for name in inputs if name not in named]):
        raise UserError(
            f"{owner} has no input {unnamed[0]!r}",
            where=WHERE,
            why=f"it takes {_format_names(named)} by name, "
            f"and further inputs only by position, in `*{variadic}`",
            remedy="Wrap the model in a model whose call names each input, and export the wrapper.",
        )
    check_names(inputs, named, required=required, owner=owner)
    return _bind_by_name(named, inputs)


def _list_named(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return the parameters except `*parameter` and `**parameter`."""
    variadic_kinds = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind not in variadic_kinds
    }


def _bind_by_name(named: Mapping[str, Parameter], inputs: Collection[str]) -> CallBinding:
    """Bind inputs to the parameters of the same names, by keyword where possible."""
    positional = [
        name
        for name, parameter in named.items()
        if name in inputs and parameter.kind is Parameter.POSITIONAL_ONLY
    ]
    return CallBinding(
        positional={name: name for name in positional},
        keyword=tuple(name for name in inputs if name not in positional),
    )


def _find_only(
    named: Mapping[str, Parameter], required: Sequence[str], inputs: Collection[str]
) -> str:
    """Return the parameter that takes a single input with a different name.

    The result is empty if there is no such parameter.
    """
    if len(inputs) != 1 or len(required) > 1 or named.keys() & set(inputs):
        return ""
    only = next(iter(required or named), "")
    return only if only and named[only].kind is not Parameter.KEYWORD_ONLY else ""


def check_names(
    inputs: Collection[str],
    names: Collection[str],
    *,
    owner: str,
    required: Collection[str] | None = None,
) -> None:
    """Check that the model takes each input by its name, and that no name is missing.

    Raises:
        UserError: an input is not among `names`, or the inputs lack one of `required` (default:
            all).
    """
    unknown = [name for name in inputs if name not in names]
    missing = [name for name in (names if required is None else required) if name not in inputs]
    if not unknown and not missing:
        return
    listed = _format_names(names)
    remedy = _advise_names(names, [name for name in names if name in inputs or name in missing])
    if unknown:
        raise UserError(
            f"{owner} has no input {unknown[0]!r}",
            where=WHERE,
            why=f"it takes {listed or 'nothing by name'}",
            remedy=suggest(unknown[0], [name for name in names if name not in inputs], remedy),
        )
    remedy += f" For an input that is equal in all rows, set `values: {{{missing[0]}: VALUE}}`."
    raise UserError(
        f"{owner} also takes {missing[0]!r}", where=WHERE, why=f"it takes {listed}", remedy=remedy
    )


def _format_names(names: Collection[str]) -> str:
    more = ", …" if len(names) > _SHOWN else ""
    return f"{', '.join(list(names)[:_SHOWN])}{more}"


def _advise_names(names: Collection[str], needed: Sequence[str]) -> str:
    """Return the remedy that shows how to name the inputs.

    The model takes inputs with these `names`. The remedy lists the names in `needed`.
    """
    if not names:
        return "Name each input as a parameter, because names in `**kwargs` cannot be checked."
    example = ", ".join(f"{name}: ARRAY" for name in needed[:_SHOWN])
    shown = f": `inputs: {{{example}}}`" if example else ""
    return f"Give the inputs of every data set these names{shown}."


def check_order(inputs: Collection[str], *, ordered: bool, owner: str, why: str) -> None:
    """Check that the order of the inputs is declared if there are several.

    `owner` and `why` are parts of the error.

    Raises:
        UserError: the order is not declared.
    """
    if len(inputs) < 2 or ordered:
        return
    raise UserError(
        f"{owner} takes {len(inputs)} inputs by position, and their order is not declared",
        where=WHERE,
        why=why,
        # The remedy does not list the names in the data. A user who copies these names would
        # declare the order of the data, which can differ from that of the model.
        remedy="List the inputs in the order of the model in every data set: `columns: [FIRST, "
        "SECOND]` for a table, `inputs: {FIRST: ARRAY, SECOND: ARRAY}` for arrays.",
    )
