"""Keras on PyTorch, and transformers from configurations.

The transformers are for text and vision, encoders and decoders. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops import plugins
from onnx_ops.adapters.exporters.torch import HuggingfaceExporter, KerasExporter
from onnx_ops.domain.pipeline import Export
from onnx_ops.errors import NotFoundError, UserError
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import Dataset, Exporter, ExportRequest, Tensors
from onnx_ops.testing.exporters import ExporterSuite

# Keras causes this warning with NumPy 2.
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def images() -> Any:
    from sklearn.datasets import load_digits

    return (load_digits().images[:, None] / 16).astype(np.float32)


def words() -> Any:
    """Return digits as texts: each of 64 pixels is one of 17 words."""
    from sklearn.datasets import load_digits

    return load_digits().data.astype(np.int64)


def train(example: str, name: str) -> object:
    from sklearn.datasets import load_digits

    data = Dataset(inputs={name: images()}, label=load_digits().target)
    model: object = importlib.import_module(f"examples.{example}").train({"train": data}, epochs=1)
    return model


class TestKeras(ExporterSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def exporter(cls) -> Exporter:
        return KerasExporter()

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> object:
        return train("digits_keras", "image")

    @pytest.fixture
    def section(self) -> Export:
        return Export(framework="keras")

    @pytest.fixture
    def samples(self) -> Tensors:
        return {"image": images()[:32]}


class TestVision(TestKeras):
    @pytest.fixture(scope="class")
    @classmethod
    def exporter(cls) -> Exporter:
        return HuggingfaceExporter()

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> object:
        return train("digits_vit", "pixel_values")

    @pytest.fixture
    def samples(self) -> Tensors:
        return {"pixel_values": images()[:32]}


class TestText(TestVision):
    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> object:
        return fitted(bert(), lambda model, rows, labels: model(input_ids=rows, labels=labels).loss)

    @pytest.fixture
    def section(self) -> Export:
        axes = {0: "batch", 1: "length"}
        return Export(framework="huggingface", dynamic={"input_ids": axes, "attention_mask": axes})

    @pytest.fixture
    def samples(self) -> Tensors:
        rows = words()[:32]
        return {"input_ids": rows, "attention_mask": np.ones_like(rows)}

    def test_export_of_text_model_has_dynamic_length_axis(
        self, exported: tuple[object, Path]
    ) -> None:
        assert [spec.shape for spec in read_model_info(exported[1]).inputs] == [
            ("batch", "length")
        ] * 2


class TestEncoderAndDecoder(TestVision):
    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> object:
        return fitted(
            t5(), lambda model, rows, labels: model(input_ids=rows, labels=labels[:, None]).loss
        )

    @pytest.fixture
    def section(self) -> Export:
        return Export(
            framework="huggingface",
            dynamic={
                "input_ids": {0: "batch", 1: "length"},
                "decoder_input_ids": {0: "batch", 1: "written"},
            },
        )

    @pytest.fixture
    def samples(self) -> Tensors:
        rows = words()[:32]
        return {"input_ids": rows, "decoder_input_ids": rows[:, :5]}


def fitted(model: Any, loss: Callable[[Any, Any, Any], Any]) -> Any:
    import torch
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    rows, labels = torch.from_numpy(words()[:256]), torch.from_numpy(load_digits().target[:256])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(3):
        loss(model, rows, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def bert() -> Any:
    transformers = importlib.import_module("transformers")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    config = transformers.BertConfig(
        vocab_size=17, num_labels=10, attn_implementation="eager", **sizes
    )
    return transformers.BertForSequenceClassification(config)


def t5() -> Any:
    transformers = importlib.import_module("transformers")
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(
        vocab_size=17, decoder_start_token_id=0, attn_implementation="eager", **sizes
    )
    return transformers.T5ForConditionalGeneration(config)


def test_save_of_model_of_other_library_raises_user_error_and_saves_nothing(tmp_path: Path) -> None:
    import torch

    for exporter in (KerasExporter(), HuggingfaceExporter()):
        with pytest.raises(UserError, match="Linear is not a"):
            exporter.save(torch.nn.Linear(2, 2), tmp_path)
        with pytest.raises(NotFoundError):
            exporter.load(tmp_path)


def test_save_of_project_class_named_like_transformers_class_raises_user_error(
    tmp_path: Path,
) -> None:
    transformers = importlib.import_module("transformers")
    own = type("BertModel", (transformers.BertModel,), {})
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    with pytest.raises(UserError, match="BertModel is not a class of transformers"):
        HuggingfaceExporter().save(own(config), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_export_of_keras_model_with_fixed_length_raises_user_error_naming_layer(
    tmp_path: Path,
) -> None:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = importlib.import_module("keras")
    x = keras.Input((None, 3), name="x")
    model = keras.Model(x, keras.layers.Dense(2)(keras.layers.LSTM(4, name="memory")(x)))
    section = Export(framework="keras", dynamic={"x": {0: "batch", 1: "length"}})
    request = ExportRequest(
        section=section, samples={"x": np.ones((4, 9, 3), np.float32)}, path=tmp_path / "m.onnx"
    )
    with pytest.raises(
        UserError, match=r"axis 1 of x \(length\) at 9.*layer memory \(LSTM\), rnn.py"
    ):
        KerasExporter().export(model, request)


def test_plugins_load_keras_and_huggingface_exporters() -> None:
    assert isinstance(plugins.load("exporters", "keras"), KerasExporter)
    assert isinstance(plugins.load("exporters", "huggingface"), HuggingfaceExporter)
