"""scikit-learn estimators and pipelines, by skl2onnx."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onnx_ops.adapters.exporters.known_defects import check_convertible
from onnx_ops.adapters.exporters.signature import Precision, check_section, convert_failures, find_file
from onnx_ops.adapters.exporters.sklearn_signature import (
    InputLayout,
    build_rows,
    choose_layout,
    connect_inputs,
    get_last_step,
    tidy_outputs,
)
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.files import write_model
from onnx_ops.onnx_graph.rewrites import renumber_names
from onnx_ops.ports import TreeExporter
from onnx_ops.ports.data import Array, Tensors
from onnx_ops.ports.export import ExportRequest, Tree

FILE = "model.joblib"
LABEL, PROBABILITIES, VARIABLE = "label", "probabilities", "variable"
"""Names of the outputs: of a classifier the first two, of a regressor the third. A classifier that has no
probabilities gives its label only: what skl2onnx gives beside it has other shapes than scikit-learn's scores."""

RANKERS = ("XGBRanker", "LGBMRanker")
"""They answer as regressors do, and do not call themselves so."""

_GENERATED = r"(?:UU|pdistsqe_|cflat_|cdistd_|cdistdf_)(\d+)"
"""Names that skl2onnx numbers through all conversions of a process."""

_PATTERN = r"(?u)\b\w\w+\b"
_WORD = r"[\p{L}\p{N}_][\p{L}\p{N}_]+"
"""The default `token_pattern` of scikit-learn's vectorizers, and the same in the syntax of RE2."""


class SklearnExporter(TreeExporter):
    """Exports scikit-learn estimators and pipelines with skl2onnx.

    Inputs are a matrix, a vector of texts, or columns of a table; outputs are label and probabilities, or a variable.
    """

    tools: tuple[str, ...] = ("scikit-learn", "scipy", "numpy")
    options: tuple[str, ...] = ()
    converters: tuple[str, ...] = ("skl2onnx", "onnx")

    def save(self, model: object, folder: Path) -> None:
        """Write the estimator with joblib."""
        import joblib

        joblib.dump(model, folder / FILE)

    def load(self, folder: Path) -> object:
        """Load the pickled estimator, which runs its code: the store verified it, or it is the user's own `model:`."""
        import joblib

        file = find_file(folder, FILE)
        try:
            return unwrap_search(joblib.load(file))
        except Exception as error:
            raise UserError(
                f"cannot unpickle the model: {type(error).__name__}: {error}",
                where=file.name,
                remedy="It must be written by joblib or pickle, with the versions installed here.",
            ) from error

    def _convert_loadable(self, model: object, layout: InputLayout, opset: int) -> tuple[Any, InputLayout]:
        """Return a graph that loads, and its layout: in float32 if the operators that it needs have no other type.

        Trees, nearest neighbours, kernels and others have no float64, and scalers before them no integers.
        scikit-learn's trees convert their rows to float32 too.

        Raises:
            UserError: as the converter says of the layout that follows the data.
        """
        refused: UserError | None = None
        for tried in dict.fromkeys([layout, layout.as_float32("f8"), layout.as_float32("f8", "i")]):
            try:
                converted = _convert(self._convertible(model), tried, opset, self.tools[0])
            except UserError as error:
                refused = refused or error
                continue
            is_as_given = all(kind not in ("f8", "i") for _, kind, _ in tried.types)
            if is_as_given or _loads(converted):
                return converted, tried
        raise refused or UserError(
            f"ONNX Runtime cannot load the export of {type(model).__name__}",
            where="export",
            remedy="Convert the rows to float32 before the fit.",
        )

    def export(self, model: object, request: ExportRequest) -> None:
        """Convert the estimator with skl2onnx and tidy the inputs and outputs of the file."""
        _check_estimator(model)
        section, samples = request.section, request.samples
        check_convertible(list_estimators(model))
        layout = choose_layout(model, list_estimators(model), request)
        import onnx

        from onnx_ops.adapters.exporters.sklearn_trees import route_missing_values

        check_section(section, samples)
        converted, layout = self._convert_loadable(model, layout, section.opset)
        converted.ir_version = section.ir_version
        converted.producer_version = ""
        if not _is_regressor(model) and not hasattr(model, "predict_proba"):
            del converted.graph.output[1:]
        tidy_outputs(converted, model, label=LABEL, variable=VARIABLE, regressor=_is_regressor(model))
        for node in converted.graph.node:
            if node.op_type == "StringNormalizer" and not any(a.name == "locale" for a in node.attribute):
                # Lower case of all letters, on every Linux; en_US, the default, is not installed in slim images.
                node.attribute.append(onnx.helper.make_attribute("locale", b"C.UTF-8"))
        connect_inputs(converted, layout, samples)
        batch = next((axes[0] for axes in section.dynamic.values() if 0 in axes), "batch")
        rows = build_rows(model, {name: array[:1] for name, array in samples.items()}, "float64")
        for value in (*converted.graph.input, *converted.graph.output):
            dimensions = value.type.tensor_type.shape.dim
            if dimensions and not dimensions[0].dim_value:
                dimensions[0].dim_param = batch
        for value in converted.graph.output:
            dimensions = value.type.tensor_type.shape.dim
            if value.name == VARIABLE and len(dimensions) == 2:  # converters of ensembles always declare one target
                dimensions[1].dim_value = _answers(model, rows)[VARIABLE].shape[1]
        route_missing_values(converted, model)
        renumber_names(converted, _GENERATED)
        write_model(converted, request.path)

    def _convertible(self, model: object) -> object:
        """Return the model in the form that the converters take."""
        return model

    def reference(self, model: object, inputs: Tensors, precision: Precision) -> Tensors | None:
        """Run the estimator; for float32 with rounded weights, so that their rounding counts as noise of the source."""
        estimator: Any = _round_in_place(copy.deepcopy(model), set()) if precision == "float32" else model
        rows = build_rows(model, inputs, precision)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # edge inputs overflow on purpose
                return _answers(estimator, rows)
        except IndexError as error:  # CategoricalNB, for a category that it has not seen
            raise ValueError(f"{type(estimator).__name__}: {error}") from error
        except ValueError as error:
            if precision == "float32" and "Buffer dtype mismatch" in str(error):
                return None  # its compiled parts know float64 only
            raise

    def trees(self, model: object) -> tuple[Tree, ...] | None:
        """Return the trees that the model ends in; None if it is not a tree ensemble."""
        from onnx_ops.adapters.exporters.sklearn_trees import read_source_trees

        return read_source_trees(model)


def _answers(estimator: Any, rows: Any) -> dict[str, Array]:
    predicted = estimator.predict(rows)
    if predicted.dtype.kind == "O":
        predicted = predicted.astype(str)
    if _is_regressor(estimator):
        return {VARIABLE: predicted.reshape(len(rows), -1)}
    if not hasattr(estimator, "predict_proba"):
        return {LABEL: predicted}
    return {LABEL: predicted, PROBABILITIES: estimator.predict_proba(rows)}


def _check_estimator(model: object) -> None:
    from sklearn.base import is_classifier

    name = type(model).__name__
    if not (hasattr(model, "predict") and (is_classifier(model) or _is_regressor(model))):
        remedy = "`train.run` must return a fitted classifier, regressor, or pipeline that ends in one."
        what = f"{name} is neither a classifier nor a regressor of scikit-learn"
        raise UserError(what, where="export", remedy=remedy)
    if is_classifier(model) and isinstance(getattr(model, "classes_", None), list):
        remedy = "Make a pipeline for each label."
        raise UserError(f"{name} gives several labels at once", where="export", remedy=remedy)


def _is_regressor(model: object) -> bool:
    from sklearn.base import is_regressor

    return bool(is_regressor(model)) or type(get_last_step(model)).__name__ in RANKERS


def _convert(model: object, layout: InputLayout, opset: int, own: str) -> Any:
    import skl2onnx
    from skl2onnx.common import data_types

    kinds = {
        "f4": data_types.FloatTensorType,
        "f8": data_types.DoubleTensorType,
        "i": data_types.Int64TensorType,
        "U": data_types.StringTensorType,
    }
    options = _options(model)
    packages = {
        type(part).__module__.partition(".")[0]: None
        for part in list_estimators(model)
        if "RF" not in type(part).__name__
    }
    remedy = "See https://onnx.ai/sklearn-onnx/supported.html for what it converts."
    if others := [package for package in packages if package in ("xgboost", "lightgbm") and package != own]:
        remedy = f"Set export.framework: {others[0]}, which converts pipelines with its estimators too."
    what = f"skl2onnx cannot convert {type(model).__name__}"
    with (
        convert_failures(what, remedy),
        warnings.catch_warnings(),
        _whole_numbers(),
        _not_flattened(model),
        _imputers_of_mixed_columns(),
    ):
        warnings.simplefilter("ignore", FutureWarning)  # skl2onnx reads attributes that scikit-learn deprecates
        warnings.simplefilter("ignore", RuntimeWarning)  # and casts NaN, which an imputer of integers looks for
        return skl2onnx.to_onnx(
            model,
            initial_types=[(name, kinds[kind]([None, columns])) for name, kind, columns in layout.types],
            # The newest version of `ai.onnx.ml` that every runtime build in the field accepts is 3.
            target_opset={"": opset, "ai.onnx.ml": 3},
            options=options,
            name="model",
        )


def _loads(converted: Any) -> bool:
    """Return whether ONNX Runtime has an implementation for every operator of a graph."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(converted.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # it raises several types, without a common one
        return False
    return True


@contextmanager
def _imputers_of_mixed_columns() -> Iterator[None]:
    """Give an imputer's output the type of its input.

    skl2onnx declares it before it joins the columns, with the type of the first one, and refuses integers that stand
    before fractions.
    """
    registry: Any = importlib.import_module("skl2onnx.common._registration")
    name = "SklearnSimpleImputer"
    compute_shapes = registry.get_shape_calculator(name)

    def compute(operator: Any) -> None:
        (output,) = operator.outputs
        if len({type(value.type) for value in operator.inputs}) == 1:
            output.type = type(operator.inputs[0].type)(output.type.shape)
        compute_shapes(operator)

    registry.register_shape_calculator(name, compute, overwrite=True)
    try:
        yield
    finally:
        registry.register_shape_calculator(name, compute_shapes, overwrite=True)


@contextmanager
def _whole_numbers() -> Iterator[None]:
    """Write booleans as integers while converters run: some pass booleans, which protobuf 7 refuses."""
    container: Any = importlib.import_module("skl2onnx.common._container")
    make_node = container.make_node

    def make(*arguments: Any, **attributes: Any) -> Any:
        plain = {
            name: [int(v) if type(v).__name__ in ("bool", "bool_") else v for v in value]
            if isinstance(value, list)
            else value
            for name, value in attributes.items()
        }
        return make_node(*arguments, **plain)

    container.make_node = make
    try:
        yield
    finally:
        container.make_node = make_node


@contextmanager
def _not_flattened(model: object) -> Iterator[None]:
    """Let skl2onnx take voting classifiers: it refuses a default that concerns their `transform` only."""
    voting: list[Any] = [part for part in list_estimators(model) if getattr(part, "flatten_transform", False)]
    for part in voting:
        part.flatten_transform = False
    try:
        yield
    finally:
        for part in voting:
            part.flatten_transform = True


def _options(model: object) -> dict[Any, Any]:
    """No ZipMap, so that probabilities are a tensor; scalers divide as scikit-learn does, or trees split otherwise."""
    from sklearn.base import is_classifier
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import LinearSVC

    options: dict[Any, Any] = {}
    last = get_last_step(model)
    if is_classifier(last):  # LinearSVC has no ZipMap, and in a pipeline takes the default of one without own options
        options[id(last)] = {"nocl": False} if isinstance(last, LinearSVC) else {"zipmap": False}
    for part in list_estimators(model):
        if isinstance(part, StandardScaler):
            options[id(part)] = {"div": "div"}
        if hasattr(part, "get_support"):  # RFE calls itself a classifier, and would get a classifier's options
            options[id(part)] = {}
        if hasattr(part, "build_analyzer"):
            _check_analyzer(part)
            options[id(part)] = {"tokenexp": _WORD}
    return options


def _check_analyzer(part: Any) -> None:
    """Refuse vectorizers that split texts other than by the default pattern, which the export uses."""
    own = [name for name in ("preprocessor", "tokenizer") if getattr(part, name) is not None]
    if part.strip_accents is not None:
        own.append("strip_accents")
    if part.analyzer != "word":
        own.append("analyzer")
    elif part.token_pattern != _PATTERN:
        own.append("token_pattern")
    if own:
        raise UserError(
            f"{type(part).__name__} with its own {own[0]} cannot be converted faithfully",
            where="export",
            why="the export splits texts into words of letters, digits and underscores, and supports no other way",
            remedy=f"Leave out {own[0]}, or prepare the texts before the pipeline.",
        )


def unwrap_search(model: object) -> object:
    """Return what a search object (`GridSearchCV`, `RandomizedSearchCV`, …) answers with: its refitted estimator.

    Raises:
        UserError: the search has not refitted one.
    """
    while hasattr(model, "best_params_"):
        if not hasattr(model, "best_estimator_"):
            what = f"{type(model).__name__} holds no estimator, since `refit` is off"
            raise UserError(what, where="export", remedy="Leave out `refit=False`, or return a fitted estimator.")
        model = model.best_estimator_
    return model


def list_estimators(model: object) -> list[object]:
    """Return the estimator and all steps and estimators within it."""
    estimators = [model]
    for attribute in ("steps", "transformer_list", "transformers_", "estimators_"):
        listed = getattr(model, attribute, None)
        for entry in () if listed is None else listed:
            parts = entry if isinstance(entry, tuple | list) else (entry,)
            for part in parts:
                if hasattr(part, "get_params"):
                    estimators += list_estimators(part)
    return estimators


def _round_in_place(thing: Any, visited: set[int]) -> Any:
    """Make float64 arrays float32, wherever an estimator stores them."""
    import numpy as np

    if isinstance(thing, np.ndarray):
        return thing.astype(np.float32) if thing.dtype == np.float64 else thing
    if thing is np.float64:  # the type that an encoder or a vectorizer answers in
        return np.float32
    if type(thing) in (list, tuple):  # no named tuple
        return type(thing)(_round_in_place(item, visited) for item in thing)
    if isinstance(thing, dict):
        return {key: _round_in_place(value, visited) for key, value in thing.items()}
    if hasattr(thing, "get_params") and id(thing) not in visited:
        visited.add(id(thing))
        for name, value in vars(thing).items():
            setattr(thing, name, _round_in_place(value, visited))
    return thing
