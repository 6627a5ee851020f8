"""Models that a pipeline brings, from files, URLs and MLflow."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.adapters.exporters.onnx import OnnxExporter
from onnx_ops.adapters.external_model import UserSuppliedModels
from onnx_ops.adapters.pinned_files import PinnedFiles
from onnx_ops.adapters.registries.mlflow_connection import MlflowModels
from onnx_ops.domain.artifact import digest_file
from onnx_ops.errors import NotFoundError, ServiceUnavailableError, UserError
from onnx_ops.onnx_graph.files import digest_model
from onnx_ops.testing.models import write_perceptron
from tests.support.external import write_external
from tests.support.web_files import serve_web_files


@pytest.fixture
def models(tmp_path: Path) -> UserSuppliedModels:
    return UserSuppliedModels(
        root=tmp_path,
        pinned=PinnedFiles(cache=tmp_path / "pinned"),
        registered=lambda: MlflowModels(f"sqlite:///{tmp_path / 'mlflow.db'}"),
    )


def test_user_model_at_local_path_is_used_in_place(
    models: UserSuppliedModels, tmp_path: Path
) -> None:
    write_perceptron(tmp_path / "mine.onnx")
    assert models.path("mine.onnx", tmp_path / "s") == tmp_path / "mine.onnx"
    assert models.digest("mine.onnx") == digest_model(tmp_path / "mine.onnx")


def test_user_model_digest_of_missing_path_raises_not_found_error_with_remedy(
    models: UserSuppliedModels,
) -> None:
    with pytest.raises(NotFoundError, match="no such model") as missing:
        models.digest("other.onnx")
    assert "project's root" in missing.value.remedy


def test_user_model_digest_of_url_changes_with_content(
    models: UserSuppliedModels, tmp_path: Path
) -> None:
    import fsspec

    write_perceptron(tmp_path / "mine.onnx")
    memory = fsspec.filesystem("memory")
    memory.put(f"{tmp_path}/mine.onnx", "/brought/mine.onnx")
    place = "memory://brought/mine.onnx"
    before = models.digest(place)
    assert models.digest(place) == before
    path = models.path(place, tmp_path / "s")
    assert digest_file(path) == digest_file(tmp_path / "mine.onnx")
    memory.pipe("/brought/mine.onnx", b"another model, of another size")
    assert models.digest(place) != before
    memory.rm("/brought", recursive=True)


def test_user_model_digest_of_file_depends_on_external_data(
    models: UserSuppliedModels, tmp_path: Path
) -> None:
    write_external(tmp_path / "mine.onnx", "weights.bin")
    before, graph = models.digest("mine.onnx"), digest_file(tmp_path / "mine.onnx")
    weights = tmp_path / "weights.bin"
    weights.write_bytes(weights.read_bytes()[::-1])
    assert digest_file(tmp_path / "mine.onnx") == graph
    assert models.digest("mine.onnx") != before
    weights.unlink()
    with pytest.raises(NotFoundError, match=r"weights\.bin"):
        models.digest("mine.onnx")


def test_user_model_at_pinned_address_is_downloaded_once(
    models: UserSuppliedModels, tmp_path: Path
) -> None:
    with serve_web_files() as web:
        web.files["mine.onnx"] = b"model"
        place = web.address("mine.onnx")
        before = models.digest(place)
        assert models.path(place, tmp_path / "s").read_bytes() == b"model"
        assert web.requests == ["/mine.onnx"]
    assert models.path(place, tmp_path / "s").read_bytes() == b"model"
    assert models.digest(place) == before


def test_user_model_in_folder_includes_external_data(
    models: UserSuppliedModels, tmp_path: Path
) -> None:
    import fsspec

    write_external(tmp_path / "mine.onnx", "weights.bin")
    memory = fsspec.filesystem("memory")
    memory.put(f"{tmp_path}/mine.onnx", "/brought/mine/mine.onnx")
    memory.put(f"{tmp_path}/weights.bin", "/brought/mine/weights.bin")
    path = models.path("memory://brought/mine", tmp_path / "s")
    saved = tmp_path / "saved"
    saved.mkdir()
    OnnxExporter().save(path, saved)
    assert {file.name for file in saved.iterdir()} == {"model.onnx", "weights.bin"}
    before = models.digest("memory://brought/mine")
    memory.pipe("/brought/mine/weights.bin", b"longer than it was before, by far")
    assert models.digest("memory://brought/mine") != before
    memory.rm("/brought", recursive=True)


def test_user_model_that_is_missing_or_unreachable_raises_error_without_secrets(
    models: UserSuppliedModels, tmp_path: Path
) -> None:
    with pytest.raises(NotFoundError, match="no such model"):
        models.digest("memory://brought/nothing.onnx")
    with pytest.raises(ServiceUnavailableError) as down:
        models.path(
            f"http://user:secret@127.0.0.1:9/m.onnx?secret#sha256={'0' * 64}", tmp_path / "s"
        )
    assert "secret" not in str(down.value)


@pytest.mark.parametrize("operation", ["exists", "isdir", "find"])
def test_user_model_digest_with_failing_file_system_raises_service_unavailable_error(
    models: UserSuppliedModels, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    import fsspec

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("403 Forbidden")

    memory = fsspec.filesystem("memory")
    memory.pipe("/refused/mine.onnx", b"model")
    monkeypatch.setattr(type(memory), operation, refuse)
    with pytest.raises(ServiceUnavailableError, match="403 Forbidden"):
        models.digest("memory://refused")
    monkeypatch.undo()
    memory.rm("/refused", recursive=True)


@pytest.mark.parametrize("place", ["s4://bucket/model.onnx", "zip://model.onnx::s4://bucket/a.zip"])
def test_user_model_digest_of_address_with_unknown_scheme_raises_user_error(
    models: UserSuppliedModels, place: str
) -> None:
    with pytest.raises(UserError, match="addresses that begin with s4://"):
        models.digest(place)


@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
def test_user_model_in_mlflow_is_fetched_by_version_or_alias_or_raises_distinct_errors(
    models: UserSuppliedModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow
    import onnx

    write_perceptron(tmp_path / "mine.onnx")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    mlflow.set_tracking_uri(uri)
    try:
        client = mlflow.MlflowClient(uri)
        experiment = client.create_experiment("e", artifact_location=str(tmp_path / "artifacts"))
        with mlflow.start_run(experiment_id=experiment):
            model = onnx.load(tmp_path / "mine.onnx")
            mlflow.onnx.log_model(
                model, name="m", registered_model_name="mine", pip_requirements=[]
            )
        client.set_registered_model_alias("mine", "best", "1")
    finally:
        mlflow.set_tracking_uri(None)  # type: ignore[arg-type] # None unsets it
    by_alias = models.digest("models:/mine@best")
    # The alias can move to another version, so its digest differs from that of version 1.
    assert by_alias != models.digest("models:/mine/1")
    for number, place in enumerate(("models:/mine/1", "models:/mine@best")):
        saved = tmp_path / f"saved-{number}"
        saved.mkdir()
        OnnxExporter().save(models.path(place, tmp_path / f"s-{number}"), saved)
        assert (saved / "model.onnx").is_file()
    with pytest.raises(NotFoundError):
        models.digest("models:/mine/7")
    with pytest.raises(UserError, match="names no version"):
        models.digest("models:/mine")

    def refuse(**_: object) -> None:
        raise LookupError("Unable to locate credentials")

    # The clients of artifact storage raise errors of any type.
    monkeypatch.setattr(mlflow.artifacts, "download_artifacts", refuse)
    with pytest.raises(ServiceUnavailableError, match="cannot be read now"):
        models.path("models:/mine/1", tmp_path / "denied")
