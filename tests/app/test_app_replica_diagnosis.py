"""`onnx-ops doctor` in the container of a replica."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from onnx_ops import codec
from onnx_ops.adapters.host import SystemClock
from onnx_ops.adapters.signers.ecdsa import create_key, public_path
from onnx_ops.app.replica_diagnosis import CHECKS, diagnose_replica
from onnx_ops.domain.endpoint import ServerMemory
from onnx_ops.protocol.replica_reports import ReplicaStatus
from onnx_ops.protocol.replica_tables import FOLDER, TableNumber
from tests.support.command import run_command

MIB = 1 << 20
FREE_MIB = 1_000


class Container:
    """Variables and folders of a container, whose replica has reported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("control", "reports/status", "keys", "state/replica", "group"):
            (folder / name).mkdir(parents=True)
        key = folder / "private" / "signing.pem"
        create_key(key)
        self.public = folder / "keys" / "signing.pub.pem"
        self.public.write_bytes(public_path(key).read_bytes())
        (folder / "state/replica/replica").write_text("pod-1")
        self.write_group(limit=2_048 * MIB, usage=(2_048 - FREE_MIB) * MIB)
        self.status = ReplicaStatus(
            replica="pod-1",
            start="0" * 12,
            endpoint="digits",
            adopted=TableNumber(3),
            at=SystemClock().now(),
            memory=ServerMemory(workers=2, worker_bytes=200 * MIB, available_bytes=FREE_MIB * MIB),
        )
        self.write_status(self.status)
        self.environment = {
            "ONNX_OPS_FOLLOW": str(folder / "control"),
            "ONNX_OPS_REPORTS": str(folder / "reports"),
            "ONNX_OPS_SERVE_ENDPOINT": "digits",
            "ONNX_OPS_SERVE_TRUSTED_KEYS": str(folder / "keys"),
            "ONNX_OPS_STATE_DIR": str(folder / "state/replica"),
        }

    def write_status(self, status: ReplicaStatus) -> None:
        (self.folder / "reports/status/pod-1.json").write_bytes(codec.dumps(status))

    def write_group(self, *, limit: int, usage: int) -> None:
        files = {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{limit}\n",
            "sys/fs/cgroup/memory.current": f"{usage}\n",
        }
        for name, text in files.items():
            path = self.folder / "group" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def list_faults(self, **changes: str) -> dict[str, str]:
        findings = diagnose_replica({**self.environment, **changes}, root=self.folder / "group")
        assert tuple(one.check for one in findings) == CHECKS
        assert all(one.remedy for one in findings if not one.ok)
        return {one.check: one.found for one in findings if not one.ok}


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


def test_doctor_in_container_with_working_replica_finds_no_fault(container: Container) -> None:
    begun: list[str] = []
    findings = diagnose_replica(
        container.environment, begun.append, root=container.folder / "group"
    )
    assert all(one.ok for one in findings)
    assert tuple(begun) == CHECKS
    (memory,) = [one.found for one in findings if one.check == "memory"]
    # Two workers load 200 MiB each, and an eighth of this sum is added as a reserve.
    assert memory == (
        "limit 2,048 MiB, 1,000 MiB available; a second version like the loaded one needs 450 MiB"
    )


def test_doctor_in_container_reports_too_little_memory_for_second_version(
    container: Container,
) -> None:
    container.write_group(limit=2_048 * MIB, usage=1_600 * MIB)
    assert container.list_faults().keys() == {"memory"}


def test_doctor_in_container_without_limit_and_report_reports_replica_only(
    container: Container,
) -> None:
    container.write_group(limit=0, usage=0)
    (container.folder / "group/sys/fs/cgroup/memory.max").write_text("max\n")
    (container.folder / "reports/status/pod-1.json").unlink()
    assert container.list_faults().keys() == {"replica"}


def test_doctor_in_container_reports_state_folder_below_file(container: Container) -> None:
    faults = container.list_faults(ONNX_OPS_STATE_DIR=f"{container.public}/state")
    assert faults.keys() == {"state folder", "replica"}


def test_doctor_in_container_reports_read_only_state_folder(container: Container) -> None:
    """No user, not even root, can create files in the folder of the kernel."""
    faults = container.list_faults(ONNX_OPS_STATE_DIR="/proc/state")
    assert "state folder" in faults


@pytest.mark.parametrize("place", ["", "release", "gate"])
def test_doctor_in_container_reports_missing_keys_of_role(place: str, container: Container) -> None:
    container.public.unlink()
    if place:
        other = container.folder / "other" / "signing.pem"
        create_key(other)
        (container.folder / "keys" / place).mkdir()
        (container.folder / "keys" / place / "a.pub.pem").write_bytes(
            public_path(other).read_bytes()
        )
    found = container.list_faults()["trusted keys"]
    assert ("decisions: none" in found, "tables: none" in found) == (
        place != "gate",
        place != "release",
    )


def test_doctor_in_container_reports_missing_shared_folder(container: Container) -> None:
    (container.folder / "control").rmdir()
    assert container.list_faults().keys() == {"tables"}


def test_doctor_in_container_reports_table_without_valid_signature(container: Container) -> None:
    (container.folder / "control" / FOLDER).mkdir()
    (container.folder / "control" / FOLDER / "1.json").write_text('{"kind": "table"}')
    assert container.list_faults().keys() == {"tables"}


def test_doctor_in_container_reports_unset_location_of_reports(container: Container) -> None:
    assert container.list_faults(ONNX_OPS_REPORTS="").keys() == {"reports", "clock", "replica"}


def test_doctor_in_container_reports_wrong_clock(container: Container) -> None:
    clock = SimpleNamespace(now=lambda: SystemClock().now() + 9, monotonic=lambda: 0.0)
    findings = diagnose_replica(container.environment, clock=clock, root=container.folder / "group")
    assert [one.check for one in findings if not one.ok] == ["clock"]


@pytest.mark.parametrize(
    "change", [{"refused": "no space"}, {"failed": {"v2": "a broken file"}}, {"at": 0.0}]
)
def test_doctor_in_container_reports_replica_with_failure_or_old_report(
    change: dict[str, object], container: Container
) -> None:
    container.write_status(replace(container.status, **change))  # type: ignore[arg-type]
    assert container.list_faults().keys() == {"replica"}


def test_doctor_command_in_container_exits_with_4_if_check_fails(container: Container) -> None:
    good = run_command("doctor", "--json", cwd=container.folder, environ=container.environment)
    container.public.unlink()
    bad = run_command("doctor", "--json", cwd=container.folder, environ=container.environment)
    assert (good.code, bad.code) == (0, 4)
    assert tuple(one["check"] for one in json.loads(good.stdout)) == CHECKS
