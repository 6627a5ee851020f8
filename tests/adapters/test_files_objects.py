"""Named objects: atomic writes, exclusive creation, remains of a killed writer."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NoReturn

import fsspec
import pytest

from onnx_ops.adapters.files import (
    FsspecObjects,
    LocalObjects,
    ObjectStore,
    exclusive_lock,
    open_objects,
)
from onnx_ops.errors import ConflictError, MissingPackageError, ServiceUnavailableError, UserError
from onnx_ops.scratch import TEMPORARY, durable_file
from tests.support.lock_holder import run_lock_holder


@pytest.fixture(params=["local", "remote"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return LocalObjects(tmp_path / "objects")
    return FsspecObjects(f"memory://{uuid.uuid4().hex}/objects")


def test_object_store_read_returns_written_data(objects: ObjectStore) -> None:
    assert objects.read("a/b") is None
    objects.write("a/b", b"one")
    assert objects.read("a/b") == b"one"
    objects.write("a/b", b"")
    assert objects.read("a/b") == b""


def test_object_store_create_of_existing_name_returns_false(objects: ObjectStore) -> None:
    assert objects.create("a/b", b"first")
    assert not objects.create("a/b", b"second")
    assert objects.read("a/b") == b"first"


def test_object_store_list_names_returns_sorted_direct_children(objects: ObjectStore) -> None:
    assert objects.list_names("") == []
    for name in ("b", "a/2", "a/1", "a/deep/3"):
        objects.write(name, b"x")
    assert objects.list_names("") == ["a", "b"]
    assert objects.list_names("a") == ["1", "2", "deep"]
    assert objects.list_names("nowhere") == []


def test_object_store_list_names_ignores_file_of_killed_writer(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    objects.write("a/whole", b"x")
    (tmp_path / "a" / f"{TEMPORARY}half").write_bytes(b"x")
    assert objects.list_names("a") == ["whole"]


def test_object_store_delete_of_missing_object_succeeds(objects: ObjectStore) -> None:
    objects.write("a", b"x")
    objects.delete("a")
    objects.delete("a")
    assert objects.read("a") is None


def test_object_store_download_of_uploaded_file_returns_its_content(
    objects: ObjectStore, tmp_path: Path
) -> None:
    source, copy = tmp_path / "source", tmp_path / "below" / "copy"
    source.write_bytes(os.urandom(3 << 20))
    objects.upload("big/file", source)
    assert objects.download("big/file", copy)
    assert copy.read_bytes() == source.read_bytes()


def test_object_store_download_of_missing_object_leaves_destination_unchanged(
    objects: ObjectStore, tmp_path: Path
) -> None:
    place = tmp_path / "below" / "copy"
    assert not objects.download("nothing", place)
    assert not place.exists()
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(b"kept")
    assert not objects.download("nothing", place)
    assert [path.name for path in place.parent.iterdir()] == ["copy"]
    assert place.read_bytes() == b"kept"


def test_durable_file_with_failing_block_keeps_old_content(tmp_path: Path) -> None:
    def fail(path: Path) -> NoReturn:
        with durable_file(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    (tmp_path / "file").write_text("old")
    with pytest.raises(RuntimeError):
        fail(tmp_path / "file")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "old"}


def test_open_objects_returns_store_for_url_scheme(tmp_path: Path) -> None:
    for url in (str(tmp_path), f"file://{tmp_path}"):
        local = open_objects(url)
        assert isinstance(local, LocalObjects)
        assert local.root == tmp_path
    assert isinstance(open_objects("memory://x"), FsspecObjects)


def test_fsspec_objects_without_package_or_service_raise_distinct_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(MissingPackageError):
        FsspecObjects("dropbox://nobody/nothing")
    objects = FsspecObjects("memory://x")

    def unreachable(*_: object, **__: object) -> NoReturn:
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(objects._fs, "cat_file", unreachable)
    with pytest.raises(ServiceUnavailableError) as caught:
        objects.read("a")
    assert caught.value.where == "memory://x"


def test_list_objects_below_prefix_returns_names_sizes_and_times(
    objects: ObjectStore, tmp_path: Path
) -> None:
    assert objects.list_objects("a") == []
    for name, content in (("a/2", b"xx"), ("a/deep/er/1", b"x"), ("b/1", b"x")):
        objects.write(name, content)
    found = objects.list_objects("a")
    assert [(one.name, one.size_bytes) for one in found] == [("a/2", 2), ("a/deep/er/1", 1)]
    (tmp_path / "now").touch()
    now = (tmp_path / "now").stat().st_mtime
    assert all(now - 3600 < one.at <= now + 3600 for one in found)
    assert [one.name for one in objects.list_objects("a/deep")] == ["a/deep/er/1"]


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("memory://key:secret@bucket/ledger", "memory://bucket/ledger"),
        ("memory://models@account.example/ledger", "memory://models@account.example/ledger"),
        ("memory://bucket/ledger?sig=secret", "memory://bucket/ledger"),
        ("/srv/ledger", "/srv/ledger"),
    ],
)
def test_object_store_place_contains_no_credentials(url: str, place: str) -> None:
    assert open_objects(url).place == place


class TestStoreThatFails:
    """Clients of S3 and Blob Storage at a server that answers 503, or not at all."""

    @pytest.fixture
    def requests(self) -> list[str]:
        return []

    @pytest.fixture
    def end(self) -> Iterator[threading.Event]:
        event = threading.Event()
        yield event
        event.set()

    @pytest.fixture(params=["s3", "abfs"])
    def store(
        self,
        request: pytest.FixtureRequest,
        requests: list[str],
        end: threading.Event,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Iterator[str]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requests.append(self.path)
                if "hung" in self.path:
                    end.wait()
                self.send_error(503)

            do_HEAD = do_GET  # noqa: N815 (a name of the standard library)

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_port}"
            key = "AccountName=devstoreaccount1;AccountKey=a2V5"
            fsspec.get_filesystem_class(request.param).clear_instance_cache()
            monkeypatch.setenv("AWS_ENDPOINT_URL", address)
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            monkeypatch.setenv(
                "AZURE_STORAGE_CONNECTION_STRING", f"{key};BlobEndpoint={address}/devstoreaccount1"
            )
            yield f"{request.param}://{uuid.uuid4().hex}"
            fsspec.get_filesystem_class(request.param).clear_instance_cache()
            end.set()
            server.shutdown()

    def test_object_store_request_with_deadline_is_sent_once(
        self, store: str, requests: list[str]
    ) -> None:
        with pytest.raises(ServiceUnavailableError):
            open_objects(store, deadline_s=30).read("head")
        assert len(requests) == 1

    def test_object_store_request_without_answer_ends_at_deadline(
        self, store: str, requests: list[str], end: threading.Event
    ) -> None:
        with pytest.raises(ServiceUnavailableError):
            open_objects(store, deadline_s=0.5).read("hung")
        assert len(requests) == 1
        assert not end.is_set()


def test_exclusive_lock_raises_conflict_error_only_while_holder_runs(tmp_path: Path) -> None:
    lock = tmp_path / "folder" / "apply.lock"
    with (
        run_lock_holder(lock),
        pytest.raises(ConflictError),
        exclusive_lock(lock, 0.05, where="here"),
    ):
        pass
    with run_lock_holder(lock) as process:
        process.kill()
        with exclusive_lock(lock, 60, where="here"):
            pass


def test_open_objects_of_url_without_account_raises_user_error() -> None:
    with pytest.raises(UserError, match="abfs://container@/x: the object store cannot be opened"):
        open_objects("abfs://container@/x", options={"anon": False})
