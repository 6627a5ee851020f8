"""Data: arrays from a source, under the names the model uses."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.pipeline import DataSection, FileData, PluginData, SklearnData, Stage
from onnx_ops.errors import Conflict, UserError
from onnx_ops.ports import Dataset, Ports, TracedSource
from onnx_ops.stages.files import put_dataset


def source_of(section: DataSection) -> str:
    """Name of the data source plugin that brings a data set."""
    match section:
        case FileData():
            return "file"
        case SklearnData():
            return "sklearn"
        case PluginData():
            return section.use


def execute(stage: Stage, key: Digest, inputs: Mapping[str, Manifest], ports: Ports) -> Manifest:
    del key, inputs
    section = codec.from_json(stage.settings["section"], DataSection, where=stage.id)
    source = ports.source(source_of(section))
    arrays = source.load(section, ports.root)
    if isinstance(source, TracedSource) and source.fingerprint(section, ports.root) != stage.settings["fingerprint"]:
        raise Conflict(
            "the data was changed after the run was planned",
            where=stage.id,
            why="its revision names other content now",
            remedy="Run again; a tag or commit as `rev` does not move.",
        )
    dataset = Dataset(
        inputs={name: _pick(arrays, array, stage.id) for name, array in section.inputs.items()},
        label=_pick(arrays, section.label, stage.id) if section.label else None,
    )
    lengths = {
        name: len(array) for name, array in {**dataset.inputs, "label": dataset.label}.items() if array is not None
    }
    if len(set(lengths.values())) != 1 or not len(dataset):
        raise UserError(f"arrays must have the same number of rows, and at least one: {lengths}", where=stage.id)
    return put_dataset(ports.store, dataset)


def _pick(arrays: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in arrays:
        close = difflib.get_close_matches(name, list(arrays), n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"It has: {', '.join(sorted(arrays))}."
        raise UserError(f"the data set has no array {name!r}", where=where, remedy=hint)
    return arrays[name]
