"""Bindings of inputs to the parameters of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from onnx_ops.adapters.exporters.input_binding import bind_call
from onnx_ops.errors import UserError


def pair(user: Any, item: Any) -> Any:
    return user, item


def optional(x: Any, mask: Any = None, *, scale: Any = None) -> Any:
    return x, mask, scale


def keyword_only(*, x: Any) -> Any:
    return x


def positional_only(a: Any, b: Any, /, c: Any = None) -> Any:
    return a, b, c


def variadic(*tensors: Any) -> Any:
    return tensors


def variadic_and_named(*tensors: Any, mask: Any = None) -> Any:
    return tensors, mask


def named_and_variadic(x: Any, *rest: Any, **others: Any) -> Any:
    return x, rest, others


@pytest.mark.parametrize(
    ("function", "inputs", "answer"),
    [
        (pair, "item user", ("user", "item")),
        (pair, "user item", ("user", "item")),
        (optional, "x", ("x", None, None)),
        (optional, "image", ("image", None, None)),
        (optional, "scale x", ("x", None, "scale")),
        (optional, "mask x", ("x", "mask", None)),
        (keyword_only, "x", "x"),
        (positional_only, "c b a", ("a", "b", "c")),
        (positional_only, "b a", ("a", "b", None)),
        (variadic, "z a", ("z", "a")),
        (variadic_and_named, "z a", (("z", "a"), None)),
        (variadic_and_named, "mask", ((), "mask")),
        (named_and_variadic, "x", ("x", (), {})),
    ],
)
def test_bind_call_passes_inputs_by_name_or_single_and_variadic_inputs_by_position(
    function: Callable[..., Any], inputs: str, answer: Any
) -> None:
    names = inputs.split()
    binding = bind_call(function, names, owner="it", ordered=True)
    positional, keyword = binding.pack({name: name for name in names})
    assert function(*positional, **keyword) == answer
    assert sorted(binding.names) == sorted(names)


@pytest.mark.parametrize(
    ("function", "inputs", "message"),
    [
        (pair, "user", r"it also takes 'item'.*values: {item: VALUE}"),
        (pair, "user itm", "it has no input 'itm'.*Did you mean 'item'"),
        (
            pair,
            "left right",
            r"no input 'left' .it takes user, item..*inputs: {user: ARRAY, item: ARRAY}",
        ),
        (pair, "user item extra", "it has no input 'extra'"),
        (optional, "mask", "it also takes 'x'"),
        (optional, "image mask", "it has no input 'image'"),
        (keyword_only, "image", "it has no input 'image'"),
        (variadic, "a b", "takes 2 inputs by position, and their order is not declared"),
        (variadic_and_named, "a mask", "it has no input 'a'"),
        (
            named_and_variadic,
            "x y",
            r"it has no input 'y'.*x by name, and further inputs only by position.*Wrap the model",
        ),
        (lambda **inputs: inputs, "x y", "Name each input as a parameter"),
    ],
)
def test_bind_call_with_unmatched_or_unordered_inputs_raises_user_error(
    function: Callable[..., Any], inputs: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        bind_call(function, inputs.split(), owner="it", ordered=False)


def test_bind_call_without_renaming_refuses_single_input_of_other_name() -> None:
    with pytest.raises(UserError, match="it has no input 'image'"):
        bind_call(optional, ["image"], owner="it", ordered=True, renamed=False)


def test_binding_by_parameter_returns_values_by_parameter_name_and_variadic_tuple() -> None:
    values = {"a": 1, "z": 2}
    assert bind_call(variadic, ["z", "a"], owner="it", ordered=True).by_parameter(values) == {
        "tensors": (2, 1)
    }
    assert bind_call(optional, ["a"], owner="it", ordered=True).by_parameter(values) == {"x": 1}
