"""Inputs and outputs of scikit-learn exports.

Inputs are matrices, texts or columns of a table. Outputs get their names and shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onnx_ops.adapters.exporters.input_binding import WHERE, check_order
from onnx_ops.adapters.exporters.signature import Precision
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.files import get_opset
from onnx_ops.onnx_graph.rewrites import rename_values
from onnx_ops.ports.data import Tensors, frame_of
from onnx_ops.ports.export import ExportRequest

_INNER = "_inside"

_SHOWN = 12
"""Largest number of names that a message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLayout:
    """Mapping of the data's inputs to the inputs of the converter.

    Args:
        types: the converter's inputs: name, NumPy kind (`f4`, `f8`, `i`, `U`) and number of
            columns.
        order: names of the data's inputs in the order of the model's columns.
        joined: whether the inputs are the columns of the only matrix in `types`.
        split: whether the only input is a matrix with the columns in `types`.
    """

    types: tuple[tuple[str, str, int], ...]
    order: tuple[str, ...]
    joined: bool = False
    split: bool = False

    @property
    def is_table(self) -> bool:
        """Return whether the converter gets more than one input."""
        return len(self.types) > 1

    def as_float32(self, *kinds: str) -> InputLayout:
        """Return the layout with inputs of these kinds cast to float32.

        The cast precedes the converter's graph.
        """
        types = tuple(
            (name, "f4" if kind in kinds else kind, columns) for name, kind, columns in self.types
        )
        return replace(self, types=types)


def choose_layout(model: object, parts: list[object], request: ExportRequest) -> InputLayout:
    """Return the layout that fits the inputs on which the estimator was fitted.

    Raises:
        UserError: the columns of the data differ from those of the fit, an input has an unsupported
            shape, or one matrix would contain texts and numbers. Or the model lacks names of
            columns, and their order is not declared.
    """
    samples = request.samples
    for name, array in samples.items():
        if array.ndim > 2 or array.ndim == 0:
            raise _no_matrix(name, array)
    names = read_fitted_names(model, samples)
    by_column = any(type(part).__name__ == "ColumnTransformer" for part in parts)
    if len(samples) == 1:
        return _choose_matrix_layout(request, names, by_column=by_column)
    if names is None:
        _check_widths(samples)
        _check_positions(model, samples, ordered=request.ordered)
        return _choose_column_layout(model, samples, by_column=by_column)
    ordered = _ordered(samples, names)
    _check_widths(ordered)
    return _choose_column_layout(model, ordered, by_column=by_column)


def _choose_matrix_layout(
    request: ExportRequest, names: list[str] | None, *, by_column: bool
) -> InputLayout:
    """Return the layout of a single input.

    The layout is the matrix, or its columns if the model selects columns by name.

    Raises:
        UserError: the input is not a matrix with the columns of the fit.
    """
    ((name, rows),) = request.samples.items()
    if rows.ndim != 2 and _kind(rows) != "U":
        raise _no_matrix(name, rows)
    columns = rows.shape[1] if rows.ndim == 2 else 1
    if names is not None and columns != len(names):
        raise UserError(
            "the number of columns of the data differs from that of the fit",
            where=WHERE,
            why=f"the model takes {len(names)} columns; {name} has {columns}",
            remedy=_list_columns(names),
        )
    _check_features(request.features.get(name, ()), names)
    kind = _kind(rows)
    if not by_column or not names:
        return InputLayout(types=((name, kind, columns),), order=(name,))
    if columns > 1:
        return InputLayout(
            types=tuple((column, kind, 1) for column in names), order=(name,), split=True
        )
    return InputLayout(types=((names[0], kind, columns),), order=(name,))


def _choose_column_layout(model: object, columns: Tensors, *, by_column: bool) -> InputLayout:
    """Return the layout of inputs with one column each, in the order of the model.

    Raises:
        UserError: the model takes columns of texts and of numbers in one matrix.
    """
    if by_column:
        types = tuple((name, _kind(array), 1) for name, array in columns.items())
        return InputLayout(types=types, order=tuple(columns))
    kinds = {_kind(array) for array in columns.values()}
    if kinds != {"U"} and "U" in kinds:
        raise UserError(
            f"{type(model).__name__} takes texts and numbers in one matrix, "
            "which cannot be exported",
            where="export",
            remedy="Begin the pipeline with a ColumnTransformer, which defines how each column is "
            "used.",
        )
    kind = "U" if "U" in kinds else "f8" if kinds == {"f8"} else "f4"
    joined = (f"columns{_INNER}", kind, len(columns))
    return InputLayout(types=(joined,), order=tuple(columns), joined=True)


def _no_matrix(name: str, array: Any) -> UserError:
    return UserError(f"input {name} must be a matrix, but has shape {array.shape}", where=WHERE)


def _check_widths(columns: Tensors) -> None:
    """Check that each of several inputs is a matrix of one column."""
    for name, array in columns.items():
        if array.ndim != 2 or array.shape[1] != 1:
            raise UserError(
                "each of several inputs must be a matrix of one column, but "
                f"{name} has shape {array.shape}",
                where=WHERE,
                remedy="Join the arrays into one matrix: `inputs: {x: '*'}`, with `columns:` in "
                "the order of the fit.",
            )


def _check_features(features: Sequence[str], names: Sequence[str] | None) -> None:
    """Check that a matrix of named columns has the order of the fit.

    A matrix whose columns have other names is not checked.
    """
    matched = _match_columns(features, names or ())
    if list(features) == matched or sorted(features) != sorted(matched):
        return
    raise UserError(
        "the order of the matrix columns differs from the order in the fit",
        where=WHERE,
        why=f"the model takes {', '.join(matched[:_SHOWN])}; "
        f"the matrix has {', '.join(features[:_SHOWN])}",
        remedy=_list_columns(matched),
    )


def _check_positions(model: Any, samples: Tensors, *, ordered: bool) -> None:
    """Check that columns can be passed by position to an estimator without names."""
    name = type(model).__name__
    expected = 1 if _takes_texts(model) else getattr(model, "n_features_in_", len(samples))
    if expected != len(samples):
        raise UserError(
            f"{name} takes {expected} column{'s' if expected > 1 else ''}; "
            f"the data has {len(samples)}",
            where=WHERE,
            remedy="List the columns in the order of the fit in every data set: `columns: [FIRST, "
            "SECOND]` for a table without `inputs`, `inputs: {FIRST: ARRAY, SECOND: ARRAY}` for "
            "arrays.",
        )
    check_order(
        samples,
        ordered=ordered,
        owner=name,
        why="it was fitted on an array, whose columns have no names",
    )


def build_rows(model: object, inputs: Tensors, precision: Precision) -> Any:
    """Return the argument of `predict`.

    The argument is a data frame if the estimator was fitted on one, otherwise an array. For a model
    that takes texts, it is a vector.
    """
    import numpy as np

    arrays = {name: _as_precision(array, precision) for name, array in inputs.items()}
    names = read_fitted_names(model, inputs)
    if _takes_texts(model):
        return next(iter(arrays.values())).reshape(-1)
    if names is None:
        if len(arrays) == 1:
            return next(iter(arrays.values()))
        kinds = {_kind(array) for array in arrays.values()}
        is_mixed = "U" in kinds and len(kinds) > 1
        return np.hstack([array.astype(object) if is_mixed else array for array in arrays.values()])
    if len(arrays) == 1:
        (matrix,) = arrays.values()
        columns = matrix.reshape(len(matrix), -1)
        return frame_of({name: columns[:, place] for place, name in enumerate(names)})
    frame = frame_of(_ordered(arrays, names))
    frame.columns = names
    return frame


def _takes_texts(model: object) -> bool:
    """Return whether the model takes a vector of texts.

    This is so if the model is a vectorizer, or begins with one.
    """
    steps = getattr(model, "steps", None)
    return hasattr(steps[0][1] if steps else model, "build_analyzer")


def read_fitted_names(model: object, inputs: Collection[str]) -> list[str] | None:
    """Return the column names that the estimator was fitted on; None for arrays.

    LightGBM generates names for the columns of arrays. Generated names are used only if the data
    has them.
    """
    try:
        names = getattr(model, "feature_names_in_", None)
    except (AttributeError, ValueError):
        return None
    if names is None:
        return None
    fitted = [str(name) for name in names]
    made_up = fitted == [f"Column_{index}" for index in range(len(fitted))]
    return None if made_up and not set(fitted) <= set(inputs) else fitted


def connect_inputs(converted: Any, layout: InputLayout, samples: Tensors) -> None:
    """Replace the inputs of the graph by the inputs of the data.

    Nodes that join, split, cast or reshape these inputs are added.
    """
    graph = converted.graph
    declared = _declare_inputs(samples)
    inner = _rename_inside(graph, samples)
    if layout.joined:
        front = _join_columns(layout, declared, inner)
    elif layout.split:
        front = _split_columns(layout, declared, inner, get_opset(converted))
    else:
        front = _connect_each(graph, layout, declared, inner)
    nodes = [*front, *graph.node]
    del graph.node[:], graph.input[:]
    graph.node.extend(nodes)
    graph.input.extend(declared.values())


def _rename_inside(graph: Any, names: Collection[str]) -> list[str]:
    """Rename the converter's inputs and clashing values; return the inputs in order.

    The converter replaces characters in the names of its inputs, and can give a value the name of a
    column. The new names have an ending that no column has.

    Raises:
        UserError: an output of the model has the name of a column.
    """
    if taken := next((value.name for value in graph.output if value.name in names), None):
        raise UserError(
            f"the column {taken!r} has the name of an output of the model",
            where=WHERE,
            remedy="Give the column another name, in the data and in the fit.",
        )
    ending = _INNER
    while any(name.endswith(ending) for name in names):
        ending += "_"
    inner = {value.name: f"input_{place}{ending}" for place, value in enumerate(graph.input)}
    clashing = {name for node in graph.node for name in node.output if name in names}
    clashing |= {initializer.name for initializer in graph.initializer if initializer.name in names}
    renamed = {name: f"{name}_value{ending}" for name in clashing - set(inner)}
    rename_values(graph, {**renamed, **inner})
    for initializer in graph.initializer:
        initializer.name = renamed.get(initializer.name, initializer.name)
    return list(inner.values())


def _get_element_types() -> dict[str, int]:
    """Return ONNX's element type for each kind in `InputLayout.types`, and for `b`."""
    from onnx import TensorProto

    return {
        "b": TensorProto.BOOL,
        "f4": TensorProto.FLOAT,
        "f8": TensorProto.DOUBLE,
        "i": TensorProto.INT64,
        "U": TensorProto.STRING,
    }


def _declare_inputs(samples: Tensors) -> dict[str, Any]:
    """Return a declaration for each input of the data, with a free number of rows."""
    from onnx import helper

    element_types = _get_element_types()
    declared = {}
    for name, array in samples.items():
        kind = "b" if array.dtype.kind == "b" else _kind(array)
        shape = ["batch", *array.shape[1:]]
        declared[name] = helper.make_tensor_value_info(name, element_types[kind], shape)
    return declared


def _join_columns(
    layout: InputLayout, declared: Mapping[str, Any], inner: Sequence[str]
) -> list[Any]:
    """Return nodes that join the inputs into the converter's matrix.

    `declared` has the data's inputs by name. `inner` contains only the name of the matrix.
    """
    from onnx import helper

    ((_, kind, _),) = layout.types
    wanted = _get_element_types()[kind]
    front: list[Any] = []
    parts = [_cast(front, declared[name], wanted, f"{name}_{inner[0]}") for name in layout.order]
    return [*front, helper.make_node("Concat", parts, list(inner), name="join_columns", axis=1)]


def _split_columns(
    layout: InputLayout, declared: Mapping[str, Any], inner: Sequence[str], opset: int
) -> list[Any]:
    """Return nodes that split the only input into the converter's columns.

    `declared` has the data's input by name. `inner` are the names of the converter's inputs.
    """
    from onnx import helper

    (name,) = layout.order
    # All columns of a matrix have the same kind.
    wanted = _get_element_types()[layout.types[0][1]]
    front: list[Any] = []
    matrix = _cast(front, declared[name], wanted, f"{name}_{inner[0]}")
    # Opset 18 introduced this attribute, and requires it for parts of equal size.
    number: dict[str, Any] = {"num_outputs": len(inner)} if opset >= 18 else {}
    return [*front, helper.make_node("Split", [matrix], list(inner), axis=1, **number)]


def _connect_each(
    graph: Any, layout: InputLayout, declared: Mapping[str, Any], inner: Sequence[str]
) -> list[Any]:
    """Connect each input to its input of the converter; return added nodes.

    The nodes cast or reshape inputs where necessary. `declared` has the data's inputs by name.
    `inner` are the names of the converter's inputs.
    """
    from onnx import TensorProto, helper

    element_types = _get_element_types()
    front: list[Any] = []
    renamed = {}
    for name, (_, kind, _), column in zip(layout.order, layout.types, inner, strict=True):
        tensor = declared[name].type.tensor_type
        if tensor.elem_type == element_types[kind] and len(tensor.shape.dim) == 1:
            shape = f"shape_{column}"
            graph.initializer.append(helper.make_tensor(shape, TensorProto.INT64, [2], [-1, 1]))
            front.append(
                helper.make_node("Reshape", [name, shape], [column], name=f"{name}_column")
            )
        else:
            renamed[column] = _cast(front, declared[name], element_types[kind], column)
    rename_values(graph, renamed)
    return front


def _cast(front: list[Any], declared: Any, wanted: int, value: str) -> str:
    """Return the name of an input in the wanted element type.

    If the input has another type, a node that casts it to `value` is added to `front`.
    """
    from onnx import helper

    name = declared.name
    if declared.type.tensor_type.elem_type == wanted:
        return str(name)
    front.append(helper.make_node("Cast", [name], [value], name=f"{name}_cast", to=wanted))
    return value


def _kind(array: Any) -> str:
    import numpy as np

    if array.dtype.kind == "f":
        return "f8" if array.dtype == np.float64 else "f4"
    return {"b": "i", "i": "i", "u": "i"}.get(array.dtype.kind, "U")


def _ordered(samples: Tensors, names: list[str] | None) -> Tensors:
    """Return the inputs in the order of the columns on which the estimator was fitted.

    Raises:
        UserError: the names of the inputs differ from the columns of the fit.
    """
    if names is None:
        return samples
    ordered = _match_columns(samples, names)
    if "" in ordered or len(ordered) != len(samples):
        raise _not_fitted(list(samples), names, ordered)
    return {name: samples[name] for name in ordered}


def _match_columns(columns: Collection[str], names: Sequence[str]) -> list[str]:
    """Return the data's column for each column of the fit; "" if it is missing.

    LightGBM replaces spaces in the names of columns.
    """
    plain = {column.replace(" ", "_"): column for column in columns if column not in names}
    return [name if name in columns else plain.get(name, "") for name in names]


def _not_fitted(inputs: list[str], names: list[str], ordered: list[str]) -> UserError:
    """Return the error of columns that differ; `ordered` is from `_match_columns`."""
    lacking = [name for name, column in zip(names, ordered, strict=True) if not column]
    spare = [name for name in inputs if name not in ordered]
    return UserError(
        "the columns of the data differ from the columns of the fit",
        where=WHERE,
        why=f"the model takes {', '.join(names[:_SHOWN])}; the data "
        + (f"lacks {lacking[0]!r}" if lacking else f"also has {spare[0]!r}"),
        remedy=_list_columns([column or name for name, column in zip(names, ordered, strict=True)]),
    )


def _list_columns(names: Sequence[str]) -> str:
    more = ", …" if len(names) > _SHOWN else ""
    return f"List the columns in every data set: `columns: [{', '.join(names[:_SHOWN])}{more}]`."


def _as_precision(array: Any, precision: str) -> Any:
    import numpy as np

    if array.dtype.kind == "f":
        return array.astype(precision)
    # The export computes with whole numbers in float32, so the source gets them in float32 too. Up
    # to this limit, float32 represents whole numbers exactly.
    if (
        array.dtype.kind in "iu"
        and precision == "float32"
        and np.abs(array).max(initial=0) <= float(1 << 24)
    ):
        return array.astype(np.float32)
    return array


_LABELS_AS_MATRIX = ("OneVsOneClassifier", "QuadraticDiscriminantAnalysis")
"""Estimators whose converter writes the label as a matrix, whatever it declares."""


def tidy_outputs(converted: Any, model: object, names: Sequence[str]) -> None:
    """Give the outputs their names and shapes."""
    graph = converted.graph
    is_declared_wrongly = type(get_last_step(model)).__name__ in _LABELS_AS_MATRIX
    for name, output in zip(names, graph.output, strict=True):
        if output.name != name:
            # skl2onnx possibly uses the new name for a value inside the graph, which is renamed
            # too.
            rename_values(graph, {output.name: name, name: f"{name}_inside"})
            output.name = name
    for output in graph.output:
        wanted, rank = _SHAPES.get(output.name), len(output.type.tensor_type.shape.dim)
        if wanted and (rank != len(wanted) or is_declared_wrongly):
            _reshape_output(graph, output, wanted)


_SHAPES: Mapping[str, tuple[int, ...]] = {"label": (-1,), "scores": (-1, 1)}
"""Shapes of outputs for which some converters write a wrong rank; -1 is the batch."""


def _reshape_output(graph: Any, output: Any, wanted: tuple[int, ...]) -> None:
    from onnx import TensorProto, helper

    name = output.name
    inner, shape = f"{name}_rows", f"{name}_shape"
    rename_values(graph, {name: inner})
    graph.initializer.append(helper.make_tensor(shape, TensorProto.INT64, [len(wanted)], wanted))
    graph.node.append(helper.make_node("Reshape", [inner, shape], [name], name=name))
    declared = output.type.tensor_type.shape
    del declared.dim[:]
    for size in wanted:
        dimension = declared.dim.add()
        if size > 0:
            dimension.dim_value = size


def get_last_step(model: object) -> Any:
    """Return the last step of a pipeline; for any other model, the model.

    The last step of a pipeline can be a pipeline too.
    """
    while steps := getattr(model, "steps", None):
        model = steps[-1][1]
    return model
