"""What every test has: the division of the suite over workers and commits, and the servers that folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest_plugins = ("tests.support.suite", "tests.support.golden")


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API of a Prefect server with a password, for all tests that this worker runs."""
    from tests.e2e.prefect_site import served

    with served(tmp_path_factory.mktemp("prefect-server")) as api:
        yield api
