"""An ONNX file whose data are in another file.

The location of that file may be hostile.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper


def write_external(path: Path, location: str, *, factors: Sequence[float] = (2.0, 3.0)) -> None:
    """Write `y = x * factor`, whose factors are in a file named `location`.

    `location` is not checked, because it may be hostile. The data file itself is written only if
    `location` is a plain name.
    """
    data = np.asarray(factors, dtype=np.float32)
    factor = TensorProto(
        name="factor",
        data_type=TensorProto.FLOAT,
        dims=data.shape,
        data_location=TensorProto.EXTERNAL,
    )
    factor.external_data.add(key="location", value=location)
    factor.external_data.add(key="length", value=str(data.nbytes))
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "factor"], ["y"], name="scale")],
        "external",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", len(data)])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", len(data)])],
        [factor],
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    path.write_bytes(model.SerializeToString(deterministic=True))
    if re.fullmatch(r"[\w.-]*\w", location):
        (path.parent / location).write_bytes(data.tobytes())
