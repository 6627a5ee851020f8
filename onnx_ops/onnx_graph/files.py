"""Read and write ONNX files and the external weights beside them.

Every location of external data is checked before the data is read. ONNX Runtime 1.31 and the
onnx package refuse different locations. ONNX Runtime accepts a tensor in the model file, in the
middle of another tensor, or behind a `..` that returns to the folder. The onnx package accepts a
tensor that is shorter than its shape. A location is refused here if it could mislead either
library. Writing the same model always gives the same bytes.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from onnx_ops.domain.artifact import Digest, digest_file, digest_json
from onnx_ops.errors import NotFoundError, RefusedError, TooLargeError, UserError, quoted
from onnx_ops.onnx_graph.ort_format import is_ort_format, read_ort_structure

if TYPE_CHECKING:
    import onnx

_OTHERS = {
    b"\x1f\x8b": "compressed: unpack it with gunzip",
    b"PK\x03\x04": "a zip archive, as torch.save and Keras write them: export the model to ONNX, "
    "or unpack it",
    b"\x80": "a Python pickle, as joblib and torch write them: export it with the framework "
    "that made it (`export.framework`)",
    b"\x89HDF": "HDF5, as Keras writes it: export the model to ONNX",
    b"version ": "a pointer of Git LFS: run git lfs install, then git lfs pull",
}
"""The kind of a file that is not ONNX, with the remedy, by the file's first bytes."""

_POINTER = b"version https://git-lfs"
"""First bytes of the pointer file that Git LFS puts in place of a file.

Without this check, the about 130 bytes of a pointer file could be read as small weights.
"""

EXTERNAL_LIMIT = 1 << 30
"""Bytes above which weights are written to a file beside the model.

A protobuf is limited to 2 GiB.
"""

PROTOBUF_LIMIT = (1 << 31) - 1
"""Maximum size of a protobuf message in bytes."""

_SHARED_LIMIT = 1 << 26
"""Maximum bytes of a file whose structure is cached.

The cache of four files therefore needs at most about 256 MiB.
"""

_SETTLED_NS = 100_000_000
"""Age of a change in ns after which another change has a different time stamp.

File systems count time in ticks.
"""

DEFAULT_DOMAINS = ("", "ai.onnx")

_BESIDE = "Save the model with its weights in a file beside it."
_SOURCE = "Name the .onnx file from which the ORT file was made."
_PLAIN = "Copy the model and its weights into a folder of plain files."


def read_structure(path: Path) -> onnx.ModelProto:
    """Read a model without its external weights, but check their locations.

    Raises:
        NotFoundError: there is no such file, or its weights are missing.
        UserError: the file is not ONNX, is too large for a protobuf, or is damaged in ORT format.
        RefusedError: its external data is outside the permitted locations, see
            `resolve_external_files`.
    """
    return _check_weights(parse_model(path), path)


def share_structure(path: Path) -> onnx.ModelProto:
    """Return the result of `read_structure`, for callers that do not change it.

    The structures of the last four files of at most 64 MiB are cached until the files change. A
    file that changed within the last `_SETTLED_NS` is not cached.
    """
    found = path.stat() if path.is_file() else None
    if (
        found is None
        or found.st_size > _SHARED_LIMIT
        or time.time_ns() - found.st_ctime_ns < _SETTLED_NS
    ):
        return read_structure(path)
    version = (
        found.st_dev,
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
    )
    # The path is not resolved: an error names the file as the caller does.
    return _check_weights(_parse_unchanged(path, version), path)


@functools.lru_cache(maxsize=4)
def _parse_unchanged(path: Path, _version: tuple[int, ...]) -> onnx.ModelProto:
    return parse_model(path)


def _check_weights(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Return the model if its external data is in permitted locations.

    Otherwise raise as `read_structure` does.
    """
    real = path.resolve()
    if any(file.resolve() == real for file in resolve_external_files(model, path.parent)):
        raise RefusedError(
            "its external data refers to the model file itself", where=str(path), remedy=_BESIDE
        )
    return model


def collect_constants(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """Return the constants of the main graph by name.

    They are initializers and the tensors of Constant nodes.
    """
    return collect_graph_constants(model.graph)


def collect_graph_constants(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Return the initializers and the tensors of Constant nodes of one graph by name.

    Subgraphs, and Constant nodes with other attributes than `value`, are not included.
    """
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                tensors[node.output[0]] = attribute.t
    return tensors


def get_opset(model: onnx.ModelProto) -> int:
    """Return the opset of ONNX's default domain that a model imports; 0 without one."""
    return max(
        (entry.version for entry in model.opset_import if entry.domain in DEFAULT_DOMAINS),
        default=0,
    )


def find_model_file(path: Path) -> Path:
    """Return the path if it is a file, or the only `.onnx` file of a folder.

    Raises:
        NotFoundError: the file is missing, or the folder does not have exactly one `.onnx` file.
    """
    if path.is_file():
        return path
    files = sorted(path.glob("*.onnx")) if path.is_dir() else []
    if len(files) != 1:
        what = f"{len(files) or 'no'} .onnx files there" if path.is_dir() else "no such file"
        beside = [file.stem for file in path.parent.glob("*.onnx")]
        close = difflib.get_close_matches(path.stem, beside, n=1, cutoff=0.7)
        remedy = (
            f"Did you mean '{close[0]}.onnx'?"
            if close
            else "Name an .onnx file, or a folder with exactly one."
        )
        raise NotFoundError(what, where=str(path), remedy=remedy)
    return files[0]


def list_external_names(path: Path) -> tuple[str, ...]:
    """Return the names of a model's weight files, which need not exist."""
    entries = (
        entry for tensor in iterate_tensors(parse_model(path)) for entry in tensor.external_data
    )
    return tuple(dict.fromkeys(entry.value for entry in entries if entry.key == "location"))


def digest_model(path: Path) -> Digest:
    """Return the digest of the bytes of a model file and of its weight files.

    Raises the errors of `read_structure`.
    """
    weights = sorted(resolve_external_files(share_structure(path), path.parent))
    return digest_json([digest_file(path), [digest_file(file) for file in weights]])


def parse_model(path: Path) -> onnx.ModelProto:
    """Parse a file without its external weights.

    The locations of the weights are not checked. For a file in ORT format, only the structure is
    read.

    Raises:
        NotFoundError: there is no such file.
        UserError: the file is not ONNX, is too large for a protobuf, or is damaged in ORT format.
    """
    import onnx
    from google.protobuf.message import DecodeError

    if not path.is_file():
        raise NotFoundError("no such file", where=str(path))
    if path.stat().st_size > PROTOBUF_LIMIT:
        raise TooLargeError(
            "not an ONNX file: ONNX files are smaller than 2 GiB", where=str(path), remedy=_BESIDE
        )
    if is_ort_format(path):
        return read_ort_structure(path)
    try:
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, ValueError) as error:
        raise UserError(
            "not an ONNX file", where=str(path), why=str(error), remedy=_kind_of(path)
        ) from error
    if not model.graph.node and not model.graph.output:
        raise UserError(
            "not an ONNX file, or its graph is empty",
            where=str(path),
            remedy=_kind_of(path),
        )
    return model


def _kind_of(path: Path) -> str:
    """Return the remedy for a file that is not ONNX, by its first bytes."""
    with path.open("rb") as file:
        head = file.read(8)
    if not head:
        return "The file is empty: export the model again, or fetch the file again."
    for begins, what in _OTHERS.items():
        if head.startswith(begins):
            return f"It is {what}."
    return "Export the model again, and check that the file was copied completely."


def refuse_ort(path: Path) -> None:
    """Raise UserError for a file in ORT format; only its structure is readable."""
    if is_ort_format(path):
        raise UserError("a file in ORT format cannot be rewritten", where=str(path), remedy=_SOURCE)


def read_model(path: Path) -> onnx.ModelProto:
    """Read a whole model with its weights.

    Errors are those of `read_structure`, and the following.

    Raises:
        UserError: the file is in ORT format.
        RefusedError: a weights file is a symbolic link or a hard link.
    """
    from onnx.checker import ValidationError
    from onnx.external_data_helper import load_external_data_for_model

    model = read_structure(path)
    refuse_ort(path)
    # Without a length, the onnx package would read the rest of the external file.
    for tensor in iterate_tensors(model):
        size = _bytes_of(tensor) if tensor.external_data else None
        if size is not None and all(entry.key != "length" for entry in tensor.external_data):
            tensor.external_data.add(key="length", value=str(size))
    try:
        load_external_data_for_model(model, str(path.parent))
    except (ValidationError, ValueError) as error:  # onnx refuses symbolic links and hard links.
        why = quoted(error)
        raise RefusedError(
            "its external data was not read", where=str(path), why=why, remedy=_PLAIN
        ) from error
    return model


def write_model(model: onnx.ModelProto, path: Path) -> None:
    """Write a model; if its weights exceed `EXTERNAL_LIMIT`, write them beside it.

    Operator set imports are sorted, and duplicates are removed. Converters write them in the order
    of a hash table, which differs between processes, and quantizers refuse duplicates.
    """
    import onnx

    versions = {entry.domain: entry.version for entry in model.opset_import}
    del model.opset_import[:]
    for domain in sorted(versions):
        model.opset_import.add(domain=domain, version=versions[domain])
    size = sum(len(t.raw_data) for t in iterate_tensors(model))
    if size > EXTERNAL_LIMIT:
        onnx.save_model(
            model,
            path,
            save_as_external_data=True,
            location=f"{path.name}.data",
            all_tensors_to_one_file=True,
        )
    else:
        path.write_bytes(model.SerializeToString(deterministic=True))


def copy_model(source: Path, path: Path) -> None:
    """Copy a model to another path, and its weight files under their own names."""
    for file in resolve_external_files(read_structure(source), source.parent):
        place = path.parent / file.relative_to(source.parent)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    shutil.copyfile(source, path)


def iterate_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield the initializers and tensor attributes of a model.

    Tensors of subgraphs, functions and training graphs are included. The tensor of an attribute is
    included, whatever type the attribute declares.
    """
    for graph in iterate_graphs(model):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for attribute in _attributes(model):
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        for sparse in (*attribute.sparse_tensors, attribute.sparse_tensor):
            yield from (sparse.values, sparse.indices)


def iterate_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """Yield the model's graphs: main, training, and all subgraphs."""
    yield model.graph
    for training in model.training_info:
        yield from (training.initialization, training.algorithm)
    for attribute in _attributes(model):
        yield from list_subgraphs(attribute)


def list_subgraphs(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    """Return the graphs that an attribute of a node contains."""
    return [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]


def map_readers(nodes: Iterable[onnx.NodeProto]) -> dict[str, list[onnx.NodeProto]]:
    """Return the nodes that read each value, with one entry for each input."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    return readers


def list_shape_nodes(model: onnx.ModelProto) -> frozenset[str]:
    """Return the names of the nodes that compute shapes, or values from shapes only.

    Constants can be further inputs. Nodes of subgraphs are not included.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    shapes: set[str] = set()
    names = set()
    for node in model.graph.node:
        inputs = set(filter(None, node.input))
        if node.op_type == "Constant":
            constants.update(node.output)
        elif node.op_type in ("Shape", "Size") or (
            inputs & shapes and inputs <= shapes | constants
        ):
            shapes.update(node.output)
            names.add(node.name)
    return frozenset(names - {""})


def iterate_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield every node of a model, including subgraphs, functions and training graphs.

    The nodes of a graph come in reverse order.
    """
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
    for node in iterate_nodes(model):
        yield from node.attribute


def _inner(attribute: onnx.AttributeProto) -> list[onnx.NodeProto]:
    return [node for graph in list_subgraphs(attribute) for node in graph.node]


_LARGEST = (1 << 63) - 1
_AGAIN = "Save the model again with its weights beside it."


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class TensorLocation:
    """The location of one tensor in a file.

    The bytes of the tensor are `start` to `end` (exclusive) of `file`, a real path.
    """

    file: Path
    start: int
    end: int
    tensor: str


def resolve_external_files(model: onnx.ModelProto, folder: Path) -> tuple[Path, ...]:
    """Return the files that contain a model's weights, in order of appearance.

    Raises:
        RefusedError: a name is missing, empty, absolute or outside the folder, or has `..` or a
            backslash; a key occurs twice; an offset or a length is malformed, exceeds the file, or
            does not fit the tensor; a shape has a negative size; two locations overlap partly; a
            file is a pointer of Git LFS.
        NotFoundError: a file is missing.
    """
    files: dict[Path, None] = {}
    places: list[TensorLocation] = []
    for tensor in iterate_tensors(model):
        if not (tensor.external_data or tensor.data_location):
            # Location 0 is the default, for values in the model file.
            continue
        entries = _read_entries(tensor)
        path = _find_external_file(entries.get("location"), folder, tensor.name)
        if path not in files and _is_pointer(path):
            what = (
                f"the model's external data {entries['location']!r} is a pointer of Git LFS, "
                "not the weights"
            )
            raise RefusedError(
                what, where=str(folder), remedy="Run `git lfs install`, then `git lfs pull`."
            )
        files[path] = None
        places.append(_locate(tensor, entries, path))
    _refuse_overlaps(places)
    return tuple(files)


def _read_entries(tensor: onnx.TensorProto) -> dict[str, str]:
    """Return the entries of a tensor's external data (`location`, `offset` …) by key.

    Two equal keys are refused, since their precedence is undefined.
    """
    keys = [entry.key for entry in tensor.external_data]
    if twice := [key for key in keys if keys.count(key) > 1]:
        what = f"it declares the {twice[0]!r} of its external data more than once"
        raise RefusedError(what, where=f"tensor {tensor.name}", remedy=_AGAIN)
    return {entry.key: entry.value for entry in tensor.external_data}


def _find_external_file(name: str | None, folder: Path, tensor: str) -> Path:
    """Return the file that a tensor names; the file exists in the model's folder."""
    where = f"tensor {tensor}"
    if name is None:
        raise RefusedError(
            "it has external data without the name of a file", where=where, remedy=_AGAIN
        )
    pure, path = PurePosixPath(name), folder / name
    is_unsafe = not name or pure.is_absolute() or ".." in pure.parts or "\\" in name
    if is_unsafe or not _inside(path, folder):
        raise RefusedError(
            f"its external data {name!r} is not a plain path inside the model's folder",
            where=where,
            remedy=_AGAIN,
        )
    if not os.path.isfile(path):
        # Unlike Path.is_file of Python 3.11, `os.path.isfile` does not raise an error for a name
        # that is too long.
        remedy = f"Copy {name} to this folder: the file contains the model's weights."
        raise NotFoundError(
            f"the model's external data {name!r} is missing", where=str(folder), remedy=remedy
        )
    return path


def _refuse_overlaps(places: Iterable[TensorLocation]) -> None:
    """Refuse tensors that share only some of their bytes.

    Tied weights share all of their bytes.
    """
    last: TensorLocation | None = None
    # In the order of file and start, the first overlap is always with the previous place.
    for place in sorted(place for place in places if place.end > place.start):
        is_same = last is not None and (last.start, last.end) == (place.start, place.end)
        if last and last.file == place.file and place.start < last.end and not is_same:
            what = f"its external data overlaps that of tensor {last.tensor}"
            raise RefusedError(what, where=f"tensor {place.tensor}", remedy=_AGAIN)
        last = place


def _is_pointer(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(_POINTER)) == _POINTER


def _locate(tensor: onnx.TensorProto, entries: dict[str, str], path: Path) -> TensorLocation:
    where = f"tensor {tensor.name}"
    start, stated = _number(entries, "offset", where), _number(entries, "length", where)
    size, wanted = os.path.getsize(path), _bytes_of(tensor)
    if stated is not None and wanted is not None and stated != wanted:
        what = f"its external data has {stated} bytes, but its shape needs {wanted}"
        raise RefusedError(what, where=where, remedy=_AGAIN)
    begin = start or 0
    length = (
        stated if stated is not None else wanted if wanted is not None else max(0, size - begin)
    )
    if begin + length > size:
        raise RefusedError(
            f"its external data extends beyond the end of {entries['location']!r}",
            where=where,
            why=f"the data should be at bytes {begin} to {begin + length}, but the file has "
            f"{size} bytes",
            remedy="Copy the complete file again, or save the model again.",
        )
    return TensorLocation(file=path.resolve(), start=begin, end=begin + length, tensor=tensor.name)


def get_element_type(data_type: int) -> str:
    """Return the ONNX name of an element type in lower case.

    The name of an unknown type is `undefined`.
    """
    from onnx import TensorProto

    known = data_type in TensorProto.DataType.values()
    return TensorProto.DataType.Name(data_type).lower() if known else "undefined"


def get_element_bits(data_type: int) -> int | None:
    """Return the number of bits of an element; None for strings and unknown types."""
    return _BITS.get(get_element_type(data_type))


def _number(entries: dict[str, str], key: str, where: str) -> int | None:
    if key not in entries:
        return None
    text = entries[key]
    if not (text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) <= _LARGEST):
        what = f"the {key} of its external data is not a number of bytes: {text[:40]!r}"
        raise RefusedError(what, where=where, remedy=_AGAIN)
    return int(text)


def _bytes_of(tensor: onnx.TensorProto) -> int | None:
    """Return the number of bytes that a tensor's shape and type need.

    Return None for a type without a fixed size.
    """
    if any(size < 0 for size in tensor.dims):
        raise RefusedError(
            f"its shape has a negative size: {list(tensor.dims)}", where=f"tensor {tensor.name}"
        )
    bits = get_element_bits(tensor.data_type)
    return None if bits is None else -(-math.prod(tensor.dims) * bits // 8)


def _inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):
        # For example, the path contains a null byte or is a cyclic link.
        return False


_BITS = {
    name: bits
    for bits, names in {
        2: "int2 uint2",
        4: "int4 uint4 float4e2m1",
        8: "int8 uint8 bool float8e4m3fn float8e4m3fnuz float8e5m2 float8e5m2fnuz float8e8m0",
        16: "int16 uint16 float16 bfloat16",
        32: "int32 uint32 float",
        64: "int64 uint64 double complex64",
        128: "complex128",
    }.items()
    for name in names.split()
}
