"""What an ONNX file says about itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.domain.artifact import ModelInfo, TensorSpec
from onnx_ops.onnx_graph.files import external_files, nodes, read_structure

if TYPE_CHECKING:
    import onnx


def info(path: Path) -> ModelInfo:
    """Versions, inputs, outputs and size, without loading weights.

    Raises:
        NotFoundError: there is no such file.
        UserError: it is not ONNX.
        RefusedError: it names external data outside its folder.
    """
    model = read_structure(path)
    constants = {tensor.name for tensor in model.graph.initializer}
    return ModelInfo(
        ir_version=model.ir_version,
        opsets={"" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in model.opset_import},
        inputs=tuple(_spec(value) for value in model.graph.input if value.name not in constants),
        outputs=tuple(_spec(value) for value in model.graph.output),
        nodes=len(model.graph.node),
        size_bytes=path.stat().st_size + sum(f.stat().st_size for f in external_files(model, path.parent)),
    )


def count_operators(model: onnx.ModelProto) -> dict[str, int]:
    """Count the nodes by operator and the version of its definition, such as `Gemm-13`, the most frequent first.

    A version is the newest opset, at most the one that the model imports, that changed the operator. Operators of other
    domains have theirs in front; of those that ONNX does not define, no version is known. Nodes of subgraphs and
    functions count too; a function's nodes have the versions of the model, and of the function's own imports where the
    model has none of that domain.
    """
    opsets = {
        entry.domain or "ai.onnx": entry.version
        for imports in (*(function.opset_import for function in model.functions), model.opset_import)
        for entry in imports
    }
    counts = Counter(_versioned(node, opsets.get(node.domain or "ai.onnx", 0)) for node in nodes(model))
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _versioned(node: onnx.NodeProto, opset: int) -> str:
    from onnx import defs

    domain = "" if node.domain == "ai.onnx" else node.domain
    name = f"{domain}::{node.op_type}" if domain else node.op_type
    try:
        return f"{name}-{defs.get_schema(node.op_type, opset, domain).since_version}"
    except defs.SchemaError:
        return name


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    from onnx import TensorProto

    form = value.type.WhichOneof("value")
    if form not in ("tensor_type", None):
        return TensorSpec(name=value.name, dtype=form.removesuffix("_type"), shape=())
    kind = value.type.tensor_type
    known = kind.elem_type in TensorProto.DataType.values()
    name = TensorProto.DataType.Name(kind.elem_type).lower() if known else "undefined"
    dtype = {"float": "float32", "double": "float64"}.get(name, name)
    shape = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in kind.shape.dim)
    return TensorSpec(name=value.name, dtype=dtype, shape=shape)
