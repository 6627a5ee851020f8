"""Temporary folders and durable files of processes.

The processes end, are killed, and run side by side.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from onnx_ops.errors import CorruptStateError
from onnx_ops.scratch import PREFIX, Scratch, read_plain_file, write_durably

HOLDS = """
import sys
from onnx_ops.scratch import Scratch
with Scratch() as folder:
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "model.onnx").write_bytes(b"model")
    print(folder, flush=True)
    sys.stdin.read()
"""
FORKS = """
import os, sys
from onnx_ops.scratch import Scratch
with Scratch() as folder:
    if os.fork() == 0:
        print(folder, flush=True)
        sys.stdin.read()
        os._exit(0)
    os.kill(os.getpid(), 9)
"""
SWEEPS = "from onnx_ops.scratch import Scratch; Scratch().remove()"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@contextmanager
def held(code: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def sweep() -> None:
    """Clean up as any other process does when it makes a folder."""
    subprocess.run([sys.executable, "-c", SWEEPS], check=True)


def test_scratch_folder_is_private_and_removed_on_exit(temporary: Path) -> None:
    with Scratch() as folder:
        assert folder.is_dir()
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").write_bytes(b"")
    assert not folder.exists()


def test_scratch_remove_deletes_folder_and_can_be_repeated() -> None:
    scratch = Scratch()
    path = scratch.path
    scratch.remove()
    scratch.remove()
    assert not path.exists()


def test_scratch_folder_of_killed_process_is_removed_by_next_sweep(temporary: Path) -> None:
    with held(HOLDS) as (process, folder):
        process.kill()
        process.wait()
        assert (folder / "deep" / "er" / "model.onnx").exists()
        sweep()
    assert list(temporary.iterdir()) == []


def test_scratch_sweep_leaves_folder_of_running_process(temporary: Path) -> None:
    with held(HOLDS) as (_, folder):
        os.utime(folder, (0, 0))
        sweep()
        assert (folder / "deep" / "er" / "model.onnx").exists()


def test_scratch_sweep_leaves_folder_until_forked_process_ends(temporary: Path) -> None:
    with held(FORKS) as (process, folder):
        process.wait()
        sweep()
        assert folder.exists()
        assert process.stdin is not None
        process.stdin.close()
        assert process.stdout is not None
        # The output ends when the forked process ends.
        process.stdout.read()
        sweep()
        assert not folder.exists()


def test_scratch_sweep_leaves_links_files_and_other_folders(
    temporary: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").write_bytes(b"")
    (temporary / f"{PREFIX}link").symlink_to(mine)
    (temporary / f"{PREFIX}file").write_bytes(b"")
    (temporary / "other").mkdir()
    sweep()
    assert (mine / "file").exists()
    assert {path.name for path in temporary.iterdir()} == {
        f"{PREFIX}link",
        f"{PREFIX}file",
        "other",
    }


@pytest.mark.skipif(os.getuid() != 0, reason="only root can create folders of other users")
def test_scratch_sweep_leaves_folders_of_other_users(temporary: Path) -> None:
    folder = temporary / f"{PREFIX}theirs"
    folder.mkdir()
    os.chown(folder, 4711, 4711)
    sweep()
    assert folder.exists()


def test_scratch_whose_folder_is_removed_before_locking_creates_other_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = os.open
    taken: list[str] = []

    def too_late(path: str, flags: int) -> int:
        if not taken:
            taken.append(path)
            os.rmdir(path)
        return opened(path, flags)

    monkeypatch.setattr(os, "open", too_late)
    with Scratch() as folder:
        assert folder.is_dir()
        assert str(folder) != taken[0]


def test_scratch_folders_of_concurrent_processes_stay_separate(temporary: Path) -> None:
    code = """
from pathlib import Path
from onnx_ops import scratch
for number in range(300):
    scratch._sweep.cache_clear()
    with scratch.Scratch() as folder:
        (folder / "file").write_text(str(number))
        assert (folder / "file").read_text() == str(number)
"""
    several = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    assert [process.wait() for process in several] == [0, 0, 0, 0]
    sweep()
    assert list(temporary.iterdir()) == []


def test_write_durably_flushes_file_before_rename_and_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    fsync, rename = os.fsync, Path.replace

    def recorded_fsync(handle: int) -> None:
        calls.append(("fsync", os.fstat(handle).st_ino))
        fsync(handle)

    def recorded_rename(path: Path, target: Path) -> Path:
        calls.append(("rename", path.stat().st_ino))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "replace", recorded_rename)
    write_durably(tmp_path / "table.json", b"{}")
    file, folder = ((tmp_path / "table.json").stat().st_ino, tmp_path.stat().st_ino)
    assert calls == [("fsync", file), ("rename", file), ("fsync", folder)]


def test_read_plain_file_returns_content_up_to_limit_and_raises_above(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(b"1234")
    assert read_plain_file(path, most=4) == b"1234"
    with pytest.raises(CorruptStateError, match="larger than"):
        read_plain_file(path, most=3)
