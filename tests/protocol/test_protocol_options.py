from __future__ import annotations

import argparse
import math
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.errors import UserError
from onnx_ops.protocol.options import ServerOptions, described, flags, options_of


def test_every_option_is_described() -> None:
    assert [name for name, _, _, _ in described()] == [f.name for f in fields(ServerOptions)]
    assert all(text and kind in (int, float, str) for _, kind, _, text in described())
    assert options_of({}) == ServerOptions()


@given(st.builds(ServerOptions, workers=st.integers(1, 9), deadline=st.floats(0.001, 3600), endpoint=st.text("ab")))
def test_what_is_said_on_the_command_line_is_understood(options: ServerOptions) -> None:
    parser = argparse.ArgumentParser()
    for name, kind, default, _ in described():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    assert options_of(vars(parser.parse_args(flags(options)))) == options


def test_whole_numbers_are_times_too() -> None:
    assert options_of({"deadline": 5}).deadline == 5.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"worker": 2}, "no setting 'worker'"),
        ({"workers": "2"}, "workers must be of type int, not '2'"),
        ({"workers": True}, "workers must be of type int"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"workers": 1000}, "workers must be at most 256"),
        ({"deadline": float("nan")}, "deadline must be at least"),
        ({"access_log": 1}, "access_log must be of type str"),
    ],
)
def test_what_cannot_be_used_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        options_of(settings, where="digits")
    assert message in str(caught.value)
    assert str(caught.value).startswith("digits: ")


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("workers", 1, 256), ("drain", 0, 3600), ("deadline", 0.001, 3600.0), ("keep_alive", 0.1, 3600.0)],
)
def test_limits_are_the_last_values_that_are_accepted(name: str, low: float, high: float) -> None:
    for limit, direction in ((low, -1), (high, 1)):
        assert getattr(options_of({name: limit}), name) == limit
        beyond = limit + direction if isinstance(limit, int) else math.nextafter(limit, direction * math.inf)
        with pytest.raises(UserError):
            options_of({name: beyond})


def test_a_name_that_is_nearly_right_is_suggested() -> None:
    with pytest.raises(UserError) as caught:
        options_of({"prot": 1}, others=("port",))
    assert caught.value.remedy == "Did you mean 'port'?"
