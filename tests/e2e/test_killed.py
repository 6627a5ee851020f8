"""kill -9 of a run during every stage.

The next run continues from the finished stages.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.ledgers.chain import LedgerKeys
from onnx_ops.adapters.ledgers.log import ObjectLedger
from onnx_ops.attestation import TrustedKeys
from onnx_ops.domain.ledger import ActionOutcome, Intent, fold
from tests.e2e.e2e_project import MLP, ONLY_FP32, SECOND, Project
from tests.support.suite import Sweep

pytestmark = pytest.mark.services

OVERRIDES = ("--set", ONLY_FP32)


def killed_run(project: Project, stage: str, *overrides: str) -> bool:
    """Start a run, and kill it with all its processes when it begins a stage.

    Return whether the run reached the stage.
    """
    with project.start("run", MLP, *OVERRIDES, *overrides) as process:
        for line in process.stderr or ():
            if line.startswith("[") and f"] {stage} " in line:
                os.killpg(process.pid, signal.SIGKILL)
                return True
    return False


def stages(project: Project) -> list[str]:
    planned = project.document("plan", MLP, *OVERRIDES)
    return [entry["stage"] for entry in planned["stages"]]


def check_ledger(root: Path) -> None:
    """Assert that no intent is open and that one first deployment succeeded."""
    trusted = TrustedKeys(root / ".onnx-ops" / "keys", role="release")
    ledger = ObjectLedger(
        LocalObjects(root / ".onnx-ops" / "ledger"), LedgerKeys(lambda: trusted, lambda: None)
    )
    entries = ledger.read("digits")
    assert fold("digits", entries).open_intent is None
    done = {e.body.of for e in entries if isinstance(e.body, ActionOutcome) and e.body.ok}
    intents = [e for e in entries if isinstance(e.body, Intent) and e.sequence in done]
    kinds = [e.body.action.kind.value for e in intents if isinstance(e.body, Intent)]
    assert kinds.count("first-deployment") == 1


@pytest.mark.nightly
def test_run_killed_in_each_stage_continues_from_finished_stages(
    fresh_project: Project, sweep: Sweep
) -> None:
    names = stages(fresh_project)
    assert names[-1] == "deploy/digits"
    for stage in sweep(names):
        assert killed_run(fresh_project, stage), f"{stage} did not begin"
        foreseen = fresh_project.document("plan", MLP, *OVERRIDES)
        would = {entry["stage"]: entry["would"] for entry in foreseen["stages"]}
        finished = [
            name
            for name in names[: names.index(stage)]
            if not name.startswith(("promote", "deploy"))
        ]
        assert {would[name] for name in finished} <= {"unchanged"}, f"killed in {stage}: {would}"
    ended = fresh_project.run(ONLY_FP32)
    assert set(ended["executed"]) <= {"register", "promote@cpu-1t", "deploy/digits"}
    assert ended["registration"]["versions"] == {"fp32": "1"}
    status = fresh_project.status()
    assert status["traffic"] == {"v1": 100}
    assert status["registry_pending"] == {}
    check_ledger(fresh_project.root)
    assert fresh_project.run(ONLY_FP32)["executed"] == []


@pytest.mark.nightly
def test_run_killed_during_deploy_is_completed_by_next_run(once: Project) -> None:
    assert killed_run(once, "deploy/digits", "--set", SECOND)
    ended = once.run(ONLY_FP32, SECOND)
    version = ended["registration"]["versions"]["fp32"]
    status = once.status()
    assert status["roles"]["stable"]["version"] == version
    assert status["roles"]["previous"]["version"] == "1"
    assert status["traffic"] == {f"v{version}": 100, "v1": 0}
    check_ledger(once.root)
