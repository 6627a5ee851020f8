"""Lineage in the file itself: `metadata_props`, which every tool of the field leaves alone."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.files import external_files, read_structure

AUTHOR, LICENSE = "model_author", "model_license"
"""Keys that the ONNX standard gives to the author and the licence of a model."""

_STANDARD = {"author": AUTHOR, "license": LICENSE}
_LARGEST_VERSION = (1 << 63) - 1


def write_lineage(path: Path, properties: Mapping[str, str]) -> None:
    """Add properties to a model file, in place; the same properties give the same bytes. External weights stay put.

    Raises:
        NotFoundError, UserError, RefusedError: as for reading the file.
    """
    model = read_structure(path)
    merged = {prop.key: prop.value for prop in model.metadata_props} | dict(properties)
    del model.metadata_props[:]
    for key in sorted(merged):
        model.metadata_props.add(key=key, value=merged[key])
    path.write_bytes(model.SerializeToString(deterministic=True))


def read_lineage(path: Path) -> dict[str, str]:
    """All properties of a model file."""
    return {prop.key: prop.value for prop in read_structure(path).metadata_props}


def write_copy(path: Path, output: Path, values: Mapping[str, str]) -> None:
    """Copy a model with its external weights and set what it says about itself; `output` may be the model itself.

    Args:
        path: the model.
        output: the copy; files beside it with the names of the weights are replaced.
        values: `author`, `license`, `version` (a whole number, as ONNX has it), `description`, or a key of metadata.

    Raises:
        NotFoundError, RefusedError: as for reading the file.
        UserError: it is not ONNX, or the version is no number.
    """
    model = read_structure(path)
    version = values.get("version", str(model.model_version))
    if not (version.isascii() and version.isdecimal() and int(version) <= _LARGEST_VERSION):
        raise UserError(
            f"version {version!r} is no whole number, which ONNX wants", remedy="Set another key: --set release=1.2."
        )
    for weights in external_files(model, path.parent):
        copy = output.parent / weights.relative_to(path.parent)
        if not (copy.exists() and copy.samefile(weights)):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(weights, copy)
    model.model_version = int(version)
    model.doc_string = values.get("description", model.doc_string)
    output.write_bytes(model.SerializeToString(deterministic=True))
    properties = {_STANDARD.get(key, key): value for key, value in values.items()}
    write_lineage(output, {key: value for key, value in properties.items() if key not in ("version", "description")})
