"""`make demo`: three releases under load, and two rollbacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.e2e_project import make_project
from tests.support.processes import ROOT


@pytest.mark.nightly
def test_demo_script_finishes_one_canary_and_rolls_back_twice(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    (tmp_path / "configs/pipelines/digits-mlp.yaml").write_bytes(
        (ROOT / "configs/pipelines/digits-mlp.yaml").read_bytes()
    )
    try:
        demo = [sys.executable, "examples/demo.py"]
        done = subprocess.run(
            demo,
            cwd=tmp_path,
            env=project.environment(),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        moved = [
            {name: share for name, share in line["traffic"].items() if share}
            for line in project.document("history", "digits", "--traffic")
        ]
    finally:
        project.stop_endpoints()
    # On a slow machine, the slow version can reach the second step before it is rolled back.
    assert [shares for shares in moved if shares != {"v4": 50, "v7": 50}] == [
        {"v1": 100},
        {"v1": 90, "v4": 10},
        {"v1": 50, "v4": 50},
        {"v4": 100},
        {"v4": 90, "v7": 10},
        {"v4": 100},
        {"v1": 100},
    ]
