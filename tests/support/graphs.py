"""Small ONNX models, written as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper, parser


def parse_graph(
    text: str,
    /,
    *,
    opset: int = 18,
    domains: Mapping[str, int] | None = None,
    ir_version: int = 10,
    **constants: Any,
) -> onnx.ModelProto:
    """Return the model of an ONNX text.

    The text is like `(float[N,2] x) => (float[N,2] y) { [its name] y = Relu(x) }`. Constants are
    given by name. `domains` are further operator sets, whose operators are written
    `own.Softsign(x)`. Functions may follow the graph.
    """
    imports = ", ".join(
        f'"{domain}" : {version}' for domain, version in {"": opset, **(domains or {})}.items()
    )
    model = parser.parse_model(f"<ir_version: {ir_version}, opset_import: [{imports}]> g {text}")
    model.graph.initializer.extend(
        value
        if isinstance(value, TensorProto)
        else numpy_helper.from_array(np.asarray(value), name)
        for name, value in constants.items()
    )
    return model


def write_graph(path: Path, text: str, /, **settings: Any) -> Path:
    """Write the model that `parse_graph` returns, and return its path."""
    onnx.save(parse_graph(text, **settings), path)
    return path
