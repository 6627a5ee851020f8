from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.config.yaml_reader import MAX_BYTES, plain_scalar, read_file, read_text
from onnx_ops.errors import ConfigError, NotFoundError, UserError
from tests.support.golden import Golden


def value(text: str) -> Any:
    document = read_text(text, source="x.yaml")
    assert not document.issues
    return document.value


def refusals(text: str) -> list[str]:
    """Return the problems of a text, whether it was refused completely or in parts."""
    try:
        document = read_text(text, source="x.yaml")
    except ConfigError as error:
        return str(error).splitlines()
    return [str(document.problem(finding)) for finding in document.issues]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        *((word, word) for word in ("no", "yes", "on", "off", "No", "YES", "y", "n")),
        ("10:30", "10:30"),
        ("2024-01-02", "2024-01-02"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("=", "="),
        ("1e-3", 0.001),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-2.", -2.0),
        ("0", 0),
        ("-7", -7),
        ("+7", 7),
        ("0o17", 15),
        ("0xff", 255),
        ("true", True),
        ("False", False),
        ("tRue", "tRue"),
        ("~", None),
        ("", None),
        ("null", None),
        ("'012'", "012"),
        ('"true"', "true"),
    ],
)
def test_read_text_of_scalar_follows_yaml_1_2(written: str, expected: object) -> None:
    result = value(f"k: {written}")["k"]
    assert result == expected
    assert type(result) is type(expected)


TRAPS = (
    "a: 012",
    "a: [-007]",
    "a: 00",
    "a: .nan",
    "a: -.inf",
    "a: 1e999",
    "a: 12345678901234567890",
    "a: " + "9" * 5000,
    "a: 1\nb: 2\na: 3",
    "a: {b: 1, 'b': 2}",
    "a: !!python/object/apply:os.system [id]",
    "a: !!str 5",
    "!own k: 5",
    "a: &x {b: 1}\nc: {<<: *x}",
    "? [1, 2]\n: 3",
    "true: 3",
    "a: 1\n---\nb: 2",
    "a:\n\tb: 1",
    "a:\n  b: 1\n c: 2",
    "a: [1",
    "a: *b",
    "a: b\nc: \0",
)


def test_read_text_with_ambiguous_or_invalid_yaml_reports_its_place(golden: Golden) -> None:
    lines = []
    for text in TRAPS:
        (problem,) = refusals(text)
        lines.append(f"{text[:60]!r}\n    {problem}")
    golden("errors", "\n".join(lines))


def test_read_text_with_several_problems_reports_all() -> None:
    assert len(refusals("a: 012\nb: .inf\na: 1\nc: !!int 3")) == 4


def test_read_text_with_aliases_returns_separate_values() -> None:
    result = value("a: &x {b: [1]}\nc: *x")
    assert result == {"a": {"b": [1]}, "c": {"b": [1]}}
    assert result["a"] is not result["c"]


def test_read_text_of_alias_bomb_reports_limit_of_values() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    (problem,) = refusals("\n".join(lines))
    assert "20000 values" in problem


@pytest.mark.parametrize("text", ["&a [*a]", "[" * 5000, "&a {b: *a}", "- " * 5000, "{a: " * 5000])
def test_read_text_with_deep_or_recursive_nesting_reports_limit_of_levels(text: str) -> None:
    (problem,) = refusals(text)
    assert "40 levels" in problem


def test_read_text_with_too_many_values_reports_limit_of_values() -> None:
    (problem,) = refusals("- a\n" * 30_000)
    assert "more than 20000 values" in problem


def test_read_file_with_invalid_utf_8_reports_position(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(
        ConfigError, match=r"x\.yaml:2:4: this byte is not UTF-8; save the file as UTF-8"
    ):
        read_file(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_read_file_in_utf_16_suggests_conversion_but_not_for_binary_data(
    tmp_path: Path, encoding: str
) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes((b"\xfe\xff" if encoding == "utf-16-be" else b"") + "a: 1\n".encode(encoding))
    with pytest.raises(UserError) as caught:
        read_file(path)
    assert caught.value.what == "the file is in UTF-16"
    assert "iconv -f UTF-16" in caught.value.remedy
    path.write_bytes(b"\0")
    with pytest.raises(UserError) as binary:
        read_file(path)
    assert "x.yaml" not in binary.value.remedy


def test_read_file_with_byte_order_mark_ignores_it(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_file(path).value == {"a": 1}


def test_read_file_above_size_limit_raises_config_error(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        read_file(path)


def test_read_file_that_is_missing_suggests_similar_name(tmp_path: Path) -> None:
    (tmp_path / "digits.yaml").touch()
    with pytest.raises(NotFoundError, match=r"no such file\. Did you mean .*digits\.yaml\?"):
        read_file(tmp_path / "digit.yaml")


def test_read_file_of_folder_raises_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a folder, not a file"):
        read_file(tmp_path)


@given(st.integers(-(2**63), 2**63 - 1))
def test_plain_scalar_of_integer_text_returns_integer(number: int) -> None:
    assert plain_scalar(str(number)) == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_plain_scalar_of_float_text_returns_float(number: float) -> None:
    result = plain_scalar(repr(number))
    assert isinstance(result, float)
    assert math.copysign(1, result) == math.copysign(1, number)
    assert result == number


@given(st.text(max_size=40))
def test_read_text_of_any_text_returns_value_or_located_problems(text: str) -> None:
    assert all(problem.startswith("x.yaml:") for problem in refusals(text))


def test_read_file_of_missing_pipeline_suggests_existing_pipelines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "configs" / "pipelines"
    folder.mkdir(parents=True)
    (folder / "digits.yaml").touch()
    (tmp_path / "prefect.yaml").touch()
    monkeypatch.chdir(tmp_path)
    for name, remedy in (
        ("digit.yaml", "Did you mean {}?"),
        ("digits", "Did you mean {}?"),
        ("nope.yaml", "Pipeline files here: {}"),
    ):
        with pytest.raises(NotFoundError) as missing:
            read_file(Path(name))
        assert missing.value.remedy == remedy.format("configs/pipelines/digits.yaml")
