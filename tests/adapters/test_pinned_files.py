"""Downloads of pinned addresses, and their cache."""

from __future__ import annotations

import io
import multiprocessing
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnx_ops.adapters.data.file import FileSource
from onnx_ops.adapters.pinned_files import PinnedFiles
from onnx_ops.domain.pipeline import FileData
from onnx_ops.errors import (
    DigestMismatchError,
    NotFoundError,
    RefusedError,
    ServiceUnavailableError,
    UserError,
)
from onnx_ops.onnx_graph.files import find_model_file
from onnx_ops.testing.models import write_perceptron
from tests.support.web_files import COMMIT, WebFiles, serve_web_files


@pytest.fixture
def web() -> Iterator[WebFiles]:
    with serve_web_files() as served:
        yield served


@pytest.fixture
def pinned(tmp_path: Path) -> PinnedFiles:
    return PinnedFiles(cache=tmp_path / "cache")


@pytest.fixture
def hub(web: WebFiles, monkeypatch: pytest.MonkeyPatch) -> WebFiles:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", web.url)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        web.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    return web


def test_fetch_of_web_file_downloads_once_and_needs_no_server_afterwards(
    web: WebFiles, pinned: PinnedFiles
) -> None:
    web.files["m.onnx"] = b"model"
    place = web.address("m.onnx")
    assert pinned.find(place) is None
    assert pinned.fetch(place).read_bytes() == b"model"
    web.statuses["m.onnx"] = 503
    assert pinned.fetch(place).read_bytes() == b"model"
    assert pinned.find(place) == pinned.fetch(place)
    assert web.requests == ["/m.onnx"]


def test_fetch_of_damaged_file_downloads_again(web: WebFiles, pinned: PinnedFiles) -> None:
    web.files["m.onnx"] = b"model"
    place = web.address("m.onnx")
    pinned.fetch(place).write_bytes(b"other")
    assert pinned.find(place) is None
    assert pinned.fetch(place).read_bytes() == b"model"


def test_fetch_of_changed_file_raises_digest_mismatch_error_and_keeps_nothing(
    web: WebFiles, pinned: PinnedFiles
) -> None:
    web.files["m.onnx"] = b"model"
    place = web.address("m.onnx")
    web.files["m.onnx"] = b"changed"
    with pytest.raises(DigestMismatchError, match="differs from the pinned content"):
        pinned.fetch(place)
    assert pinned.find(place) is None
    web.files["m.onnx"] = b"model"
    assert pinned.fetch(place).read_bytes() == b"model"


@pytest.mark.parametrize(
    ("status", "error"),
    [(404, NotFoundError), (403, RefusedError), (503, ServiceUnavailableError)],
)
def test_fetch_with_error_status_raises_matching_error_without_signature(
    web: WebFiles, pinned: PinnedFiles, status: int, error: type[Exception]
) -> None:
    web.statuses["m.onnx"] = status
    with pytest.raises(error, match=r"m\.onnx") as raised:
        pinned.fetch(f"{web.url}/m.onnx?signature=secret#sha256={'0' * 64}")
    assert "secret" not in str(raised.value)


def test_fetch_without_server_raises_service_unavailable_error(pinned: PinnedFiles) -> None:
    with pytest.raises(ServiceUnavailableError, match="could not be downloaded"):
        pinned.fetch(f"http://127.0.0.1:9/m.onnx#sha256={'0' * 64}")


def _fetch(cache: Path, place: str) -> None:
    assert PinnedFiles(cache=cache).fetch(place).read_bytes() == b"model" * 100_000


def test_concurrent_fetches_download_once(web: WebFiles, tmp_path: Path) -> None:
    web.files["m.onnx"] = b"model" * 100_000
    spawn = multiprocessing.get_context("spawn")
    place = web.address("m.onnx")
    processes = [spawn.Process(target=_fetch, args=(tmp_path / "c", place)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert web.requests == ["/m.onnx"]


def test_fetch_after_killed_download_starts_again(web: WebFiles, pinned: PinnedFiles) -> None:
    web.files["m.onnx"] = b"model"
    place = web.address("m.onnx")
    folder = pinned.fetch(place).parents[1]
    folder.rename(folder.with_name(f"{folder.name}.part"))
    (folder.with_name(f"{folder.name}.part") / "files" / "m.onnx").write_bytes(b"mo")
    assert pinned.fetch(place).read_bytes() == b"model"


def test_fetch_of_hub_folder_or_file_includes_external_data(
    hub: WebFiles, pinned: PinnedFiles
) -> None:
    hub.hub["o/n"] = {
        "onnx/model.onnx": b"model",
        "onnx/model.onnx_data": b"weights",
        "pytorch_model.bin": b"large",
    }
    folder = pinned.fetch(f"hf://o/n@{COMMIT}/onnx")
    assert {path.name for path in folder.iterdir()} == {"model.onnx", "model.onnx_data"}
    file = pinned.fetch(f"hf://o/n@{COMMIT}/onnx/model.onnx")
    assert file.read_bytes() == b"model"
    assert file.with_name("model.onnx_data").read_bytes() == b"weights"
    assert not any("pytorch" in request for request in hub.requests)
    hub.hub.clear()
    hub.requests.clear()
    assert pinned.fetch(f"hf://o/n@{COMMIT}/onnx") == folder
    assert not hub.requests


def test_fetch_of_missing_hub_file_or_repository_raises_not_found_error(
    hub: WebFiles, pinned: PinnedFiles
) -> None:
    hub.hub["o/n"] = {"README.md": b""}
    with pytest.raises(NotFoundError, match="has no 'onnx' at this commit"):
        pinned.fetch(f"hf://o/n@{COMMIT}/onnx")
    with pytest.raises(NotFoundError, match="no such repository or commit"):
        pinned.fetch(f"hf://o/other@{COMMIT}/onnx")


def _pack_tar(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def _pack_zip(files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return packed.getvalue()


def _model_zoo_files(folder: Path) -> tuple[dict[str, bytes], np.ndarray, str, str]:
    """Return the files of a published model with two sets of test data, and its rows."""
    path = write_perceptron(folder / "mlp.onnx")
    model = onnx.load(path)
    name, output = model.graph.input[0].name, model.graph.output[0].name
    width = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    rows = np.arange(4 * width, dtype=np.float32).reshape(4, width)
    files = {"mlp/mlp.onnx": path.read_bytes()}
    for number in range(2):
        part = rows[2 * number : 2 * number + 2]
        place = f"mlp/test_data_set_{number}"
        files[f"{place}/input_0.pb"] = numpy_helper.from_array(part).SerializeToString()
        files[f"{place}/output_0.pb"] = numpy_helper.from_array(
            part[:, 0].astype(np.int64)
        ).SerializeToString()
    return files, rows, name, output


@pytest.mark.parametrize("suffix", ["tar.gz", "zip"])
def test_fetch_and_load_of_model_zoo_archive_return_model_rows_and_labels(
    web: WebFiles, tmp_path: Path, suffix: str
) -> None:
    files, rows, name, output = _model_zoo_files(tmp_path)
    web.files[f"mlp.{suffix}"] = (_pack_tar if suffix == "tar.gz" else _pack_zip)(files)
    place = web.address(f"mlp.{suffix}")
    pinned = PinnedFiles(cache=tmp_path / "pinned")
    assert find_model_file(pinned.fetch(place)).read_bytes() == files["mlp/mlp.onnx"]
    source = FileSource().with_folders(tmp_path / "environments", tmp_path)
    plain, labelled = FileData(file=place), FileData(file=place, label=output)
    assert {key: array.tolist() for key, array in source.load(plain, tmp_path).items()} == {
        name: rows.tolist()
    }
    assert source.load(labelled, tmp_path)[output].tolist() == rows[:, 0].tolist()
    sample = source.sample(plain, tmp_path)
    assert sample is not None
    assert sample.whole
    assert source.fingerprint(plain, tmp_path) == pinned.digest(place)


def test_load_of_model_zoo_archive_with_unknown_label_raises_user_error(
    web: WebFiles, tmp_path: Path
) -> None:
    web.files["mlp.zip"] = _pack_zip(_model_zoo_files(tmp_path)[0])
    source = FileSource().with_folders(tmp_path / "environments", tmp_path)
    with pytest.raises(UserError, match="has no output 'other'"):
        source.load(FileData(file=web.address("mlp.zip"), label="other"), tmp_path)


def test_fetch_of_invalid_archive_raises_user_error_or_skips_paths_outside_target(
    web: WebFiles, tmp_path: Path
) -> None:
    pinned = PinnedFiles(cache=tmp_path / "pinned")
    web.files["evil.tar.gz"] = _pack_tar({"../../../evil": b"x"})
    with pytest.raises(UserError, match="the archive cannot be unpacked"):
        pinned.fetch(web.address("evil.tar.gz"))
    web.files["evil.zip"] = _pack_zip({"../../../evil": b"x", "good": b"y"})
    pinned.fetch(web.address("evil.zip"))
    assert not list(tmp_path.rglob("evil"))


def _set_zip_field(packed: bytes, offset: int, value: int) -> bytes:
    """Change a field of the only file's two headers; `offset` is that of the local header."""
    changed, central = bytearray(packed), packed.index(b"PK\1\2")
    changed[offset] = changed[central + offset + 2] = value
    return bytes(changed)


_FILE = {"m.onnx": b"model" * 100}
_DAMAGED = {
    "not an archive.zip": b"no archive",
    "changed content.zip": _pack_zip(_FILE).replace(b"model", b"other", 1),
    "cut.zip": _pack_zip(_FILE)[:-10],
    "changed lzma.zip": _pack_zip(_FILE, zipfile.ZIP_LZMA).replace(b"]\0\0\x80", b"\xff" * 4),
    "encrypted.zip": _set_zip_field(_pack_zip(_FILE), 6, 1),
    "unknown compression.zip": _set_zip_field(_pack_zip(_FILE), 8, 99),
    "cut.tar.gz": _pack_tar(_FILE)[:-20],
    "changed content.tgz": _pack_tar(_FILE)[:20] + b"\xff" * 40 + _pack_tar(_FILE)[60:],
    "not an archive.tar": b"no archive",
}


@pytest.mark.parametrize("name", _DAMAGED)
def test_fetch_of_damaged_or_encrypted_archive_raises_user_error(
    web: WebFiles, pinned: PinnedFiles, name: str
) -> None:
    file = name.replace(" ", "-")
    web.files[file] = _DAMAGED[name]
    with pytest.raises(UserError, match="the archive cannot be unpacked"):
        pinned.fetch(web.address(file))
    assert pinned.find(web.address(file)) is None


def test_load_of_invalid_or_missing_test_data_raises_user_error(
    web: WebFiles, tmp_path: Path
) -> None:
    files, _, _, _ = _model_zoo_files(tmp_path)
    files["mlp/test_data_set_1/input_0.pb"] = numpy_helper.from_array(
        np.ones((2, 3), np.float32)
    ).SerializeToString()
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match="cannot be joined over 2 sets"):
        FileSource().load(FileData(file="mlp"), tmp_path)
    (tmp_path / "mlp/test_data_set_1/input_0.pb").write_bytes(b"\xff\xff")
    with pytest.raises(UserError, match=r"test_data_set_1/input_0\.pb cannot be read as a tensor"):
        FileSource().load(FileData(file="mlp"), tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="nor test data"):
        FileSource().load(FileData(file="empty"), tmp_path)
