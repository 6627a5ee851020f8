"""Conformance suite for exporters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.target import Target
from onnx_ops.onnx_graph.compatibility import check_model
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports.data import Array, Tensors
from onnx_ops.ports.export import Exporter, ExportRequest

TOLERANCE = 1e-4
"""Tolerance relative to the largest value of an output.

It is wide enough for the rounding of float32, and narrow enough to detect wrong computations.
"""


class ExporterSuite:
    """Conformance of an exporter.

    Subclass it, and define the fixtures `exporter`, `model` (trained), `section` and `samples` (at
    least 17 rows).
    """

    @pytest.fixture
    def exported(
        self, exporter: Exporter, model: object, section: Export, samples: Tensors, tmp_path: Path
    ) -> tuple[object, Path]:
        """Return the model after `save` and `load`, and its export."""
        saved = tmp_path / "saved"
        saved.mkdir()
        exporter.save(model, saved)
        loaded = exporter.load(saved)
        path = tmp_path / "model.onnx"
        exporter.export(loaded, ExportRequest(section=section, samples=samples, path=path))
        return loaded, path

    def test_export_is_valid_onnx_of_requested_versions(
        self, exported: tuple[object, Path], section: Export, samples: Tensors
    ) -> None:
        check_model(exported[1])
        model_info = read_model_info(exported[1])
        assert model_info.opsets.get("", section.opset) == section.opset
        assert model_info.ir_version == section.ir_version
        assert [spec.name for spec in model_info.inputs] == list(samples)

    def test_export_at_several_batch_sizes_matches_source(
        self, exporter: Exporter, exported: tuple[object, Path], samples: Tensors
    ) -> None:
        feeds = tuple(
            {name: array[:count] for name, array in samples.items()} for count in (1, 3, 17)
        )
        answers = OnnxRuntime().run(exported[1], Target(name="cpu"), feeds)
        for feed, answer in zip(feeds, answers, strict=True):
            single = exporter.reference(exported[0], feed, "float32")
            double = exporter.reference(exported[0], feed, "float64")
            assert single or double
            for expected in (single, double):
                for name in expected or {}:
                    _assert_close(answer[name], (expected or {})[name])

    def test_export_of_same_model_is_deterministic(
        self,
        exporter: Exporter,
        exported: tuple[object, Path],
        section: Export,
        samples: Tensors,
        tmp_path: Path,
    ) -> None:
        again = tmp_path / "elsewhere" / "model.onnx"
        again.parent.mkdir()
        exporter.export(exported[0], ExportRequest(section=section, samples=samples, path=again))
        assert digest_file(again) == digest_file(exported[1])

    def test_export_contains_no_local_path(
        self, exported: tuple[object, Path], tmp_path: Path
    ) -> None:
        data = exported[1].read_bytes()
        for folder in (tmp_path, Path.cwd(), Path(np.__file__).parent.parent):
            assert str(folder).encode() not in data

    def test_export_leaves_model_unchanged(
        self, exporter: Exporter, model: object, section: Export, samples: Tensors, tmp_path: Path
    ) -> None:
        before = exporter.reference(model, samples, "float32") or {}
        exporter.reference(model, samples, "float64")
        exporter.export(
            model, ExportRequest(section=section, samples=samples, path=tmp_path / "model.onnx")
        )
        after = exporter.reference(model, samples, "float32") or {}
        assert before.keys() == after.keys()
        for name in before:
            np.testing.assert_array_equal(before[name], after[name])


def _assert_close(answer: Array, expected: Array) -> None:
    assert answer.shape == expected.shape
    if expected.dtype.kind == "f":
        wanted = expected.astype(np.float64)
        error = float(np.abs(answer.astype(np.float64) - wanted).max())
        assert error <= TOLERANCE * float(np.abs(wanted).max())
    else:
        np.testing.assert_array_equal(answer, expected)
