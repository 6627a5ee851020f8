"""Frameworks that run in separate environments.

Their models are trained there on bundled data.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from onnx_ops.adapters.isolation.isolated_tools import IsolatedExporter
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.target import Target
from onnx_ops.errors import StageError, UserError
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import Dataset, ExportRequest, Tensors
from onnx_ops.testing.exporters import ExporterSuite

pytestmark = pytest.mark.nightly

Isolated = Callable[[str], IsolatedExporter]


class TestTensorflow(ExporterSuite):
    framework, run, settings = "tensorflow", "examples.digits_tensorflow:train", {"epochs": 3}

    @pytest.fixture(scope="class")
    @classmethod
    def exporter(cls, isolated: Isolated) -> IsolatedExporter:
        return isolated(cls.framework)

    @pytest.fixture(scope="class")
    @classmethod
    def trained(
        cls, exporter: IsolatedExporter, digits: Dataset, tmp_path_factory: pytest.TempPathFactory
    ) -> Path:
        folder = tmp_path_factory.mktemp("trained")
        exporter.train(cls.run, {"train": digits}, cls.settings, folder)
        return folder

    @pytest.fixture
    def model(self, exporter: IsolatedExporter, trained: Path) -> object:
        return exporter.load(trained)

    @pytest.fixture
    def section(self) -> Export:
        return Export(framework=self.framework)

    @pytest.fixture
    def samples(self, digits: Dataset) -> Tensors:
        return digits.head(32).inputs

    def test_export_of_trained_model_is_accurate(
        self, exported: tuple[object, Path], digits: Dataset
    ) -> None:
        (answers,) = OnnxRuntime().run(exported[1], Target(name="cpu"), (digits.inputs,))
        assert list(answers) == ["output"]
        assert np.mean(answers["output"].argmax(axis=1) == digits.label) > 0.9
        assert read_model_info(exported[1]).inputs[0].shape == ("batch", 64)

    def test_export_with_unsupported_opset_raises_user_error(
        self, exporter: IsolatedExporter, model: object, samples: Tensors, tmp_path: Path
    ) -> None:
        section = Export(framework=self.framework, opset=23)
        with pytest.raises(UserError, match=r"accepts opsets .*, not 23") as refused:
            exporter.export(
                model, ExportRequest(section=section, samples=samples, path=tmp_path / "m.onnx")
            )
        assert "Set export.opset: " in refused.value.remedy


class TestTflite(TestTensorflow):
    framework, run, settings = "tflite", "examples.digits_tflite:train", {"epochs": 3}


class TestPaddle(TestTensorflow):
    framework, run, settings = "paddle", "examples.digits_paddle:train", {"epochs": 40}


def test_train_that_returns_unsupported_model_raises_user_or_stage_error(
    isolated: Isolated, tmp_path: Path
) -> None:
    for framework, expected in (("tensorflow", "Keras model"), ("paddle", "not a static layer")):
        with pytest.raises((UserError, StageError), match=expected):
            isolated(framework).train("tests.nightly.strange:train", {}, {}, tmp_path)


def test_train_with_aborting_converter_raises_stage_error(
    isolated: Isolated, tmp_path: Path
) -> None:
    """Paddle2ONNX ends its process at an opset that it does not support."""
    with pytest.raises(StageError, match=r"signal SIGABRT|exit code") as failure:
        isolated("paddle").train("tests.nightly.strange:abort_at_opset_23", {}, {}, tmp_path)
    assert "opset" in failure.value.why.lower()
