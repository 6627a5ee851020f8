"""Read and write the metadata of an ONNX file."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.domain.artifact import ModelInfo, TensorSpec
from onnx_ops.domain.encoded_inputs import ENCODED_PROPERTY, parse_encoded_inputs
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.files import (
    get_element_type,
    iterate_nodes,
    read_structure,
    refuse_ort,
    resolve_external_files,
    share_structure,
)

if TYPE_CHECKING:
    import onnx


def read_model_info(path: Path) -> ModelInfo:
    """Read IR version, opsets, inputs, outputs and size, without loading weights."""
    model = share_structure(path)
    constants = {tensor.name for tensor in model.graph.initializer}
    return ModelInfo(
        ir_version=model.ir_version,
        opsets={
            "" if entry.domain == "ai.onnx" else entry.domain: entry.version
            for entry in model.opset_import
        },
        inputs=tuple(_spec(value) for value in model.graph.input if value.name not in constants),
        outputs=tuple(_spec(value) for value in model.graph.output),
        nodes=len(model.graph.node),
        size_bytes=path.stat().st_size
        + sum(f.stat().st_size for f in resolve_external_files(model, path.parent)),
    )


def count_operators(model: onnx.ModelProto) -> dict[str, int]:
    """Count nodes by operator and version of its definition, such as `Gemm-13`.

    The most frequent operator comes first. The version of an operator is the newest opset that
    changed its definition, up to the opset that the model imports. Operators of other domains have
    the domain as prefix. The version of an operator that ONNX does not define is unknown. Nodes of
    subgraphs and functions are included. A function's nodes have the versions that the model
    imports. For a domain that the model does not import, they have the version that the function
    imports.
    """
    from onnx import defs

    opsets = {
        entry.domain or "ai.onnx": entry.version
        for imports in (
            *(function.opset_import for function in model.functions),
            model.opset_import,
        )
        for entry in imports
    }
    counts: Counter[str] = Counter()
    for node in iterate_nodes(model):
        domain = "" if node.domain == "ai.onnx" else node.domain
        name = f"{domain}::{node.op_type}" if domain else node.op_type
        with contextlib.suppress(defs.SchemaError):
            opset = opsets.get(domain or "ai.onnx", 0)
            name = f"{name}-{defs.get_schema(node.op_type, opset, domain).since_version}"
        counts[name] += 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    form = value.type.WhichOneof("value")
    if form not in ("tensor_type", None):
        return TensorSpec(name=value.name, dtype=form.removesuffix("_type"), shape=())
    kind = value.type.tensor_type
    name = get_element_type(kind.elem_type)
    dtype = {"float": "float32", "double": "float64"}.get(name, name)
    return TensorSpec(name=value.name, dtype=dtype, shape=read_shape(value))


def read_shape(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    """Return the sizes and names of the dimensions of a tensor.

    A dimension without a size and a name is `?`.
    """
    dims = value.type.tensor_type.shape.dim
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in dims
    )


AUTHOR, LICENSE = "model_author", "model_license"
"""Metadata keys of the ONNX standard for the author and the license of a model."""

_STANDARD = {"author": AUTHOR, "license": LICENSE}
_LARGEST_VERSION = (1 << 63) - 1


def write_lineage(path: Path, properties: Mapping[str, str]) -> None:
    """Add properties to a model file in place, without changing its weights.

    The same properties give the same bytes.
    """
    model = read_structure(path)
    merged = {prop.key: prop.value for prop in model.metadata_props} | dict(properties)
    del model.metadata_props[:]
    for key in sorted(merged):
        model.metadata_props.add(key=key, value=merged[key])
    path.write_bytes(model.SerializeToString(deterministic=True))


def read_lineage(path: Path) -> dict[str, str]:
    """Return all properties of a model file."""
    return {prop.key: prop.value for prop in share_structure(path).metadata_props}


def read_encoded_inputs(path: Path) -> dict[str, str]:
    """Return the kind of each input whose rows are encoded files, such as images.

    Raises:
        UserError: the property of the file is not valid.
    """
    return parse_encoded_inputs(read_lineage(path).get(ENCODED_PROPERTY, ""))


def write_copy(path: Path, output: Path, values: Mapping[str, str]) -> None:
    """Copy a model with its weights, and set its author, version or metadata.

    `output` can be the path of the model.

    Args:
        values: values of `author`, `license`, `version` (a whole number, as in ONNX),
            `description`, or a metadata key.

    Raises:
        UserError: `version` is not a whole number of at most 63 bits, or the file is in ORT format.
    """
    refuse_ort(path)
    model = read_structure(path)
    version = values.get("version", str(model.model_version))
    if not (version.isascii() and version.isdecimal() and int(version) <= _LARGEST_VERSION):
        remedy = (
            "Set another key: --set release=1.2."
            if "version" in values
            else "The file has this version; replace it: --set version=1."
        )
        raise UserError(
            f"version {version!r} is not a whole number of at most 63 bits, which ONNX requires",
            remedy=remedy,
        )
    for weights in resolve_external_files(model, path.parent):
        copy = output.parent / weights.relative_to(path.parent)
        if not (copy.exists() and copy.samefile(weights)):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(weights, copy)
    model.model_version = int(version)
    model.doc_string = values.get("description", model.doc_string)
    output.write_bytes(model.SerializeToString(deterministic=True))
    properties = {_STANDARD.get(key, key): value for key, value in values.items()}
    write_lineage(
        output,
        {key: value for key, value in properties.items() if key not in ("version", "description")},
    )
