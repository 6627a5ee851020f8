"""A ledger that cannot be written.

Commands report the problem, a copy continues the ledger, and its entries are put back later.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from onnx_ops.adapters.files import LocalObjects
from onnx_ops.errors import OnnxOpsError, StorageError
from tests.release.disk_scenes import STATE, on_disk
from tests.release.release_parts import Scene
from tests.release.release_scenes import serving


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """Return an endpoint with a previous version, whose files are below `project`."""
    with on_disk(tmp_path / "project"):
        return serving("a", "b")


def test_roll_back_with_read_only_ledger_names_runbook(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bool:
        raise StorageError(
            "a file or folder is not accessible", why="[Errno 30] Read-only file system"
        )

    before = dict(scene.traffic())
    monkeypatch.setattr(LocalObjects, "create", refuse)
    with pytest.raises(StorageError, match="runbooks/ledger-read-only"):
        scene.roll_back()
    assert dict(scene.traffic()) == before


def test_rollback_in_copied_ledger_remains_after_merge_into_original(
    scene: Scene, tmp_path: Path
) -> None:
    ledger, aside, copy = (
        tmp_path / "project" / STATE / name for name in ("ledger", "original", "copy")
    )
    assert scene.traffic()["v2"] == 100
    shutil.copytree(ledger, aside)
    # This rollback is recorded in the folder that becomes the copy below.
    scene.roll_back()
    assert scene.traffic()["v1"] == 100
    ledger.rename(copy)
    aside.rename(ledger)
    scene.restart()
    with pytest.raises(OnnxOpsError, match="lost entries"):
        scene.reconcile()
    assert scene.traffic()["v1"] == 100
    for entry in copy.rglob("*.jsonl"):
        place = ledger / entry.relative_to(copy)
        if not place.exists():
            shutil.copy(entry, place)
    scene.restart()
    scene.reconcile()
    assert scene.traffic()["v1"] == 100
