"""A model in a file, which most tests begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.testing.models import write_perceptron


@pytest.fixture
def perceptron(tmp_path: Path) -> Path:
    """The file of a perceptron with three layers."""
    write_perceptron(tmp_path / "model.onnx")
    return tmp_path / "model.onnx"
