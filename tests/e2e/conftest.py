"""Projects for the tests that run the real commands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.e2e_project import Project, Releases, make_project
from tests.e2e.prefect_site import served


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project for one module; its tests run in order and may build on each other."""
    made = make_project(tmp_path_factory.mktemp("project"))
    yield made
    made.stop_endpoints()


@pytest.fixture
def fresh_project(tmp_path: Path) -> Iterator[Project]:
    made = make_project(tmp_path)
    yield made
    made.stop_endpoints()


@pytest.fixture(scope="session")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Releases:
    """Projects that have released, made once for all workers of pytest-xdist."""
    own = tmp_path_factory.getbasetemp()
    return Releases((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "releases")


@pytest.fixture(scope="module")
def released(releases: Releases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project for one module, whose endpoint `digits` serves its first release (`Releases.once`)."""
    made = releases.once(tmp_path_factory.mktemp("released"))
    made.serve()
    yield made
    made.stop_endpoints()


@pytest.fixture
def once(releases: Releases, tmp_path: Path) -> Iterator[Project]:
    """A project whose endpoint `digits` serves its first release."""
    made = releases.once(tmp_path / "once")
    made.serve()
    yield made
    made.stop_endpoints()


@pytest.fixture
def twice(releases: Releases, tmp_path: Path) -> Iterator[Project]:
    """A project whose endpoint `digits` serves its second release, and served the first."""
    made = releases.twice(tmp_path / "twice")
    made.serve()
    yield made
    made.stop_endpoints()


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API of a Prefect server with a password, for all tests that this worker runs."""
    with served(tmp_path_factory.mktemp("prefect-server")) as api:
        yield api
