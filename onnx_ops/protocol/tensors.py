"""Element types and tensor metadata, as the Open Inference Protocol v2 names them.

https://github.com/kserve/open-inference-protocol (specification/protocol/inference_rest.md)
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx_ops.domain.artifact import TensorSpec

DTYPE_OF_ONNX: Mapping[str, str] = {
    "tensor(bool)": "bool",
    "tensor(uint8)": "uint8",
    "tensor(uint16)": "uint16",
    "tensor(uint32)": "uint32",
    "tensor(uint64)": "uint64",
    "tensor(int8)": "int8",
    "tensor(int16)": "int16",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(string)": "string",
}
"""The name of an element type in `TensorSpec.dtype`, by the runtime's name of it."""

DATATYPE_OF: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
    "string": "BYTES",
}
"""The Open Inference name of an element type."""


def numpy_dtype(dtype: str) -> str:
    """The array type that holds such elements. Numpy has no bfloat16: its 16 bits are held as they are."""
    return {"string": "object", "bfloat16": "uint16"}.get(dtype, dtype)


def metadata(spec: TensorSpec, *, optional: bool = False) -> dict[str, object]:
    """A model's input or output as its metadata shows it: -1 stands for a dimension that is free."""
    shape = [d if isinstance(d, int) else -1 for d in spec.shape]
    document: dict[str, object] = {"name": spec.name, "datatype": DATATYPE_OF[spec.dtype], "shape": shape}
    return {**document, "parameters": {"optional": True}} if optional else document
