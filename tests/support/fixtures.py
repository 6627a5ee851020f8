"""Fixtures of conformance suites, in one line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def fixed(value: object) -> Any:
    """Return a fixture of a class that always has this value."""
    return pytest.fixture(lambda _: value)


def made(make: Callable[[], object]) -> Any:
    """Return a fixture of a class whose value a function makes for each test.

    The function may import packages that take long to import.
    """
    return pytest.fixture(lambda _: make())
