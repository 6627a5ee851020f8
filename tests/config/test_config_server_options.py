"""Options of plugins and options of the server, which use the same binder."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.config.binding import OptionsError, bind_options
from onnx_ops.config.server_options import format_flags, format_option_variables, list_options
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import Problem
from onnx_ops.protocol.server_process import ContainerOptions, ServerOptions

OPTIONS = st.builds(
    ServerOptions,
    workers=st.integers(1, 9),
    deadline=st.floats(0.001, 3600),
    endpoint=st.text("ab"),
    prepack=st.just(0),
)


def bind_server_options(given: Mapping[str, Json]) -> ServerOptions:
    return bind_options(given, ServerOptions, where="digits")


def test_list_options_describes_each_server_option() -> None:
    assert [name for name, _, _, _ in list_options()] == [f.name for f in fields(ServerOptions)]
    assert all(text and kind in (int, str) for _, kind, _, text in list_options())
    assert bind_server_options({}) == ServerOptions()


@given(OPTIONS)
def test_format_flags_preserves_options_and_format_option_variables_omits_defaults(
    options: ServerOptions,
) -> None:
    parser = argparse.ArgumentParser()
    for name, kind, default, _ in list_options():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    assert bind_server_options(vars(parser.parse_args(format_flags(options)))) == options
    variables = format_option_variables(ContainerOptions(max_body=1 << 20, workers=2, queue=128))
    assert variables == {"ONNX_OPS_SERVE_MAX_BODY": "1 MiB", "ONNX_OPS_SERVE_WORKERS": "2"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"worker": 2}, "digits: unknown key 'worker'; did you mean 'workers'?"),
        (
            {"workers": "2"},
            "digits: workers: expected a whole number, got the string '2'; leave out the quotes",
        ),
        ({"workers": True}, "digits: workers: expected a whole number, got true"),
        ({"workers": 0}, "digits: workers: must be at least 1, got the number 0"),
        (
            {"deadline": 5},
            (
                "digits: deadline: expected a duration, got the number 5; write it with a unit, "
                "e.g. 5 ms"
            ),
        ),
        ({"deadline": "3601 s"}, "digits: deadline: must be at most 1 h, got the string '3601 s'"),
        (
            {"workers": 0, "queue": "x"},
            "must be at least 1, got the number 0; queue: expected a whole number",
        ),
    ],
)
def test_bind_server_options_with_wrong_options_reports_each_problem(
    options: dict[str, Json], message: str
) -> None:
    with pytest.raises(OptionsError) as caught:
        bind_server_options(options)
    assert message in str(caught.value)
    assert len(caught.value.issues) == len(options)


def test_load_pipeline_with_wrong_server_options_reports_their_places(
    find_problems: Callable[..., tuple[Problem, ...]], pipeline_text: str
) -> None:
    options = "{max_body: 1 MB, deadline: 5, read_timeout: 1 week, worker: 2}"
    text = pipeline_text.replace("{endpoint: toy,", f"{{endpoint: toy, options: {options},")
    problems = find_problems(
        text,
        plugins={"endpoints": ("local",)},
        options=lambda _, given: bind_options(given, ServerOptions),
    )
    line = text.splitlines()[-1]
    assert [(problem.path, problem.column) for problem in problems] == [
        ("deploy[0].options.deadline", line.index("5,") + 1),
        ("deploy[0].options.read_timeout", line.index("1 week") + 1),
        ("deploy[0].options", line.index("worker") + 1),
    ]
