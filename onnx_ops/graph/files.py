"""Reading and writing ONNX files: external data stays where it belongs, and the same model gives the same bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from onnx_ops.errors import NotFound, Refused, UserError

if TYPE_CHECKING:
    import onnx

EXTERNAL_LIMIT = 1 << 30
"""Bytes of weights above which they go into a file beside the model; a protobuf ends at 2 GiB."""


def read_structure(path: Path) -> onnx.ModelProto:
    """The model without its external weights, whose places have been checked.

    Raises:
        NotFound: there is no such file.
        UserError: it is not ONNX.
        Refused: it names external data outside its folder.
    """
    import onnx
    from google.protobuf.message import DecodeError

    if not path.is_file():
        raise NotFound("no such file", where=str(path))
    try:
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, ValueError) as error:
        raise UserError("not an ONNX file", where=str(path), why=str(error)) from error
    if not model.graph.node and not model.graph.output:
        raise UserError("not an ONNX file, or one without a graph", where=str(path))
    external_files(model, path.parent)
    return model


def read_model(path: Path) -> onnx.ModelProto:
    """The whole model, weights included; raises as `read_structure` does."""
    from onnx.external_data_helper import load_external_data_for_model

    model = read_structure(path)
    load_external_data_for_model(model, str(path.parent))
    return model


def write_model(model: onnx.ModelProto, path: Path) -> None:
    """Write a model, its weights beside it under a fixed name if they are too large for one file.

    Converters import operator sets in the order of a hash table, which is another in every process, and some of them
    twice, which quantizers refuse: they are sorted, and each stands once.
    """
    import onnx

    versions = {entry.domain: entry.version for entry in model.opset_import}
    del model.opset_import[:]
    for domain in sorted(versions):
        model.opset_import.add(domain=domain, version=versions[domain])
    size = sum(len(t.raw_data) for t in tensors(model))
    if size > EXTERNAL_LIMIT:
        onnx.save_model(
            model, path, save_as_external_data=True, location=f"{path.name}.data", all_tensors_to_one_file=True
        )
    else:
        path.write_bytes(model.SerializeToString(deterministic=True))


def external_files(model: onnx.ModelProto, folder: Path) -> tuple[Path, ...]:
    """The files beside the model that hold its weights.

    Raises:
        Refused: a name is absolute, climbs out of the folder, or is a link that leads out of it.
        NotFound: a file is missing.
    """
    found: dict[Path, None] = {}
    for tensor in tensors(model):
        for entry in tensor.external_data:
            if entry.key == "location":
                found[_checked(entry.value, folder, tensor.name)] = None
    return tuple(found)


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every constant tensor of a model: initializers and attributes, subgraphs, functions and training included.

    What an attribute holds counts, whatever type it claims to have.
    """
    for graph in graphs(model):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for attribute in _attributes(model):
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        for sparse in (*attribute.sparse_tensors, attribute.sparse_tensor):
            yield from (sparse.values, sparse.indices)


def graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The model's graph, those of training, and all their subgraphs and those of functions."""
    yield model.graph
    for training in model.training_info:
        yield from (training.initialization, training.algorithm)
    for attribute in _attributes(model):
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node of a model, of subgraphs, functions and training too."""
    waiting: list[onnx.NodeProto] = [*model.graph.node]
    for training in model.training_info:
        waiting += [*training.initialization.node, *training.algorithm.node]
    for function in model.functions:
        waiting += function.node
        for attribute in function.attribute_proto:
            waiting += _inner(attribute)
    while waiting:
        node = waiting.pop()
        yield node
        for attribute in node.attribute:
            waiting += _inner(attribute)


def _attributes(model: onnx.ModelProto) -> Iterator[onnx.AttributeProto]:
    for function in model.functions:
        yield from function.attribute_proto
    for node in nodes(model):
        yield from node.attribute


def _inner(attribute: onnx.AttributeProto) -> list[onnx.NodeProto]:
    held = [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]
    return [node for graph in held for node in graph.node]


def _checked(name: str, folder: Path, tensor: str) -> Path:
    pure = PurePosixPath(name)
    unsafe = not name or pure.is_absolute() or ".." in pure.parts or "\\" in name
    path = folder / name
    if unsafe or not _inside(path, folder):
        raise Refused(
            f"its external data {name!r} lies outside its folder",
            where=f"tensor {tensor}",
            remedy="Save the model again with its weights beside it.",
        )
    if not os.path.isfile(path):  # unlike Path.is_file, it takes a name that is too long
        raise NotFound(f"its external data {name!r} is missing", where=str(folder))
    return path


def _inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # too long, a circle of links, a zero byte
        return False
