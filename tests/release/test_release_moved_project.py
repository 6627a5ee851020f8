"""A project whose folder is moved.

It serves, is restored and is rolled back without a change to its ledger.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from onnx_ops.adapters.endpoints.local import LocalEndpoints
from onnx_ops.protocol.server_process import LOCK_FILE, list_workers
from onnx_ops.release.promote import promote
from onnx_ops.release.reconcile import reconcile_until_stable
from onnx_ops.testing.endpoints import EndpointProviderSuite
from tests.release.release_parts import roll_back
from tests.release.test_release_attacks import ENDPOINT, MODEL, TARGET, Site


def kill_server(folder: Path) -> None:
    """Kill the supervisor and the workers of an endpoint's folder."""
    for pid in (int((folder / LOCK_FILE).read_text()), *list_workers(folder)):
        os.kill(pid, signal.SIGKILL)
    while list_workers(folder):
        pass


@pytest.mark.parametrize(
    "case", ["running", pytest.param("killed", marks=pytest.mark.nightly), "without its endpoints"]
)
def test_moved_project_serves_same_version_and_rolls_back(tmp_path: Path, case: str) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    site = Site(old, real=True)
    try:
        site.publish(5)
        promote(site.context, MODEL, "5", TARGET)
        reconcile_until_stable(site.context, ENDPOINT)
        assert site.serving() == {"v5": 100}
        # Entries contain no folder, except for the origin of the ledger, which is for people to
        # read.
        origin = f'"place":"{old}/ledger"'
        texts = [
            path.read_text().replace(origin, "") for path in (old / "ledger" / ENDPOINT).iterdir()
        ]
        assert not any(str(old) in text for text in texts)
        if case != "running":
            kill_server(old / "endpoints" / ENDPOINT)
        old.rename(new)
        site.root, site.local = new, LocalEndpoints(new / "endpoints", new / "keys")
        if case == "without its endpoints":
            shutil.rmtree(new / "endpoints")
        reports = reconcile_until_stable(site.context, ENDPOINT)
        assert ("restore" in [report.did for report in reports]) == (case != "running")
        assert site.serving() == {"v5": 100}
        roll_back(site.context, ENDPOINT, reason="it is slow")
        assert site.serving() == {"v1": 100}
        assert EndpointProviderSuite().scale(str(site.local.address(site.config))) == 1.0
        assert not old.exists()
    finally:
        site.local.stop(site.config)
