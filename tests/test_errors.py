"""Errors as documents, and documents as errors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnx_ops import errors
from onnx_ops.errors import ConfigError, OnnxOpsError, Problem, config_error, from_document, quoted

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(kind, OnnxOpsError)
    and not issubclass(kind, ConfigError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_error_document_round_trip_keeps_kind_and_text(kind: type[OnnxOpsError]) -> None:
    error = kind("it broke", where="here", why="age", remedy="Mend it.")
    again = from_document(error.as_document())
    assert type(again) is kind
    assert again.as_document() == error.as_document()
    assert str(error) == str(again) == "here: it broke (age). Mend it."


def test_error_exit_codes_separate_user_environment_and_refusal() -> None:
    by_code: dict[int, set[str]] = {}
    for kind in KINDS:
        by_code.setdefault(kind.exit_code, set()).add(kind.__name__)
    assert by_code.keys() == {2, 4, 5}
    assert by_code[2] == {"UserError", "NotFoundError", "TooLargeError"}
    assert by_code[5] == {"RefusedError", "InvalidSignatureError", "DigestMismatchError"}


def test_errors_docstring_names_each_error() -> None:
    assert errors.__doc__ is not None
    assert all(kind.__name__ in errors.__doc__ for kind in KINDS)


PROBLEMS = (
    Problem(file="p.yaml", line=3, column=1, path="gates[0]", message="unknown"),
    Problem(file="p.yaml", line=0, column=0, path="", message="empty"),
)


def test_config_error_lists_problems_in_order_and_survives_round_trip() -> None:
    error = ConfigError(PROBLEMS)
    assert str(error) == "p.yaml: empty\np.yaml:3:1: gates[0]: unknown"
    again = from_document(error.as_document())
    assert isinstance(again, ConfigError)
    assert again.problems == error.problems
    assert again.exit_code == 2


def test_config_error_of_environment_problems_only_has_exit_code_4() -> None:
    missing = replace(PROBLEMS[0], environment=True)
    for problems, code in (((missing,), 4), ((missing, PROBLEMS[1]), 2)):
        error = config_error(problems)
        assert (error.exit_code, from_document(error.as_document()).exit_code) == (code, code)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"error": "Problem"},
        {"error": "dataclass", "what": 3},
        {"error": "ConfigError", "problems": [{"file": 1}]},
    ],
)
def test_from_document_of_unknown_document_returns_error(document: dict[str, object]) -> None:
    assert isinstance(from_document(document), OnnxOpsError)


def test_quoted_of_error_returns_one_line_or_class_name() -> None:
    assert quoted(ValueError("  two\n  lines ")) == "two lines"
    assert quoted(ValueError()) == "ValueError"


def test_quoted_of_long_text_cuts_between_words() -> None:
    cut = quoted(" ".join(f"word{n}" for n in range(900)))
    assert len(cut) <= 2010
    assert set(cut.replace("…", "").split()) <= {f"word{n}" for n in range(900)}
    assert cut.startswith("word0 ")
    assert cut.endswith(" word899")
