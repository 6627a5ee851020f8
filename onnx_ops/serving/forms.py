"""Request and answer bodies: Open Inference v2 and the forms of MLflow's scoring server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.errors import UserError
from onnx_ops.ports.models import Array, Tensors
from onnx_ops.protocol.tensors import (
    DATATYPE_OF,
    check_shape,
    check_symbols,
    make_array,
    nested_shape,
    read_tensor,
)

Specs = Mapping[str, TensorSpec]

FORMS = ("inputs", "instances", "dataframe_split", "dataframe_records")


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """A checked request: a feed for every input, and the outputs that are wanted."""

    feed: Tensors
    outputs: tuple[str, ...]
    id: str | None = None


def read_infer(document: object, inputs: Specs, outputs: Specs) -> InferRequest:
    """An Open Inference v2 body.

    Raises:
        UserError: it does not fit the model; the message names the tensor.
    """
    if not isinstance(document, dict) or not isinstance(document.get("inputs"), list):
        raise UserError("the body must be an object with a list of inputs")
    feed: dict[str, Array] = {}
    for item in document["inputs"]:
        name = item.get("name") if isinstance(item, dict) else None
        spec = _known(name, inputs) if isinstance(name, str) else None
        name, array = read_tensor(item, spec)
        if name in feed:
            raise UserError(f"input {name!r} is given twice")
        feed[name] = array
    identity = document.get("id")
    if identity is not None and not isinstance(identity, str):
        raise UserError("id must be text")
    return InferRequest(feed=_complete(feed, inputs), outputs=_wanted(document.get("outputs"), outputs), id=identity)


def write_infer(
    values: Tensors, outputs: Specs, *, model: str, version: str, identity: str | None
) -> dict[str, object]:
    """The answer to `read_infer`. `data` of numbers stays an array, for the JSON writer."""
    document: dict[str, object] = {"model_name": model, "model_version": version}
    if identity is not None:
        document["id"] = identity
    document["outputs"] = [
        {"name": n, "datatype": DATATYPE_OF[outputs[n].dtype], "shape": list(a.shape), "data": plain(a.reshape(-1))}
        for n, a in values.items()
    ]
    return document


def is_infer(document: object) -> bool:
    """Whether a body for `/invocations` is an Open Inference one: a list of named tensors under `inputs`."""
    listed = document.get("inputs") if isinstance(document, dict) else None
    return isinstance(listed, list) and bool(listed) and all(isinstance(i, dict) and "datatype" in i for i in listed)


def read_invocation(document: object, inputs: Specs) -> tuple[Tensors, bool]:
    """A body of MLflow's scoring protocol: the feed, and whether it came as a table.

    Raises:
        UserError: it is none of the forms, or does not fit the model.
    """
    given = [key for key in FORMS if isinstance(document, dict) and key in document]
    if len(given) != 1 or not isinstance(document, dict):
        raise UserError(f"the body must be an object with exactly one of {', '.join(FORMS)}")
    form, content = given[0], document[given[0]]
    if document.get("params"):
        raise UserError("this model has no parameters; leave out params")
    columns: Mapping[str, object]
    match form:
        case "inputs":
            columns = content if isinstance(content, dict) else {_only(inputs, form): content}
        case "instances":
            columns = _instances(content, inputs)
        case "dataframe_split":
            columns = _frame(*_split(content), inputs)
        case _:
            columns = _frame(*_records(content), inputs)
    feed = {name: _nested(_known(name, inputs), data) for name, data in columns.items()}
    return _complete(feed, inputs), form.startswith("dataframe")


def write_predictions(values: Tensors, *, table: bool) -> dict[str, object]:
    """The answer of MLflow's scoring server for an ONNX model: outputs by name, or one record a row for a table."""
    if not table:
        return {"predictions": {name: plain(array) for name, array in values.items()}}
    columns = {name: _column(name, array) for name, array in values.items()}
    if len({len(column) for column in columns.values()}) > 1:
        raise UserError("the outputs differ in length and fit no table; send inputs or instances")
    rows = zip(*columns.values(), strict=True)
    return {"predictions": [dict(zip(columns, row, strict=True)) for row in rows]}


def plain(array: Array) -> object:
    """What the JSON writer takes: a contiguous array of numbers; else text, or a single value, as Python has it."""
    return array.tolist() if array.dtype.kind in "OU" or array.ndim == 0 else np.ascontiguousarray(array)


def _column(name: str, array: Array) -> list[Any]:
    if array.ndim == 0:
        raise UserError(f"output {name!r} is a single value and fits no table; send inputs or instances")
    flat = array[:, 0] if array.shape[1:] == (1,) else array
    values: list[Any] = flat.tolist()
    return values


def _wanted(listed: object, outputs: Specs) -> tuple[str, ...]:
    if not listed:
        return tuple(outputs)
    if not isinstance(listed, list) or not all(isinstance(i, dict) and isinstance(i.get("name"), str) for i in listed):
        raise UserError("outputs must be a list of objects with a name")
    names = [item["name"] for item in listed]
    unknown = [name for name in names if name not in outputs]
    if unknown or len(set(names)) != len(names):
        raise UserError(f"outputs must be some of {', '.join(outputs)}, each once")
    return tuple(names)


def _known(name: str, inputs: Specs) -> TensorSpec:
    if name not in inputs:
        raise UserError(f"the model has no input {name!r}; its inputs are {', '.join(inputs)}")
    return inputs[name]


def _complete(feed: Tensors, inputs: Specs) -> Tensors:
    missing = [name for name in inputs if name not in feed]
    if missing:
        raise UserError(f"input {missing[0]!r} is missing")
    check_symbols(inputs, feed)
    return feed


def _only(inputs: Specs, form: str) -> str:
    if len(inputs) != 1:
        raise UserError(f"the model has several inputs; {form} must name them: {', '.join(inputs)}")
    return next(iter(inputs))


def _nested(spec: TensorSpec, data: object) -> Array:
    shape = nested_shape(spec.name, data)
    if len(shape) == 1 and spec.shape[1:] == (1,):
        shape = (*shape, 1)  # a column of a table for an input of one feature
    check_shape(spec, shape)
    return make_array(spec.name, spec.dtype, shape, data)


def _instances(content: object, inputs: Specs) -> Mapping[str, object]:
    if not isinstance(content, list) or not content:
        raise UserError("instances must be a list with at least one instance")
    if not isinstance(content[0], dict):
        return {_only(inputs, "instances"): content}
    return _by_column(content, "instances")


def _by_column(rows: Sequence[object], form: str) -> dict[str, list[object]]:
    first = rows[0]
    names = list(first) if isinstance(first, dict) else []
    for row in rows:
        if not isinstance(row, dict) or row.keys() != set(names):
            raise UserError(f"every item of {form} must be an object with the same names")
    return {name: [row[name] for row in rows if isinstance(row, dict)] for name in names}


def _split(content: object) -> tuple[list[str], list[list[object]]]:
    columns = content.get("columns") if isinstance(content, dict) else None
    rows = content.get("data") if isinstance(content, dict) else None
    if not isinstance(columns, list) or not all(isinstance(c, (str, int)) for c in columns):
        raise UserError("dataframe_split must have a list of columns")
    if not isinstance(rows, list) or not all(isinstance(r, list) and len(r) == len(columns) for r in rows):
        raise UserError(f"dataframe_split must have data: a list of rows of {len(columns)} values")
    names = [str(column) for column in columns]
    if len(set(names)) != len(names):
        raise UserError("dataframe_split repeats a column")
    return names, rows


def _records(content: object) -> tuple[list[str], list[list[object]]]:
    if not isinstance(content, list) or not content:
        raise UserError("dataframe_records must be a list with at least one record")
    columns = _by_column(content, "dataframe_records")
    return list(columns), [[row[name] for name in columns] for row in content]


def _frame(columns: list[str], rows: list[list[object]], inputs: Specs) -> Mapping[str, object]:
    """Columns named like the inputs, or the features of the only input in their order."""
    if set(columns) == set(inputs):
        return {name: [row[i] for row in rows] for i, name in enumerate(columns)}
    if len(inputs) == 1:
        return {_only(inputs, "table"): rows}
    unknown = [name for name in columns if name not in inputs]
    raise UserError(f"the model has no input {unknown[0]!r}" if unknown else "the table lacks an input of the model")
