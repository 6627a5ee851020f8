"""A console that tests of one module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.console.console_parts import Console, serving_console
from tests.release.release_scenes import on_trial


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with serving_console(tmp_path_factory.mktemp("console"), on_trial().context) as console:
        yield console
