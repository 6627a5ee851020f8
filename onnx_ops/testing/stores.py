"""Conformance suite for stores.

Subclass `StoreSuite` with the fixture `reopen` and three methods.

class TestMyStore(StoreSuite):
    @pytest.fixture
    def reopen(self, tmp_path) -> Callable[[], Store]: ...

    def spoil(self, digest, content): ...
    def spoil_record(self, key, content): ...
    def record_of(self, key): ...

The fixture returns a function that opens the same store at every call, as another process would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.domain.artifact import Digest, Manifest, digest_bytes
from onnx_ops.errors import CorruptStateError
from onnx_ops.ports import Store

CONTENT = b"twenty bytes of data"
KEY = digest_bytes(b"key")


class StoreSuite:
    """Conformance of a Store."""

    def spoil(self, digest: Digest, content: bytes | None) -> None:
        """Change the content under a digest, bypassing the store; None deletes it."""
        raise NotImplementedError

    def spoil_record(self, key: Digest, content: bytes) -> None:
        """Replace the stored record of a key by `content`, bypassing the store."""
        raise NotImplementedError

    def record_of(self, key: Digest) -> bytes:
        """Return the stored record of a key."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, reopen: Callable[[], Store]) -> Store:
        return reopen()

    def test_put_content_is_read_by_digest(
        self, store: Store, reopen: Callable[[], Store], tmp_path: Path
    ) -> None:
        source = tmp_path / "source"
        source.write_bytes(CONTENT)
        assert store.put_file(source) == store.put_bytes(CONTENT) == digest_bytes(CONTENT)
        for reader in (store, reopen()):
            assert reader.read(digest_bytes(CONTENT)) == CONTENT
            assert reader.path(digest_bytes(CONTENT)).read_bytes() == CONTENT

    def test_put_of_empty_content_is_read_back(self, store: Store) -> None:
        assert store.read(store.put_bytes(b"")) == b""

    def test_stored_file_is_read_only(self, store: Store) -> None:
        assert store.path(store.put_bytes(CONTENT)).stat().st_mode & 0o222 == 0

    def test_path_of_unknown_content_raises_corrupt_state_error(self, store: Store) -> None:
        for unknown in (digest_bytes(b"unknown"), Digest("sha256:../../etc/passwd"), Digest("")):
            with pytest.raises(CorruptStateError):
                store.path(unknown)
        assert store.lookup(KEY) is None

    def test_lookup_returns_recorded_result_by_key(
        self, store: Store, reopen: Callable[[], Store]
    ) -> None:
        manifest = Manifest(files={"a": store.put_bytes(b"a"), "dir/b": store.put_bytes(b"b")})
        store.record(KEY, manifest)
        assert store.lookup(KEY) == reopen().lookup(KEY) == manifest
        other = Manifest(files={"c": store.put_bytes(b"c")})
        store.record(KEY, other)
        assert reopen().lookup(KEY) == other
        assert store.lookup(digest_bytes(b"another key")) is None

    def test_lookup_of_empty_result_returns_it(self, store: Store) -> None:
        store.record(KEY, Manifest(files={}))
        assert store.lookup(KEY) == Manifest(files={})

    def test_read_of_damaged_content_raises_corrupt_state_error_until_put_again(
        self, store: Store, reopen: Callable[[], Store]
    ) -> None:
        digest = store.put_bytes(CONTENT)
        manifest = Manifest(files={"file": digest})
        store.record(KEY, manifest)
        flipped = [
            CONTENT[:n] + bytes([CONTENT[n] ^ 1]) + CONTENT[n + 1 :]
            for n in (0, 10, len(CONTENT) - 1)
        ]
        torn = [CONTENT[:n] for n in range(len(CONTENT))]
        for content in (*flipped, *torn, CONTENT + b"x", None):
            self.spoil(digest, content)
            reader = reopen()
            with pytest.raises(CorruptStateError):
                reader.path(digest)
            with pytest.raises(CorruptStateError):
                reader.read(digest)
            assert reader.lookup(KEY) is None
            assert reader.put_bytes(CONTENT) == digest
            assert reader.lookup(KEY) == manifest

    def test_read_after_change_of_read_content_raises_corrupt_state_error(
        self, store: Store
    ) -> None:
        digest = store.put_bytes(CONTENT)
        assert store.read(digest) == CONTENT
        self.spoil(digest, CONTENT + b"x")
        with pytest.raises(CorruptStateError):
            store.read(digest)

    def test_lookup_of_damaged_record_returns_none(
        self, store: Store, reopen: Callable[[], Store]
    ) -> None:
        manifest = Manifest(files={"file": store.put_bytes(CONTENT)})
        store.record(KEY, manifest)
        whole = self.record_of(KEY)
        flipped = [
            whole[:n] + bytes([whole[n] ^ 1]) + whole[n + 1 :] for n in range(0, len(whole), 7)
        ]
        torn = [whole[:n] for n in range(0, len(whole), 5)]
        for content in (*flipped, *torn, b"null", b"[]", b'{"key":1}', b"\xff"):
            self.spoil_record(KEY, content)
            assert reopen().lookup(KEY) is None, content
        store.record(KEY, manifest)
        assert reopen().lookup(KEY) == manifest

    def test_lookup_of_record_under_other_key_returns_none(
        self, store: Store, reopen: Callable[[], Store]
    ) -> None:
        other = digest_bytes(b"another key")
        for key, content in ((KEY, b"a"), (other, b"b")):
            store.record(key, Manifest(files={"file": store.put_bytes(content)}))
        self.spoil_record(KEY, self.record_of(other))
        assert reopen().lookup(KEY) is None
        assert reopen().lookup(other) is not None

    def test_contents_and_results_list_stored_objects(
        self, store: Store, reopen: Callable[[], Store]
    ) -> None:
        assert (store.contents(), list(store.results())) == ((), [])
        manifest = Manifest(files={"file": store.put_bytes(CONTENT)})
        store.record(KEY, manifest)
        other = store.put_bytes(b"other")
        for reader in (store, reopen()):
            assert {one.digest: one.size_bytes for one in reader.contents()} == {
                manifest["file"]: 20,
                other: 5,
            }
            assert list(reader.results()) == [manifest]

    def test_results_skip_damaged_record(self, store: Store) -> None:
        store.record(KEY, Manifest(files={"file": store.put_bytes(CONTENT)}))
        self.spoil_record(KEY, self.record_of(KEY)[:-3])
        assert list(store.results()) == []

    def test_forget_removes_content_until_put_again(
        self, store: Store, reopen: Callable[[], Store]
    ) -> None:
        digest = store.put_bytes(CONTENT)
        store.record(KEY, Manifest(files={"file": digest}))
        (stored,) = store.contents()
        assert store.forget(stored)
        assert store.contents() == ()
        for reader in (store, reopen()):
            assert reader.lookup(KEY) is None
            with pytest.raises(CorruptStateError):
                reader.read(digest)
        # `forget` also succeeds if another process has already deleted the content.
        assert reopen().forget(stored)
        assert store.put_bytes(CONTENT) == digest
        assert store.lookup(KEY) is not None

    def test_forget_keeps_content_put_again_since_listing(
        self, store: Store, reopen: Callable[[], Store]
    ) -> None:
        digest = store.put_bytes(CONTENT)
        (stored,) = store.contents()
        assert not reopen().forget(replace(stored, at=stored.at - 5))
        assert store.read(digest) == CONTENT
