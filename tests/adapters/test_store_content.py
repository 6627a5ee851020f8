"""The content store by its suite, and real processes that write concurrently.

Some of the processes are killed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from onnx_ops.adapters.files import FsspecObjects, LocalObjects
from onnx_ops.adapters.store import ContentStore, ModelFolders
from onnx_ops.domain.artifact import (
    Digest,
    Manifest,
    StoredObject,
    digest_bytes,
    digest_folder,
    hex_digits,
)
from onnx_ops.errors import CorruptStateError, DigestMismatchError, RefusedError, StorageError
from onnx_ops.ports import Store
from onnx_ops.testing.stores import CONTENT, StoreSuite
from tests.support.external import write_external
from tests.support.faults import Faults
from tests.support.lock_holder import assert_waits_for_lock, run_lock_holder
from tests.support.objects import RemoteStoreSuite, blob_name, record_name


class TestLocalStore(StoreSuite):
    root: Path

    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Callable[[], Store]:
        self.root = tmp_path / "store"
        return lambda: ContentStore(LocalObjects(self.root), tmp_path / "unused")

    def spoil(self, digest: Digest, content: bytes | None) -> None:
        path = self.root / blob_name(digest)
        path.chmod(0o600)
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)

    def spoil_record(self, key: Digest, content: bytes) -> None:
        (self.root / record_name(key)).write_bytes(content)

    def record_of(self, key: Digest) -> bytes:
        return (self.root / record_name(key)).read_bytes()


class TestRemoteStore(RemoteStoreSuite):
    @pytest.fixture
    def place(self) -> str:
        return f"memory://{uuid.uuid4().hex}"


def test_remote_store_with_damaged_cache_fetches_content_again(tmp_path: Path) -> None:
    remote = FsspecObjects(f"memory://{uuid.uuid4().hex}")
    store = ContentStore(remote, tmp_path)
    digest = store.put_bytes(CONTENT)
    path = store.path(digest)
    path.chmod(0o600)
    path.write_bytes(b"spoilt")
    assert ContentStore(remote, tmp_path).read(digest) == CONTENT


def test_remote_store_with_missing_content_raises_corrupt_state_error(tmp_path: Path) -> None:
    store = ContentStore(FsspecObjects(f"memory://{uuid.uuid4().hex}"), tmp_path)
    with pytest.raises(CorruptStateError, match="the file is missing"):
        store.path(digest_bytes(CONTENT))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("shared", [True, False])
def test_store_files_inherit_group_permissions_of_folder(tmp_path: Path, shared: bool) -> None:
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(0o2770 if shared else 0o755)
    store = ContentStore(LocalObjects(root), root)
    digest = store.put_bytes(b"content")
    (tmp_path / "file").write_bytes(b"file")
    store.put_file(tmp_path / "file")
    store.record(digest, Manifest(files={"name": digest}))
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*")}
    folders = {mode for path, mode in modes.items() if path.is_dir()}
    files = {mode for path, mode in modes.items() if path.is_file()}
    assert len(modes) > 5
    if shared:
        assert folders == {0o2770}
        assert files <= {0o660, 0o444}, "blobs are read-only"
    else:
        assert not any(mode & 0o022 for mode in modes.values())


def test_remote_store_cache_above_limit_evicts_oldest_content_but_none_of_last_hour(
    tmp_path: Path,
) -> None:
    remote = FsspecObjects(f"memory://{uuid.uuid4().hex}")
    writer = ContentStore(remote, tmp_path / "writer")
    digests = [writer.put_bytes(bytes([number]) * 100) for number in range(4)]
    store = ContentStore(remote, tmp_path / "cache", cache_bytes=250)
    first, second = (store.path(digest) for digest in digests[:2])
    for path, age in ((first, 7300), (second, 7200)):
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    third = store.path(digests[2])
    assert [path.exists() for path in (first, second, third)] == [False, True, True]
    store.path(digests[3])
    assert [path.exists() for path in (second, third)] == [False, True]
    # The first content is fetched again. All content is from the last hour, so the size can
    # exceed the limit.
    assert store.path(digests[0]) == first
    assert third.exists()


def test_store_path_of_changed_content_with_unchanged_times_raises_corrupt_state_error(
    tmp_path: Path,
) -> None:
    store = ContentStore(LocalObjects(tmp_path), tmp_path)
    path = store.path(store.put_bytes(CONTENT))
    times = path.stat()
    path.chmod(0o600)
    path.write_bytes(CONTENT[::-1])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(CorruptStateError):
        store.path(digest_bytes(CONTENT))


WRITER = """
import sys
from pathlib import Path
from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.store import ContentStore
from onnx_ops.domain.artifact import Manifest, digest_bytes

store = ContentStore(LocalObjects(Path(sys.argv[1])), Path(sys.argv[1]))
rounds = int(sys.argv[2])
print("ready", flush=True)
done = 0
while rounds == 0 or done < rounds:
    content = bytes([done % 5]) * 300_000
    store.record(digest_bytes(b"key %d" % (done % 5)), Manifest(files={"file": store.put_bytes(content)}))
    done += 1
"""  # noqa: E501


def writer(root: Path, rounds: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WRITER, str(root), str(rounds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def assert_every_result_is_whole_or_none(root: Path, *, all_there: bool = False) -> None:
    store = ContentStore(LocalObjects(root), root)
    for number in range(5):
        found = store.lookup(digest_bytes(b"key %d" % number))
        assert found is not None or not all_there
        if found is not None:
            assert store.read(found["file"]) == bytes([number]) * 300_000


def test_store_after_killed_writer_has_complete_results_only(tmp_path: Path) -> None:
    for attempt in range(12):
        with writer(tmp_path, 0) as process:
            time.sleep(0.003 * attempt)
            process.send_signal(signal.SIGKILL)
        assert_every_result_is_whole_or_none(tmp_path)


def test_store_with_two_concurrent_writers_has_complete_results_only(tmp_path: Path) -> None:
    with writer(tmp_path, 60) as one, writer(tmp_path, 60) as two:
        while one.poll() is None or two.poll() is None:
            assert_every_result_is_whole_or_none(tmp_path)
    assert (one.returncode, two.returncode) == (0, 0)
    assert_every_result_is_whole_or_none(tmp_path, all_there=True)


def test_store_put_shares_lock_with_writers_and_waits_for_collector(tmp_path: Path) -> None:
    store, lock = ContentStore(LocalObjects(tmp_path), tmp_path), tmp_path / "collect.lock"
    digest = store.put_bytes(CONTENT)
    (stored,) = store.contents()
    with run_lock_holder(lock, shared=True):
        assert store.put_bytes(CONTENT) == digest
        assert store.put_bytes(b"other") == digest_bytes(b"other")
    assert_waits_for_lock(lock, lambda: store.put_bytes(CONTENT))
    assert_waits_for_lock(lock, lambda: store.put_bytes(b"third"))
    assert_waits_for_lock(lock, lambda: store.forget(stored), shared=True)


LONG_AGO = 1_000_000.0


def test_store_put_during_collection_keeps_content(tmp_path: Path) -> None:
    """A thread collects old content repeatedly while this one puts content.

    The content that is put is already present and old.
    """
    ours, theirs = (ContentStore(LocalObjects(tmp_path), tmp_path) for _ in range(2))
    ended = threading.Event()
    removed: list[StoredObject] = []

    def collect() -> None:
        while not ended.is_set():
            old = [one for one in theirs.contents() if one.at <= LONG_AGO]
            removed.extend(one for one in old if theirs.forget(one))

    collector = threading.Thread(target=collect)
    collector.start()
    try:
        for turn in itertools.takewhile(lambda turn: turn < 400 or not removed, range(100_000)):
            digest = ours.put_bytes(b"%d" % (turn % 3))
            # The collector possibly lists the content as old before the content is put again.
            for _ in range(turn % 4):
                with contextlib.suppress(FileNotFoundError):
                    os.utime(tmp_path / blob_name(digest), (LONG_AGO, LONG_AGO))
            assert ours.put_bytes(b"%d" % (turn % 3)) == digest
            assert ours.read(digest) == b"%d" % (turn % 3)
    finally:
        ended.set()
        collector.join()
    assert removed, "the collector must have been at work"


def test_store_put_of_existing_content_renews_its_age(tmp_path: Path) -> None:
    store = ContentStore(LocalObjects(tmp_path), tmp_path)
    path = store.path(store.put_bytes(CONTENT))
    os.utime(path, (LONG_AGO, LONG_AGO))
    (listed,) = store.contents()
    assert listed.at == LONG_AGO
    store.put_bytes(CONTENT)
    assert not store.forget(listed)
    assert store.contents()[0].at > LONG_AGO


COLLECTOR = """
import sys
from pathlib import Path
from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.store import ContentStore

store = ContentStore(LocalObjects(Path(sys.argv[1])), Path(sys.argv[1]))
for one in store.contents():
    if one.size_bytes < 300_000:
        store.forget(one)
        print("one", flush=True)
"""


@pytest.mark.nightly
def test_store_collection_after_kill_is_completed_by_next_run(tmp_path: Path) -> None:
    store = ContentStore(LocalObjects(tmp_path), tmp_path)
    with writer(tmp_path, 5) as written:
        pass
    assert written.returncode == 0
    for number in range(2000):
        store.put_bytes(b"%d" % number)
    with subprocess.Popen(
        [sys.executable, "-c", COLLECTOR, str(tmp_path)], stdout=subprocess.PIPE
    ) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"one\n"
        killed.send_signal(signal.SIGKILL)
    assert 5 < len(store.contents()) < 2005
    assert_every_result_is_whole_or_none(tmp_path, all_there=True)
    subprocess.run(
        [sys.executable, "-c", COLLECTOR, str(tmp_path)], stdout=subprocess.DEVNULL, check=True
    )
    assert len(store.contents()) == 5
    assert_every_result_is_whole_or_none(tmp_path, all_there=True)


def test_store_contents_lists_temporary_files_that_forget_deletes(tmp_path: Path) -> None:
    store = ContentStore(LocalObjects(tmp_path), tmp_path)
    digest = store.put_bytes(CONTENT)
    store.record(digest, Manifest(files={"file": digest}))
    left = [
        (tmp_path / name).parent / ".tmp-left" for name in (blob_name(digest), record_name(digest))
    ]
    for path in left:
        path.write_bytes(b"half")
    found = [one for one in store.contents() if one.digest is None]
    assert [(tmp_path / one.name, one.size_bytes) for one in found] == [(path, 4) for path in left]
    assert all(store.forget(one) for one in found)
    assert not any(path.exists() for path in left)
    assert store.lookup(digest) is not None


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "weights").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"graph")
    (folder / "weights" / "w.bin").write_bytes(b"weights")
    return folder


def test_model_folders_location_after_admit_returns_same_folder(
    tmp_path: Path, model: Path
) -> None:
    manifest = digest_folder(model)
    assert set(manifest.files) == {"model.onnx", "weights/w.bin"}
    folders = ModelFolders(tmp_path / "models")
    assert folders.location(manifest.digest()) is None
    place = folders.admit(model, manifest)
    assert folders.location(manifest.digest()) == place == folders.admit(model, manifest)
    assert digest_folder(Path(place)) == manifest
    assert [path.name for path in (tmp_path / "models").iterdir()] == [
        hex_digits(manifest.digest())
    ]


def test_model_folders_admit_keeps_copy_that_other_process_completed_meanwhile(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, other = (ModelFolders(tmp_path / "models") for _ in range(2))
    manifest, find = digest_folder(model), ModelFolders.location

    def look_before_other_copies(self: ModelFolders, digest: Digest) -> str | None:
        monkeypatch.setattr(ModelFolders, "location", find)
        location = self.location(digest)
        other.admit(model, manifest)
        return location

    monkeypatch.setattr(ModelFolders, "location", look_before_other_copies)
    with mock.patch.object(shutil, "rmtree", wraps=shutil.rmtree) as remove:
        place = folders.admit(model, manifest)
    assert mock.call(Path(place)) not in remove.call_args_list
    assert folders.location(manifest.digest()) == place
    assert [path.name for path in (tmp_path / "models").iterdir()] == [Path(place).name]


def test_model_folders_admit_removes_old_temporary_folders(tmp_path: Path, model: Path) -> None:
    folders = ModelFolders(tmp_path / "models")
    left = [tmp_path / "models" / name for name in (".tmp-old", ".tmp-young")]
    for folder in left:
        (folder / "weights").mkdir(parents=True)
        (folder / "weights" / "w.bin").write_bytes(b"half")
    for path in (left[0], *left[0].rglob("*")):
        os.utime(path, (0, 0))
    folders.admit(model, digest_folder(model))
    assert [folder.exists() for folder in left] == [False, True]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_store_and_model_folders_on_unusable_disk_raise_storage_error(
    tmp_path: Path, model: Path, number: int
) -> None:
    folders, store = (
        ModelFolders(tmp_path / "models"),
        ContentStore(LocalObjects(tmp_path / "store"), tmp_path),
    )
    acts: list[Callable[[], object]] = [
        lambda: folders.admit(model, digest_folder(model)),
        lambda: store.put_bytes(b"content"),
    ]
    for act in acts:
        counted, raised = Faults(), 0
        with counted.in_folder(tmp_path):
            act()
        for at in range(0, counted.moments, 3):
            for place in ("models", "store"):
                shutil.rmtree(tmp_path / place, ignore_errors=True)
            try:
                with Faults(at=at, error=OSError(number, os.strerror(number))).in_folder(tmp_path):
                    act()
            except StorageError:
                raised += 1
        assert raised > 3
        act()


def test_model_folders_admit_of_changed_folder_raises_digest_mismatch_error(
    tmp_path: Path, model: Path
) -> None:
    manifest = digest_folder(model)
    folders = ModelFolders(tmp_path / "models")
    (model / "weights" / "w.bin").write_bytes(b"weighty")
    with pytest.raises(DigestMismatchError, match=r"weights/w\.bin"):
        folders.admit(model, manifest)
    (model / "weights" / "w.bin").write_bytes(b"weights")
    (model / "more.bin").write_bytes(b"")
    with pytest.raises(DigestMismatchError, match=r"more\.bin"):
        folders.admit(model, manifest)
    with pytest.raises(DigestMismatchError):
        folders.admit(model, Manifest(files={}))
    assert folders.location(manifest.digest()) is None


def test_model_folders_admit_with_outside_weights_raises_refused_error(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_external(folder / "model.onnx", "../weights.bin")
    folders, manifest = ModelFolders(tmp_path / "models"), digest_folder(folder)
    with pytest.raises(RefusedError):
        folders.admit(folder, manifest)
    assert folders.location(manifest.digest()) is None


def test_model_folders_location_of_damaged_folder_returns_none_until_admit(
    tmp_path: Path, model: Path
) -> None:
    manifest = digest_folder(model)
    folders = ModelFolders(tmp_path / "models")
    place = Path(folders.admit(model, manifest))
    (place / "model.onnx").chmod(0o600)
    (place / "model.onnx").write_bytes(b"forged")
    assert folders.location(manifest.digest()) is None
    assert folders.admit(model, manifest) == str(place)
    assert folders.location(manifest.digest()) == str(place)
