"""Bodies for `/invocations`: the forms of MLflow's scoring server, CSV, and Open Inference v2.

https://mlflow.org/docs/latest/ml/deployment/deploy-model-locally/ (inference server specification)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx_ops.errors import UserError
from onnx_ops.ports.data import Array
from onnx_ops.serving.wire.answer import SAGEMAKER_TYPE
from onnx_ops.serving.wire.call import Call, Form
from onnx_ops.serving.wire.csv_table import read_csv
from onnx_ops.serving.wire.document import Block, parse, plain
from onnx_ops.serving.wire.infer import read_document, read_header_length, read_infer
from onnx_ops.serving.wire.reader import shown
from onnx_ops.serving.wire.signature import Signature

FORMS = ("inputs", "instances", "dataframe_split", "dataframe_records")

_MAX_DEPTH = 32


def read_invocation(body: bytes, content_type: str, header_length: int | None, signature: Signature) -> Call:
    """A body of any of the forms.

    Args:
        body: all of it.
        content_type: `text/csv`, SageMaker's name of the binary form, or anything else for JSON.
        header_length: as for `read_infer`; a body with it is an Open Inference one.
        signature: the model that it is for.

    Raises:
        UserError: it is none of the forms, or does not fit the model; the message names the tensor.
        TooLargeError: it holds too many values.
    """
    kind, _, options = content_type.partition(";")
    kind = kind.strip().lower()
    if kind == SAGEMAKER_TYPE:
        call = read_infer(body, _sagemaker_length(options), signature)
        call.sagemaker = True
        return call
    if header_length is not None:
        return read_infer(body, header_length, signature)
    if kind == "application/octet-stream":
        raise UserError("a body in the binary form needs the header inference-header-content-length")
    if kind == "text/csv":
        names, rows = read_csv(body)
        return _finished(_frame(names, rows, signature), signature, Form.RECORDS, literals=True, text=True)
    document, literals = parse(body)
    if _is_infer(document):
        return read_document(document, signature, literals=literals)
    return _mlflow(document, signature, literals)


def _sagemaker_length(options: str) -> int | None:
    name, _, value = options.strip().partition("=")
    if name.strip().lower() != "json-header-size":
        raise UserError(f"the content type {SAGEMAKER_TYPE} needs ;json-header-size=N")
    return read_header_length(value.strip())


def _is_infer(document: Any) -> bool:
    """Whether it is an Open Inference body: a list of named tensors under `inputs`."""
    listed = document.get("inputs") if type(document) is dict else None
    return type(listed) is list and bool(listed) and all(type(i) is dict and "datatype" in i for i in listed)


def _mlflow(document: Any, signature: Signature, literals: bool) -> Call:
    given = [key for key in FORMS if type(document) is dict and key in document]
    if len(given) != 1:
        raise UserError(f"the body must be an object with exactly one of {', '.join(FORMS)}")
    form, content = given[0], document[given[0]]
    if document.get("params"):
        raise UserError("this model has no parameters; leave out params")
    columns: Mapping[str, object]
    match form:
        case "inputs":
            columns = content if type(content) is dict else {signature.only(form): content}
        case "instances":
            columns = _instances(content, signature)
        case "dataframe_split":
            columns = _frame(*_split(content), signature)
        case _:
            columns = _frame(*_records(content), signature)
    answer = Form.RECORDS if form.startswith("dataframe") else Form.NAMED
    return _finished(columns, signature, answer, literals=literals)


def _finished(
    columns: Mapping[str, object], signature: Signature, form: Form, *, literals: bool, text: bool = False
) -> Call:
    for name in signature.raw_only:
        raise UserError(f"output {name!r} is BF16, which JSON cannot carry", remedy="Ask in the binary form of v2.")
    feed = {name: _array(name, data, signature, literals, text) for name, data in columns.items()}
    return Call(feed, signature.output_names, signature.complete(feed), form)


def _array(name: str, data: object, signature: Signature, literals: bool, text: bool) -> Array:
    reader = signature.known(name)
    shape = data.shape if isinstance(data, Block) else _nested_shape(name, data)
    if len(shape) == 1 and reader.dims[1:] == (1,):
        shape = (*shape, 1)  # a column of a table for an input of one feature
    fitting, count = reader.shape(list(shape))
    if literals and not text and len(reader.dims) == 2:
        data = reader.with_missing(data)
    if reader.dims[1:] == (1,) and not text:
        reader.check_column(data)
    return reader.array(fitting, count, reader.typed(data) if text else data, literals=literals)


def _nested_shape(name: str, data: Any) -> tuple[int, ...]:
    """The shape of nested lists by their first elements; the reader then checks all others."""
    shape: list[int] = []
    while type(data) is list or isinstance(data, Block):
        if isinstance(data, Block):
            return (*shape, *data.shape)
        if len(shape) == _MAX_DEPTH:
            raise UserError(f"tensor {name!r}: data is nested too deeply")
        shape.append(len(data))
        if not data:
            break
        data = data[0]
    return tuple(shape)


def _instances(content: Any, signature: Signature) -> Mapping[str, object]:
    if isinstance(content, Block):
        return {signature.only("instances"): content}
    if type(content) is not list or not content:
        raise UserError("instances must be a list with at least one instance")
    if type(content[0]) is not dict:
        return {signature.only("instances"): content}
    return _by_column(content, "instances")


def _by_column(rows: Sequence[Any], form: str) -> dict[str, list[Any]]:
    first = rows[0]
    names = list(first) if type(first) is dict else []
    for row in rows:
        if type(row) is not dict or row.keys() != set(names):
            raise UserError(f"every item of {form} must be an object with the same names")
    return {name: [plain(row[name]) for row in rows] for name in names}


def _split(content: Any) -> tuple[list[str], list[list[Any]]]:
    columns = content.get("columns") if type(content) is dict else None
    rows = plain(content.get("data")) if type(content) is dict else None
    if type(columns) is not list or not all(type(c) in (str, int) for c in columns):
        raise UserError("dataframe_split must have a list of columns")
    if type(rows) is not list or not all(type(r) is list and len(r) == len(columns) for r in rows):
        raise UserError(f"dataframe_split must have data: a list of rows of {len(columns)} values")
    names = [str(column) for column in columns]
    if len(set(names)) != len(names):
        raise UserError("dataframe_split repeats a column")
    return names, rows


def _records(content: Any) -> tuple[list[str], list[list[Any]]]:
    if type(content) is not list or not content:
        raise UserError("dataframe_records must be a list with at least one record")
    columns = _by_column(content, "dataframe_records")
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def _frame(columns: list[str], rows: list[list[Any]], signature: Signature) -> Mapping[str, object]:
    """Columns named like the inputs, or the features of the only input in their order."""
    names = set(columns)
    if signature.required <= names <= signature.inputs.keys():
        return {name: [row[i] for row in rows] for i, name in enumerate(columns)}
    if len(signature.required) == 1:
        return {signature.only("a table"): rows}
    unknown = [name for name in columns if name not in signature.inputs]
    raise UserError(
        f"the model has no input {shown(unknown[0])}" if unknown else "the table lacks an input of the model"
    )
