"""Models and rows for tests of the tools."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from onnx_ops.testing.models import FEATURES, rows, write_convolution, write_perceptron
from tests.support.external import write_external
from tests.support.pairs import write_changed


def write_models(folder: Path) -> None:
    """Write three models and `rows.npz`.

    `wrong.onnx` gives other answers than `good.onnx`. `other.onnx` takes other inputs.
    """
    write_changed(write_perceptron(folder / "good.onnx"), "third.bias", np.zeros_like, "wrong.onnx")
    write_convolution(folder / "other.onnx")
    np.savez(folder / "rows.npz", x=rows(50)["x"], label=np.arange(50))


def write_hostile(folder: Path) -> None:
    """Add files that must not crash any tool to those of `write_models`."""
    (folder / "garbage.onnx").write_bytes(bytes(range(256)) * 20)
    (folder / "empty.onnx").write_bytes(b"")
    (folder / "cut.onnx").write_bytes((folder / "good.onnx").read_bytes()[:700])
    write_external(folder / "escape.onnx", "../../etc/passwd")
    (folder / "garbage.npz").write_bytes(b"PK\x03\x04" + bytes(200))
    np.savez(folder / "pickled.npz", x=np.array([{"a": 1}], dtype=object))
    np.savez(folder / "short.npz", z=np.zeros(3))
    np.savez(folder / "shape.npz", x=np.zeros((3, FEATURES + 1), dtype=np.float32))
    huge = onnx.load(folder / "good.onnx")
    huge.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1 << 60
    onnx.save(huge, folder / "huge.onnx")
