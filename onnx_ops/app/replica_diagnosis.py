"""Checks of `onnx-ops doctor` in the container of a replica.

A container has neither a project nor a ledger. The checks use the variables of the container, its
folders, and the locations of the tables and reports with the identity of the container.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from onnx_ops import codec
from onnx_ops.adapters.files import LocalObjects, ObjectStore, open_objects
from onnx_ops.adapters.host import SystemClock
from onnx_ops.app.follower import NAME_FILE
from onnx_ops.attestation import KeyRole, TrustedKeys
from onnx_ops.domain.artifact import short_digest
from onnx_ops.domain.target import Diagnosis
from onnx_ops.errors import CorruptStateError, OnnxOpsError, UserError
from onnx_ops.ports import Clock
from onnx_ops.protocol.replica_reports import (
    CLOCK_FILE,
    CLOCK_FOLDER,
    SILENT_S,
    STATUS_FOLDER,
    ReplicaStatus,
    ReportSource,
)
from onnx_ops.protocol.replica_tables import (
    FOLDER,
    StoredTable,
    TableNumber,
    decode_table,
    find_newest,
)
from onnx_ops.protocol.server_process import (
    FOLLOW_VARIABLE,
    OPTION_PREFIX,
    REPORTS_VARIABLE,
    TRUSTED_KEYS_VARIABLE,
)
from onnx_ops.serving.workers.available_memory import read_available_bytes, read_limit_bytes
from onnx_ops.serving.workers.memory_admission import MemoryNeed

CHECKS = (
    "state folder",
    "temporary folder",
    "trusted keys",
    "tables",
    "reports",
    "clock",
    "memory",
    "replica",
)
"""Names of the checks, in the order in which they run."""
_REMEDY = "Check the variables, mounts and permissions of the container."
_CLOCK_S = 2.0
"""Maximum difference between the clocks of machine and store, in seconds."""
_STORE_S = 10.0
"""Time limit of one request to the store in seconds."""
_MIB = 1 << 20

_Finding = tuple[bool, str, str]
"""Result of a check: whether the state is right, the state, and the remedy."""


def diagnose_replica(
    environment: Mapping[str, str],
    begin: Callable[[str], object] = lambda name: None,
    *,
    clock: Clock | None = None,
    root: Path | None = None,
) -> list[Diagnosis]:
    """Run all checks and return their findings.

    Args:
        environment: variables of the container.
        begin: is called with the name of each check.
        clock: clock of this machine.
        root: folder below which /proc and /sys are read.
    """
    container = _Container(environment, clock or SystemClock(), root)
    findings = []
    for name in CHECKS:
        begin(name)
        try:
            ok, found, remedy = getattr(container, f"check_{name.replace(' ', '_')}")()
        except OnnxOpsError as error:
            ok, found, remedy = False, str(error), error.remedy or _REMEDY
        except OSError as error:
            ok, found, remedy = False, str(error), _REMEDY
        findings.append(Diagnosis(check=name, ok=ok, found=found, remedy="" if ok else remedy))
    return findings


class _Container:
    """A container of a replica: its variables, folders and locations."""

    def __init__(self, environment: Mapping[str, str], clock: Clock, root: Path | None) -> None:
        self._environment = environment
        self._clock = clock
        self._root = root
        self._endpoint = environment.get(f"{OPTION_PREFIX}ENDPOINT", "")
        self._keys = environment.get(TRUSTED_KEYS_VARIABLE, "")

    def _open(self, variable: str) -> ObjectStore:
        if not (url := self._environment.get(variable, "")):
            raise UserError(f"variable {variable} is not set")
        return open_objects(url, deadline_s=_STORE_S)

    def check_state_folder(self) -> _Finding:
        """Check that the container can write its state, which includes its models."""
        folder = self._environment.get("ONNX_OPS_STATE_DIR", "")
        if not folder:
            return True, "ONNX_OPS_STATE_DIR is not set: a temporary folder is used", ""
        remedy = f"Mount a writable volume at {folder}, or at a folder above it."
        return _check_writable(Path(folder), remedy)

    def check_temporary_folder(self) -> _Finding:
        """Check that the container can write temporary files."""
        try:
            folder = tempfile.gettempdir()
        except FileNotFoundError as error:
            return False, str(error), "Mount a volume at /tmp."
        return _check_writable(Path(folder), "Mount a volume at /tmp.")

    def check_trusted_keys(self) -> _Finding:
        """Check that there are public keys for decisions and for tables."""
        gate, release = self._read_keys("gate").keys(), self._read_keys("release").keys()
        shown = [
            f"{what}: {', '.join(map(short_digest, keys)) or 'none'}"
            for what, keys in (("decisions", gate), ("tables", release))
        ]
        remedy = (
            f"Mount NAME.pub.pem at {self._keys or 'a folder'}, and name this folder in "
            f"{TRUSTED_KEYS_VARIABLE}: `onnx-ops keys list` names the files."
        )
        return bool(gate and release), "; ".join(shown), remedy

    def check_tables(self) -> _Finding:
        """Check that the tables can be read, and that a trusted key signed the newest."""
        control, verifier = self._open(FOLLOW_VARIABLE), self._read_keys("release")
        if isinstance(control, LocalObjects) and not control.root.is_dir():
            return False, f"{control.place} does not exist", "Mount the shared folder."

        def read(number: TableNumber) -> StoredTable:
            if (data := control.read(number.name)) is None:
                raise CorruptStateError("it was deleted", where=number.name)
            return decode_table(data, number, self._endpoint, verifier)

        newest, skipped = find_newest(control.list_names(FOLDER), read)
        if skipped:
            listed = "; ".join(f"{name}: {why}" for name, why in skipped.items())
            remedy = f"Check {TRUSTED_KEYS_VARIABLE}, and who can write to {control.place}."
            return False, f"{control.place}: ignored: {listed}", remedy
        shown = "no table yet" if newest is None else f"table {newest.number} is the newest"
        return True, f"{control.place}: {shown}", ""

    def check_reports(self) -> _Finding:
        """Check that the container can list, write and read reports."""
        reports = self._open(REPORTS_VARIABLE)
        reports.list_names(STATUS_FOLDER)
        reports.write(CLOCK_FILE, b"")
        is_read = reports.read(CLOCK_FILE) is not None
        remedy = (
            f"Grant the replica the permissions to list, read and write objects in {reports.place}."
        )
        found = "can be listed, read and written" if is_read else "the written object was not found"
        return is_read, f"{reports.place}: {found}", remedy

    def check_clock(self) -> _Finding:
        """Compare the clock with that of the store."""
        reports = self._open(REPORTS_VARIABLE)
        reports.write(CLOCK_FILE, b"")
        now = self._clock.now()
        written = max((one.at for one in reports.list_objects(CLOCK_FOLDER)), default=now)
        remedy = "Run NTP on this node: users can otherwise get both versions in one epoch."
        found = f"{now - written:+.1f} s from the store's clock"
        return abs(now - written) <= _CLOCK_S, found, remedy

    def check_memory(self) -> _Finding:
        """Compare the available memory with the memory that a second version needs."""
        limit, available = read_limit_bytes(self._root), read_available_bytes(self._root)
        shown = "no limit" if limit is None else f"limit {_format(limit)}"
        if available is not None:
            shown += f", {_format(available)} available"
        status = None
        with suppress(OnnxOpsError, OSError):  # Another check reports unreadable status reports.
            status = self._read_status()
        memory = None if status is None else status.memory
        if memory is None or not memory.worker_bytes:
            return True, f"{shown}; the replica has reported no loaded version", ""
        need = MemoryNeed(workers=memory.workers, worker_bytes=memory.worker_bytes)
        found = f"{shown}; a second version like the loaded one needs {_format(need.total_bytes)}"
        remedy = "Increase the memory limit, or use fewer workers."
        return available is None or need.fits(available), found, remedy

    def check_replica(self) -> _Finding:
        """Check that the replica reports, has loaded its table, and refuses no newer one."""
        name, status = self._find_name(), self._read_status()
        if not name or status is None:
            return False, "has not reported", "Read the log of the container."
        age_s = self._clock.now() - status.at
        if age_s > SILENT_S:
            found = f"{name}: its last report is {age_s:.0f} s old"
            return False, found, "Read the log of the container."
        if not status.is_healthy:
            why = status.refused or "; ".join(f"{n}: {w}" for n, w in status.failed.items())
            return False, f"{name}: {why}", "`onnx-ops status` shows the other replicas."
        table = "no table" if status.adopted is None else f"table {status.adopted}"
        return True, f"{name} reports and serves {table}", ""

    def _read_keys(self, role: KeyRole) -> TrustedKeys:
        return TrustedKeys.of(self._keys, role=role) if self._keys else TrustedKeys(())

    def _find_name(self) -> str:
        if given := self._environment.get("ONNX_OPS_REPLICA"):
            return given
        path = Path(self._environment.get("ONNX_OPS_STATE_DIR", "")) / NAME_FILE
        return path.read_text(encoding="utf-8").strip() if path.is_file() else ""

    def _read_status(self) -> ReplicaStatus | None:
        if not (name := self._find_name()):
            return None
        data = self._open(REPORTS_VARIABLE).read(ReportSource(name, "").status_name)
        return None if data is None else codec.loads(data, ReplicaStatus, where=name)


def _check_writable(folder: Path, remedy: str) -> _Finding:
    """Check that files can be created in a folder, or in its nearest existing parent."""
    present = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=present):
            pass
    except OSError as error:
        return False, f"{folder}: {error.strerror}", remedy
    return True, f"{folder} can be written", ""


def _format(size_bytes: int) -> str:
    return f"{-(-size_bytes // _MIB):,} MiB"
