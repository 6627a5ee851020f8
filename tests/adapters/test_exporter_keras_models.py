"""Keras models: the backend that an exporter needs, and the way to pass inputs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onnx_ops.adapters.exporters.keras_models import (
    call_keras,
    check_keras_inputs,
    import_keras,
)
from onnx_ops.adapters.exporters.tensorflow import TensorflowExporter
from onnx_ops.errors import UserError


def use_backend(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Replace Keras by a module that uses this backend, and TensorFlow by an empty module."""
    keras = SimpleNamespace(backend=SimpleNamespace(backend=lambda: name), Model=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "keras", keras)
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace())
    monkeypatch.setenv("KERAS_BACKEND", name)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")


@pytest.mark.parametrize(
    ("used", "backend", "other"),
    [
        ("torch", "tensorflow", " For torch, set export.framework: keras."),
        ("tensorflow", "torch", " For tensorflow, set export.framework: tensorflow."),
        ("jax", "tensorflow", ""),
    ],
)
def test_import_keras_on_other_backend_raises_user_error_with_exporter(
    monkeypatch: pytest.MonkeyPatch, used: str, backend: str, other: str
) -> None:
    use_backend(monkeypatch, used)
    with pytest.raises(UserError, match=f"Keras uses the backend {used}, not {backend}") as caught:
        import_keras(backend)
    remedy = f"Set KERAS_BACKEND={backend} before Keras is imported."
    assert caught.value.remedy == remedy + other


def test_tensorflow_exporter_with_keras_model_on_other_backend_raises_user_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_backend(monkeypatch, "jax")
    (tmp_path / "model.keras").touch()
    exporter = TensorflowExporter()
    with pytest.raises(UserError, match="Keras uses the backend jax, not tensorflow"):
        exporter.save(SimpleNamespace(), tmp_path)
    with pytest.raises(UserError, match="Keras uses the backend jax, not tensorflow"):
        exporter.load(tmp_path)


class Wrapper:
    """A subclassed model that passes its arguments on."""

    def call(self, *inputs: Any, **options: Any) -> Any:
        return inputs, options

    def __call__(self, *inputs: Any, training: bool) -> Any:
        return self.call(*inputs)


@pytest.mark.parametrize("names", [("user", "item"), ("inputs", "options")])
def test_call_keras_of_model_with_variadic_call_passes_dictionary_even_for_parameter_names(
    names: tuple[str, ...],
) -> None:
    rows = dict.fromkeys(names, 1.0)
    check_keras_inputs(Wrapper(), names)
    assert call_keras(Wrapper(), rows) == ((rows,), {})
