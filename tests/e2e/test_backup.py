"""The page "Back up, move, restore", followed with the real commands."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.e2e_project import Project, Releases
from tests.support.command import PROGRAM

ENDPOINT = "digits"


def traffic(project: Project) -> dict[str, int]:
    """Return the share of requests for each deployment, as the endpoint reports it."""
    weights: dict[str, int] = project.status()["traffic"]
    return {name: share for name, share in weights.items() if share}


def test_moved_project_after_reconcile_serves_and_rolls_back(
    twice: Project, tmp_path: Path
) -> None:
    twice.stop_endpoints()
    moved = Project(twice.root.rename(tmp_path / "another name"), twice.environ)
    try:
        # The registry has copies of these models, which were moved with the project.
        shutil.rmtree(moved.root / ".onnx-ops" / "models")
        assert moved.command("reconcile", ENDPOINT).code == 0
        before = traffic(moved)
        assert sum(before.values()) == 100
        assert moved.command("rollback", ENDPOINT, "--reason", "slow").code == 0
        assert traffic(moved) != before
        assert moved.command("report", "digits-mlp/1").code == 0
        assert not twice.root.exists()
    finally:
        moved.stop_endpoints()


@pytest.mark.parametrize("forgets", [False, True])
def test_commands_with_older_ledger_backup_exit_4_until_adoption(
    twice: Project, forgets: bool
) -> None:
    ledger, backup = twice.root / ".onnx-ops" / "ledger", twice.root / "backup"
    shutil.copytree(ledger, backup)
    assert twice.command("rollback", ENDPOINT, "--reason", "wrong on sevens").code == 0
    twice.command("reconcile", ENDPOINT)
    shutil.rmtree(ledger)
    shutil.copytree(backup, ledger)
    for name in ("status", "reconcile"):
        refused = twice.command(name, ENDPOINT)
        assert (refused.code, refused.stderr.count("the ledger lost entries")) == (4, 1)
    refused = twice.command("rollback", ENDPOINT)
    assert (refused.code, refused.stderr.count("the ledger lost entries")) == (4, 1)
    seen = twice.root / ".onnx-ops" / "seen" / f"{ENDPOINT}.json"
    assert f"onnx-ops ledger adopt {ENDPOINT}` on a machine" in " ".join(refused.stderr.split())
    # A machine that has read only the older entries has no record of the newer ones, although the
    # endpoint has applied them.
    if forgets:
        seen.unlink()
        refused = twice.command("reconcile", ENDPOINT)
        assert (refused.code, "the endpoint has applied entry" in refused.stderr) == (4, True)
    adopted = twice.command("ledger", "adopt", ENDPOINT, "--yes", "--reason", "restored")
    shown = f"`onnx-ops rollback {ENDPOINT} --to 1 --reason" in adopted.stdout
    assert (adopted.code, shown) == (0, True)
    assert twice.command("reconcile", ENDPOINT).code == 0
    # The lost rollback is still in the registry: the champion's alias counts as a request of a
    # user.
    assert traffic(twice) == {"v1": 100}
    assert [twice.command(name, ENDPOINT).code for name in ("status", "history", "reconcile")] == [
        0,
        0,
        0,
    ]


def test_second_machine_can_delete_endpoint_only_after_admission_of_its_key(
    releases: Releases, twice: Project, tmp_path: Path
) -> None:
    other = releases.twice(tmp_path / "other machine")
    state = twice.root / ".onnx-ops"
    (other.root / "onnx-ops.toml").write_text(
        f'ledger = "{state}/ledger"\ntracking_uri = "sqlite:///{state}/mlflow.db"\nartifacts = '
        f'"{state}/mlartifacts"\n'
    )
    shutil.rmtree(other.root / ".onnx-ops" / "seen")
    shutil.rmtree(other.root / ".onnx-ops" / "endpoints", ignore_errors=True)
    keys = other.root / ".onnx-ops" / "keys"
    (keys / "signing.pem").unlink()
    (keys / "signing.pub.pem").rename(keys / "first.pub.pem")
    assert other.document("status", ENDPOINT, code=4)[0]["roles"] == twice.status()["roles"]
    assert other.command("keys", "new").code == 0
    refused = other.command("rollout", "advance", ENDPOINT)
    assert refused.code != 0
    deleted = other.command("delete", ENDPOINT, "--yes")
    assert (deleted.code, "could not sign it with a trusted key" in deleted.stderr) == (4, True)
    assert "does not accept this machine's signature" in other.command("doctor").stdout
    public = tmp_path / "other.pub.pem"
    public.write_text(other.command("keys", "public").stdout)
    assert twice.command("keys", "admit", str(public)).code == 0
    assert twice.command("keys", "admit", str(public)).code == 0
    assert "does not accept this machine's signature" not in other.command("doctor").stdout
    assert other.command("delete", ENDPOINT, "--yes", "--reason", "moved").code == 0
    history = twice.document("history", ENDPOINT)
    assert [line["kind"] for line in history[-2:]] == ["endpoint-deleted", "endpoint-deleted"]


def test_status_of_unreadable_ledger_exits_4_without_traceback(twice: Project) -> None:
    folder = twice.root / ".onnx-ops" / "ledger" / ENDPOINT
    folder.chmod(0)
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
    done = subprocess.run(
        [PROGRAM, "status", ENDPOINT],
        cwd=twice.root,
        env=twice.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=drop_rights if os.geteuid() == 0 else None,
    )
    folder.chmod(0o700)
    assert done.returncode == 4, done.stderr
    assert "Permission denied" in done.stderr
    assert "Traceback" not in done.stderr


def drop_rights() -> None:
    """Drop root's right to read the files of other users, for the next program."""
    for right in (1, 2):
        # 1 is CAP_DAC_OVERRIDE, 2 is CAP_DAC_READ_SEARCH, and 24 is PR_CAPBSET_DROP.
        ctypes.CDLL(None).prctl(24, right, 0, 0, 0)


def test_status_of_ledger_with_newer_schema_exits_4(twice: Project) -> None:
    entries = sorted((twice.root / ".onnx-ops" / "ledger" / ENDPOINT).glob("0*.jsonl"))
    signed, _, rest = entries[-1].read_bytes().partition(b"\n")
    document = json.loads(signed)
    document["entry"]["schema"] = 99
    entries[-1].write_bytes(json.dumps(document).encode() + b"\n" + rest)
    refused = twice.command("status", ENDPOINT)
    assert (refused.code, refused.stderr.count("A newer onnx-ops wrote the entry")) == (4, 1)


@pytest.mark.parametrize("has_key", [True, False])
def test_rollback_after_repair_of_damaged_ledger_moves_traffic(
    twice: Project, has_key: bool
) -> None:
    folder = twice.root / ".onnx-ops" / "ledger" / ENDPOINT
    last = sorted(folder.glob("0*.jsonl"))[-1]
    last.write_bytes(last.read_bytes()[:40])
    assert twice.command("rollback", ENDPOINT).code == 4
    if has_key:
        asked = twice.command("ledger", "adopt", ENDPOINT)
        assert (asked.code, "entries that would have no effect: 1" in asked.stdout) == (2, True)
        assert twice.command("ledger", "adopt", ENDPOINT, "--yes", "--reason", "disk").code == 0
        assert twice.command("ledger", "adopt", ENDPOINT, "--yes").code == 5
    else:
        (twice.root / ".onnx-ops" / "keys" / "signing.pem").unlink()
        with (twice.root / "onnx-ops.toml").open("a") as settings:
            settings.write('signing = "off"\n')
        last.unlink()
        (twice.root / ".onnx-ops" / "seen" / f"{ENDPOINT}.json").unlink(missing_ok=True)
    before = traffic(twice)
    assert twice.command("rollback", ENDPOINT, "--reason", "at night").code == 0
    assert traffic(twice) != before
