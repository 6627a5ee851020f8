"""Projects for the tests that run the real commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.e2e_project import Project, make_project


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
