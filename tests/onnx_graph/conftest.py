"""A model in a file, from which most tests start."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.testing.models import write_perceptron


@pytest.fixture
def perceptron(tmp_path: Path) -> Path:
    """Write a perceptron with three layers; return its file."""
    write_perceptron(tmp_path / "model.onnx")
    return tmp_path / "model.onnx"
