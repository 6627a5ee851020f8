"""Fixtures of conformance suites, in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def fixed(value: object) -> Any:
    """A fixture of a class that is always this value."""
    return pytest.fixture(lambda _: value)


def made(make: Callable[[], object]) -> Any:
    """A fixture of a class that is made anew by a function, which may import what is slow to import."""
    return pytest.fixture(lambda _: make())
