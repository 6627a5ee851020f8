"""Addresses that are pinned to their content."""

from __future__ import annotations

import pytest

from onnx_ops.domain.pinned_address import (
    HubAddress,
    WebAddress,
    find_pin_problem,
    hide_secrets,
    is_pinned_address,
    parse_pinned_address,
)

PIN = f"#sha256={'0' * 64}"
COMMIT = "0123456789" * 4


def test_parse_pinned_address_of_web_file_returns_name_and_digest() -> None:
    address = parse_pinned_address(f"https://host.example/a/my%20model.onnx?sig=x{PIN}")
    assert address == WebAddress(
        url="https://host.example/a/my%20model.onnx?sig=x",
        host="host.example",
        name="my model.onnx",
        sha256="0" * 64,
    )


def test_parse_pinned_address_of_hub_returns_repository_commit_and_path() -> None:
    assert parse_pinned_address(f"hf://datasets/o/n@{COMMIT}/a/b.csv") == HubAddress(
        repository="o/n", is_dataset=True, commit=COMMIT, path="a/b.csv"
    )
    assert parse_pinned_address(f"hf://o/n@{COMMIT}") == HubAddress(
        repository="o/n", is_dataset=False, commit=COMMIT, path=""
    )


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("https://host.example/model.onnx", "does not pin the content"),
        ("https://host.example/model.onnx#sha256=12", "it ends with 'sha256=12'"),
        ("https://host.example/model.onnx#sha256=12", "in place of any other fragment"),
        (f"https://host.example/{PIN}", "names no file"),
        (f"http://host.example/m.onnx{PIN}", "must begin with https://"),
        (f"https://[half/m.onnx{PIN}", "not valid"),
        ("hf://o/n/model.onnx", "hf://o/n@COMMIT/model.onnx"),
        ("hf://o/n@main/model.onnx", "revision 'main' can change"),
        ("hf://datasets/o/n@v1", "hf://datasets/o/n@COMMIT"),
        (f"hf://o/n@{COMMIT}/../x", "the address of the Hugging Face hub is not valid"),
        ("hf://o", "the address of the Hugging Face hub is not valid"),
    ],
)
def test_find_pin_problem_of_wrong_address_names_cause_or_remedy(place: str, problem: str) -> None:
    assert is_pinned_address(place)
    assert problem in find_pin_problem(place)


@pytest.mark.parametrize(
    "place", ["models/m.onnx", "models:/m/1", "s3://b/m.onnx", f"https://h.example/m.onnx{PIN}"]
)
def test_find_pin_problem_of_pinned_or_other_address_is_empty(place: str) -> None:
    assert find_pin_problem(place) == ""


@pytest.mark.parametrize(
    "place", ["https://u:secret@h.example/m?x=secret", "https://u:secret@[h?secret"]
)
def test_hide_secrets_removes_query_and_password(place: str) -> None:
    assert "secret" not in hide_secrets(place)
