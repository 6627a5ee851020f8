"""Ready ONNX files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx_ops.adapters.exporters.onnx import OnnxExporter
from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.pipeline import Export
from onnx_ops.errors import NotFoundError, RefusedError, UserError
from onnx_ops.onnx_graph.compatibility import list_user_model_notes
from onnx_ops.ports import ExportRequest, Tensors
from onnx_ops.testing.exporters import ExporterSuite
from onnx_ops.testing.models import rows, write_perceptron
from tests.support.external import write_external
from tests.support.zipmap import zipped

SECTION = Export(framework="onnx")


class TestReadyFile(ExporterSuite):
    @pytest.fixture
    def exporter(self) -> OnnxExporter:
        return OnnxExporter()

    @pytest.fixture
    def model(self, tmp_path: Path) -> object:
        path = tmp_path / "mine.onnx"
        write_perceptron(path)
        return path

    @pytest.fixture
    def section(self) -> Export:
        return SECTION

    @pytest.fixture
    def samples(self) -> Tensors:
        return rows(17)


def test_external_weights_come_along(tmp_path: Path) -> None:
    for name in ("given", "saved", "exported"):
        (tmp_path / name).mkdir()
    write_external(tmp_path / "given" / "mine.onnx", "weights.bin")
    exporter = OnnxExporter()
    exporter.save(tmp_path / "given", tmp_path / "saved")
    path = tmp_path / "exported" / "model.onnx"
    samples = {"x": np.ones((2, 2), np.float32)}
    loaded = exporter.load(tmp_path / "saved")
    exporter.export(loaded, ExportRequest(section=SECTION, samples=samples, path=path))
    assert digest_file(path) == digest_file(tmp_path / "given" / "mine.onnx")
    assert digest_file(path.parent / "weights.bin") == digest_file(tmp_path / "given" / "weights.bin")
    answers = exporter.reference(path, samples, "float32")
    assert answers is not None
    np.testing.assert_array_equal(answers["y"], [[2, 3], [2, 3]])
    assert exporter.reference(path, samples, "float64") is None


def test_a_hostile_file_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    write_external(tmp_path / "mine.onnx", "../../etc/passwd")
    with pytest.raises(RefusedError):
        OnnxExporter().save(tmp_path / "mine.onnx", tmp_path / "saved")
    assert list((tmp_path / "saved").iterdir()) == []


@pytest.mark.parametrize(("opset", "ir_version"), [(19, 10), (18, 11)])
def test_a_file_newer_than_asked_for_is_refused(tmp_path: Path, opset: int, ir_version: int) -> None:
    write_perceptron(tmp_path / "mine.onnx", opset=opset, ir_version=ir_version)
    request = ExportRequest(section=SECTION, samples=rows(2), path=tmp_path / "model.onnx")
    with pytest.raises(UserError, match=f"opset {opset} and IR version {ir_version}"):
        OnnxExporter().export(tmp_path / "mine.onnx", request)
    assert not request.path.exists()


def test_a_path_must_lead_to_one_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        OnnxExporter().save(tmp_path / "none.onnx", tmp_path)
    with pytest.raises(NotFoundError, match=r"no \.onnx files"):
        OnnxExporter().load(tmp_path)
    for name in ("a.onnx", "b.onnx"):
        write_perceptron(tmp_path / name)
    with pytest.raises(NotFoundError, match=r"2 \.onnx files"):
        OnnxExporter().load(tmp_path)


def test_rows_that_the_model_refuses_are_an_error(tmp_path: Path) -> None:
    write_perceptron(tmp_path / "mine.onnx")
    with pytest.raises(ValueError, match="refuses"):
        OnnxExporter().reference(tmp_path / "mine.onnx", {"x": np.zeros((1, 3), np.float32)}, "float32")


def test_maps_become_a_matrix_and_the_pipeline_is_told(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    onnx.save(zipped([0, 1, 2]), tmp_path / "mine.onnx")
    (note,) = list_user_model_notes(tmp_path / "mine.onnx")
    assert note.startswith("probabilities is a sequence of maps (ZipMap)")
    OnnxExporter().save(tmp_path / "mine.onnx", tmp_path / "saved")
    answers = OnnxExporter().reference(tmp_path / "saved/model.onnx", {"x": np.zeros((2, 3), np.float32)}, "float32")
    assert answers is not None
    np.testing.assert_allclose(np.float32(answers["probabilities"]), np.full((2, 3), 1 / 3), atol=1e-6)
    assert list_user_model_notes(tmp_path / "saved/model.onnx") == []


def test_a_fixed_batch_is_told(tmp_path: Path) -> None:
    write_perceptron(tmp_path / "mine.onnx", batch=4)
    (note,) = list_user_model_notes(tmp_path / "mine.onnx")
    assert note.startswith("it takes batches of 4 only")
    write_perceptron(tmp_path / "mine.onnx")
    assert list_user_model_notes(tmp_path / "mine.onnx") == []
