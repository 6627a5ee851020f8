"""What every test has: the division of the suite over workers and commits, and the servers that folders share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from unittest.mock import patch

import pytest
import typer.main
import typer.testing  # it is patched

pytest_plugins = (
    "tests.support.entry_points",
    "tests.support.suite",
    "tests.support.golden",
    "tests.support.processor",
)


@pytest.fixture(scope="session", autouse=True)
def commands_built_once() -> Iterator[None]:
    """A program builds its command line once; the tests of it would at every call."""
    built = cache(typer.main.get_command)
    with patch("typer.main.get_command", built), patch("typer.testing._get_command", built):
        yield


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API of a Prefect server with a password, for all tests that this worker runs."""
    from tests.e2e.prefect_site import served

    with served(tmp_path_factory.mktemp("prefect-server")) as api:
        yield api
