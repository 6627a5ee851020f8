from __future__ import annotations

import numpy as np

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.serving.http.app import describe_tensor
from onnx_ops.serving.inference.tensors import DATATYPE_OF, DTYPE_OF_ONNX, get_numpy_dtype


def test_metadata_shows_free_dimensions_and_optional_inputs() -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", 2))
    assert describe_tensor(spec) == {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
    assert describe_tensor(spec, optional=True)["parameters"] == {"optional": True}


def test_the_names_of_types_cover_each_other() -> None:
    assert set(DTYPE_OF_ONNX.values()) == set(DATATYPE_OF)
    for dtype in DATATYPE_OF:
        assert np.dtype(get_numpy_dtype(dtype)).name == get_numpy_dtype(dtype)
