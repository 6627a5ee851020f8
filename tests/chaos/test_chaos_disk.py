"""A full disk: a publication is refused, and the served deployments stay.

After space is freed, publications succeed again.
"""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import MeasurementError
from onnx_ops.protocol.routing_table import TableFile
from onnx_ops.protocol.server_process import AUDIT_FILE
from onnx_ops.testing.endpoints import state_of
from tests.chaos.chaos_parts import Make, Patient
from tests.support.must import must
from tests.support.server import ServerFamily


def refuses_until_room_is_made(server: ServerFamily, blue: Deployment, green: Deployment) -> None:
    """Assert that a publication is refused; call it while nothing can be written."""
    both = state_of(blue, green, blue=30, green=70)
    answer = server.publish(both, 2)
    assert answer.status == 503, answer
    assert "written" in answer.json()["what"]
    state = must(server.state())
    assert state.generation == 1
    Patient(server).is_well()
    assert [p for p in server.folder.glob(".tmp-*") if p.stat().st_size] == []


def is_healed(server: ServerFamily, blue: Deployment, green: Deployment) -> None:
    assert server.publish(state_of(blue, green, blue=30, green=70), 2).status == 200
    stored = must(TableFile(server.folder).read())
    assert stored.state.generation == 2


@pytest.mark.parametrize(
    ("limit", "after_audit"), [(0, False), (1, False), (100, False), (500, False), (400, True)]
)
def test_publish_with_file_size_limit_is_refused_until_limit_is_raised(
    family: Make, blue: Deployment, green: Deployment, limit: int, after_audit: bool
) -> None:
    """A limit on the size of files (RLIMIT_FSIZE) needs no privilege.

    It interrupts a write in its middle. With the last limit, the line of the audit trail fits, and
    the table does not.
    """
    server = family()
    assert server.publish(state_of(blue, blue=100), 1).status == 200
    limit += (server.folder / AUDIT_FILE).stat().st_size if after_audit else 0
    before = resource.prlimit(
        server.supervisor, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)
    )
    refuses_until_room_is_made(server, blue, green)
    resource.prlimit(server.supervisor, resource.RLIMIT_FSIZE, before)
    is_healed(server, blue, green)
    server.stop()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(
            f"a full disk was NOT tried, as no disk can be mounted here: {mounted.stderr.strip()}"
        )
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def fill(place: Path) -> Path:
    filler = place / "filler"
    with filler.open("wb", buffering=0) as stream, suppress(OSError):
        while stream.write(b"\0" * 512):
            pass
    return filler


def test_publish_on_full_disk_is_refused_until_space_is_freed(
    family: Make, small_disk: Path, blue: Deployment, green: Deployment
) -> None:
    server = family(folder=small_disk / "state")
    assert server.publish(state_of(blue, blue=100), 1).status == 200
    filler = fill(small_disk)
    refuses_until_room_is_made(server, blue, green)
    filler.unlink()
    is_healed(server, blue, green)
    server.stop()


def test_server_start_on_full_disk_logs_no_traceback_and_succeeds_once_space_is_freed(
    family: Make, small_disk: Path, blue: Deployment
) -> None:
    server = family(folder=small_disk / "state")
    assert server.publish(state_of(blue, blue=100), 1).status == 200
    server.kill()
    server.destroy()
    filler = fill(small_disk)
    with suppress(MeasurementError):
        server.start()
        Patient(server).is_well()
    assert "Traceback" not in server.log()
    server.destroy()
    filler.unlink()
    server.start()
    Patient(server).is_well()
    state = must(server.state())
    assert state.generation == 1
