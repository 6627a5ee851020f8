"""Projects for the tests that run the real commands."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.e2e_project import Project, Releases, make_project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Yield a project for one module.

    Its tests run in order and can build on each other.
    """
    with _stopped_at_the_end(make_project(tmp_path_factory.mktemp("project"))) as made:
        yield made


@pytest.fixture
def fresh_project(tmp_path: Path) -> Iterator[Project]:
    with _stopped_at_the_end(make_project(tmp_path)) as made:
        yield made


@pytest.fixture(scope="session")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Releases:
    """Return projects that have released, made once for all workers of pytest-xdist."""
    own = tmp_path_factory.getbasetemp()
    return Releases((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "releases")


@pytest.fixture(scope="module")
def released(releases: Releases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Yield a project for one module.

    Its endpoint `digits` serves its first release (`Releases.once`).
    """
    with _stopped_at_the_end(releases.once(tmp_path_factory.mktemp("released"))) as made:
        made.serve()
        yield made


@pytest.fixture
def once(releases: Releases, tmp_path: Path) -> Iterator[Project]:
    """Yield a project whose endpoint `digits` serves its first release."""
    with _stopped_at_the_end(releases.once(tmp_path / "once")) as made:
        made.serve()
        yield made


@pytest.fixture
def twice(releases: Releases, tmp_path: Path) -> Iterator[Project]:
    """Yield a project whose endpoint `digits` serves its second release.

    It has served the first release before.
    """
    with _stopped_at_the_end(releases.twice(tmp_path / "twice")) as made:
        made.serve()
        yield made


@contextlib.contextmanager
def _stopped_at_the_end(made: Project) -> Iterator[Project]:
    """Stop a project's endpoints at the end, also after a failed set-up."""
    try:
        yield made
    finally:
        made.stop_endpoints()
