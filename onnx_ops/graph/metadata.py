"""Lineage in the file itself: `metadata_props`, which every tool of the field leaves alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onnx_ops.graph.files import read_structure


def write_lineage(path: Path, properties: Mapping[str, str]) -> None:
    """Add properties to a model file, in place; the same properties give the same bytes. External weights stay put.

    Raises:
        NotFound, UserError, Refused: as for reading the file.
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
