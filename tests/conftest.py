"""Fixtures and hooks for every test.

They divide the suite over workers and commits, and start the servers that folders share.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from unittest.mock import patch

import pytest
import typer.main
import typer.testing  # The fixture below patches this module.

pytest_plugins = (
    "tests.support.entry_points",
    "tests.support.suite",
    "tests.support.golden",
    "tests.support.processor",
)


@pytest.fixture(scope="session", autouse=True)
def commands_built_once() -> Iterator[None]:
    """Build the command line once per session.

    A program builds it once, but each call in a test would build it again.
    """
    built = cache(typer.main.get_command)
    with patch("typer.main.get_command", built), patch("typer.testing._get_command", built):
        yield


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the API of a Prefect server with a password, for all tests of this worker."""
    from tests.e2e.prefect_site import served

    with served(tmp_path_factory.mktemp("prefect-server")) as api:
        yield api
