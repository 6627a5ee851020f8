"""Checks that a value exists, for tests that read it."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def must(value: T | None) -> T:
    assert value is not None
    return value
