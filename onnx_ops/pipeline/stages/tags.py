"""Tags stage: find the slices of the scored rows.

The values come from columns of the data set, from a file of tags, and from a function of the
project. The stage does not wait for training, so that a wrong column or function is found early.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.pipeline import DataSection, FileData
from onnx_ops.domain.plan import Stage
from onnx_ops.errors import ConflictError, UserError
from onnx_ops.measure.slices import make_slicings, put_slicings
from onnx_ops.measure.user_functions import call_function, importable, load_function
from onnx_ops.pipeline.stages.data import build_dataset, get_source_name
from onnx_ops.ports import Context

WHERE = "slices"


def execute(
    stage: Stage, key: Digest, inputs: Mapping[str, Manifest], context: Context
) -> Manifest:
    """Read the columns, and store the slice of each row."""
    settings: Mapping[str, Any] = stage.settings
    section = codec.from_json(settings["section"], DataSection, where=stage.id)
    section = replace(section, inputs={name: section.inputs[name] for name in settings["inputs"]})
    own = _load(section, settings["fingerprint"], context)
    rows = len(build_dataset(own, section, stage.id))
    arrays: dict[str, Any] = dict(own)
    if tags := settings["tags"]:
        arrays |= _load(FileData(file=tags), settings["tags_fingerprint"], context)
    if reference := settings["use"]:
        with importable(context.root):
            function = load_function(reference, f"{WHERE}.use")
            result = call_function(function, reference, own, on="the scored data set")
            arrays |= _read_result(result, reference)
    return put_slicings(context.store, make_slicings(settings["by"], arrays, rows, where=WHERE))


def _load(section: DataSection, fingerprint: str, context: Context) -> Mapping[str, Any]:
    """Return the arrays of a source that has not changed since the plan.

    Raises:
        ConflictError: the data was changed.
    """
    source = context.source(get_source_name(section))
    arrays = source.load(section, context.root)
    if source.fingerprint(section, context.root) != fingerprint:
        raise ConflictError(
            "the data was changed after the run was planned",
            where=WHERE,
            remedy="Run the pipeline again.",
        )
    return arrays


def _read_result(result: object, reference: str) -> dict[str, Any]:
    """Return the columns that a function of the project computed.

    Raises:
        UserError: the result is not a mapping whose keys are strings, or the values of a column
            differ in their shapes.
    """
    import numpy as np

    if not isinstance(result, Mapping) or not all(isinstance(name, str) for name in result):
        raise UserError(
            f"{reference} returned {type(result).__name__}, but a mapping whose keys are strings "
            "is required",
            where=f"{WHERE}.use",
            remedy='For example: return {"length": ["short", "long", …]}.',
        )
    columns: dict[str, Any] = {}
    for name, values in result.items():
        try:
            column = np.asarray(values)
        except ValueError as error:
            raise UserError(
                f"{reference} returned a column {name!r} whose values differ in their shapes",
                where=f"{WHERE}.use",
                why=str(error),
                remedy="Return one value for each row.",
            ) from error
        # An array of objects keeps numbers among texts, such as NaN. Otherwise, NumPy converts them
        # to text.
        is_text = column.dtype.kind == "U" and column.ndim
        columns[name] = np.array(list(values), dtype=object) if is_text else column
    return columns
