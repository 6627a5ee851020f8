"""Conformance suites of the store and the ledger over objects of any kind."""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from onnx_ops.adapters.files import open_objects
from onnx_ops.adapters.ledgers.log import ObjectLedger
from onnx_ops.adapters.store import ContentStore
from onnx_ops.domain.artifact import Digest, hex_digits
from onnx_ops.ports import Ledger, Store
from onnx_ops.testing.fakes import make_ledger_keys
from onnx_ops.testing.ledgers import LedgerSuite, Opener
from onnx_ops.testing.stores import StoreSuite


def blob_name(digest: Digest) -> str:
    return f"blobs/{hex_digits(digest)[:2]}/{hex_digits(digest)}"


def record_name(key: Digest) -> str:
    return f"records/{hex_digits(key)[:2]}/{hex_digits(key)}.json"


def open_ledger(url: str, environ: Mapping[str, str]) -> Ledger:
    """Open a ledger with the credentials in `environ`.

    They may be newer than the fork server from which this process was forked.
    """
    os.environ.update(environ)
    return ObjectLedger(open_objects(url), make_ledger_keys())


class RemoteStoreSuite(StoreSuite):
    """Suite of a content store over remote objects.

    Subclass it, and provide the fixture `place`: the URL of an empty folder. Every reader has a
    separate cache, so that it reads from the remote side.
    """

    @pytest.fixture
    def reopen(self, place: str, tmp_path: Path) -> Callable[[], Store]:
        self.remote, self.readers = open_objects(place), list[Path]()

        def make() -> Store:
            self.readers.append(tmp_path / uuid.uuid4().hex)
            return ContentStore(self.remote, self.readers[-1])

        return make

    def spoil(self, digest: Digest, content: bytes | None) -> None:
        name = blob_name(digest)
        for cache in self.readers:
            (cache / name).unlink(missing_ok=True)
        if content is None:
            self.remote.delete(name)
        else:
            self.remote.write(name, content)

    def spoil_record(self, key: Digest, content: bytes) -> None:
        self.remote.write(record_name(key), content)

    def record_of(self, key: Digest) -> bytes:
        return self.remote.read(record_name(key)) or b""

    def test_content_store_put_file_is_read_by_other_store(
        self, place: str, tmp_path: Path
    ) -> None:
        source = tmp_path / "source"
        source.write_bytes(bytes(range(256)) * 40_000)
        digest = ContentStore(open_objects(place), tmp_path / "writer").put_file(source)
        assert (
            ContentStore(open_objects(place), tmp_path / "reader").path(digest).read_bytes()
            == source.read_bytes()
        )


class ObjectLedgerSuite(LedgerSuite):
    """Suite of a ledger over remote objects.

    Subclass it, and provide the fixture `place`: the URL of an empty folder.
    """

    @pytest.fixture
    def opener(self, place: str) -> Opener:
        environ = {
            name: value for name, value in os.environ.items() if name.startswith(("AWS_", "AZURE_"))
        }
        return functools.partial(open_ledger, place, environ)

    def test_objects_create_of_existing_name_returns_false(self, place: str) -> None:
        one, other = open_objects(place), open_objects(place)
        assert one.create("lease", b"mine")
        assert not other.create("lease", b"yours")
        assert other.read("lease") == b"mine"
