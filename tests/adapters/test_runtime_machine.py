"""A provider that cannot run is told, never replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError

TARGET = Target(name="cpu-1t")


def test_a_provider_that_fails_is_not_replaced_in_silence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime's own fallback prints, and goes on with other providers."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"not a model")
    with pytest.raises(MeasurementError) as caught:
        OnnxRuntime().facts(path, TARGET)
    assert "\n" not in str(caught.value)
    assert "Falling back" not in "".join(capfd.readouterr())
