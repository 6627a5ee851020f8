"""Reading and writing ONNX files: external data stays where it belongs, and the same model gives the same bytes."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.domain.artifact import Digest, digest_file, digest_json
from onnx_ops.errors import NotFoundError, RefusedError, TooLargeError, UserError, quoted
from onnx_ops.onnx_graph.external import checked_files, locations, tell_lengths
from onnx_ops.onnx_graph.ort_file import is_ort, read_ort

if TYPE_CHECKING:
    import onnx

_OTHERS = {
    b"\x1f\x8b": "compressed: unpack it with gunzip",
    b"PK\x03\x04": "a zip archive, as torch.save and Keras write them: export the model to ONNX, or unpack it",
    b"\x80": "a Python pickle, as joblib and torch write them: export it with the `export.framework` that made it",
    b"\x89HDF": "HDF5, as Keras writes it: export the model to ONNX",
    b"version ": "a pointer of Git LFS: fetch the file with git lfs pull",
}
"""What files that are not ONNX begin with."""

EXTERNAL_LIMIT = 1 << 30
"""Bytes of weights above which they go into a file beside the model; a protobuf ends at 2 GiB."""

PROTOBUF_LIMIT = (1 << 31) - 1
"""Bytes of the largest protobuf."""

_BESIDE = "Save the model with its weights in a file beside it."
_SOURCE = "Give the .onnx file that it was made from."
_PLAIN = "Copy the model and its weights into a folder of plain files."


def read_structure(path: Path) -> onnx.ModelProto:
    """The model without its external weights, whose places have been checked.

    Raises:
        NotFoundError: there is no such file, or its weights are missing.
        UserError: it is not ONNX, or too large to be.
        RefusedError: its external data lies where it must not, see `external.checked_files`.
    """
    model = parse(path)
    real = path.resolve()
    if any(file.resolve() == real for file in external_files(model, path.parent)):
        raise RefusedError("its external data is said to lie in the model file itself", where=str(path), remedy=_BESIDE)
    return model


def constants(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """The constant tensors of the main graph by name: initializers, and values of Constant nodes."""
    found = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                found[node.output[0]] = attribute.t
    return found


def model_file(path: Path) -> Path:
    """The file itself, or the one `.onnx` file of a folder.

    Raises:
        NotFoundError: there is none, or more than one.
    """
    if path.is_file():
        return path
    found = sorted(path.glob("*.onnx")) if path.is_dir() else []
    if len(found) != 1:
        what = f"{len(found) or 'no'} .onnx files there" if path.is_dir() else "no such file"
        beside = [file.stem for file in path.parent.glob("*.onnx")]
        close = difflib.get_close_matches(path.stem, beside, n=1, cutoff=0.7)
        remedy = f"Did you mean '{close[0]}.onnx'?" if close else "Name an .onnx file, or a folder with exactly one."
        raise NotFoundError(what, where=str(path), remedy=remedy)
    return found[0]


def external_names(path: Path) -> tuple[str, ...]:
    """Names of the files that a model's weights are said to lie in; they need not be there.

    Raises:
        NotFoundError, UserError: as for `parse`.
    """
    return locations(tensors(parse(path)))


def model_digest(path: Path) -> Digest:
    """Digest of a model and of the files of its weights, whatever they are called elsewhere.

    Raises:
        NotFoundError, UserError: as for `parse`; a file of its weights is not there.
    """
    weights = [path.parent / name for name in sorted(external_names(path))]
    if missing := [file.name for file in weights if not file.is_file()]:
        raise NotFoundError(f"the weights' file {missing[0]} is not there", where=str(path))
    return digest_json([digest_file(path), [digest_file(file) for file in weights]])


def parse(path: Path) -> onnx.ModelProto:
    """What stands in the file itself; of one in ORT format its structure.

    Raises:
        NotFoundError: there is no such file.
        UserError: it is not ONNX, or too large to be.
    """
    import onnx
    from google.protobuf.message import DecodeError

    if not path.is_file():
        raise NotFoundError("no such file", where=str(path))
    if path.stat().st_size > PROTOBUF_LIMIT:
        raise TooLargeError("not an ONNX file: none is larger than 2 GiB", where=str(path), remedy=_BESIDE)
    if is_ort(path):
        return read_ort(path)
    try:
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, ValueError) as error:
        raise UserError("not an ONNX file", where=str(path), why=str(error), remedy=_kind_of(path)) from error
    if not model.graph.node and not model.graph.output:
        raise UserError("not an ONNX file, or one without a graph", where=str(path), remedy=_kind_of(path))
    return model


def _kind_of(path: Path) -> str:
    """What to do with a file by what it begins with."""
    with path.open("rb") as file:
        head = file.read(8)
    if not head:
        return "The file is empty: export the model again, or fetch the file again."
    for begins, what in _OTHERS.items():
        if head.startswith(begins):
            return f"It is {what}."
    return "Export the model again, and look whether the file was copied whole."


def refuse_ort(path: Path) -> None:
    """Raises UserError for a file in ORT format, of which nothing but its structure is read."""
    if is_ort(path):
        raise UserError("a file in ORT format cannot be rewritten", where=str(path), remedy=_SOURCE)


def read_model(path: Path) -> onnx.ModelProto:
    """The whole model, weights included; raises as `read_structure` does."""
    from onnx.checker import ValidationError
    from onnx.external_data_helper import load_external_data_for_model

    model = read_structure(path)
    refuse_ort(path)
    tell_lengths(tensors(model))
    try:
        load_external_data_for_model(model, str(path.parent))
    except (ValidationError, ValueError) as error:  # it takes no links, not even hard ones
        why = quoted(error)
        raise RefusedError("its external data is not read", where=str(path), why=why, remedy=_PLAIN) from error
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


def copy_model(source: Path, path: Path) -> None:
    """Copy a model under another name, and its weights under theirs beside it; raises as `read_structure` does."""
    for file in external_files(read_structure(source), source.parent):
        place = path.parent / file.relative_to(source.parent)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    shutil.copyfile(source, path)


def external_files(model: onnx.ModelProto, folder: Path) -> tuple[Path, ...]:
    """The files beside the model that hold its weights; raises as `external.checked_files` does."""
    return checked_files(tensors(model), folder)


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
