"""Exporter of scikit-learn estimators and pipelines, with skl2onnx."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnx_ops.adapters.exporters.known_defects import check_convertible
from onnx_ops.adapters.exporters.signature import (
    Precision,
    check_section,
    convert_failures,
    find_file,
)
from onnx_ops.adapters.exporters.skl2onnx_repairs import repair_converters
from onnx_ops.adapters.exporters.sklearn_signature import (
    InputLayout,
    build_rows,
    choose_layout,
    connect_inputs,
    get_last_step,
    tidy_outputs,
)
from onnx_ops.adapters.exporters.sklearn_wrappers import (
    Step,
    list_estimators,
    rewrite_model,
    unwrap_search,
)
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.files import write_model
from onnx_ops.onnx_graph.rewrites import rename_values, renumber_names
from onnx_ops.ports import TreeExporter
from onnx_ops.ports.data import Array, Tensors
from onnx_ops.ports.export import ExportRequest
from onnx_ops.ports.tree import Tree

FILE = "model.joblib"
LABEL, PROBABILITIES, SCORES, VARIABLE = "label", "probabilities", "scores", "variable"
"""Names of outputs; `list_outputs` describes which outputs a model has."""

RANKERS = ("XGBRanker", "LGBMRanker")
"""Estimators that answer like regressors, but are not marked as regressors."""

_GENERATED = r"(?:UU|pdistsqe_|cflat_|cdistd_|cdistdf_)(\d+)"
"""Pattern of names whose numbers skl2onnx does not restart for each model."""

_REMEDY = (
    "Use another estimator or step; https://onnx.ai/sklearn-onnx/supported.html lists what can "
    "be converted."
)

_PATTERN = r"(?u)\b\w\w+\b"
_WORD = r"[\p{L}\p{N}_][\p{L}\p{N}_]+"
"""The default `token_pattern` of scikit-learn's vectorizers, in the syntax of RE2.

`_PATTERN` is the same pattern in Python's syntax.
"""


class SklearnExporter(TreeExporter):
    """Exporter of scikit-learn estimators and pipelines, with skl2onnx.

    Inputs are a matrix, a vector of texts, or columns of a table. Outputs are those of
    `list_outputs`.
    """

    tools: tuple[str, ...] = ("scikit-learn", "scipy", "numpy")
    options: tuple[str, ...] = ()
    converters: tuple[str, ...] = ("skl2onnx", "onnx")

    def save(self, model: object, folder: Path) -> None:
        """Write the estimator with joblib."""
        import joblib

        joblib.dump(model, folder / FILE)

    def load(self, folder: Path) -> object:
        """Load the pickled estimator.

        Loading runs the code of the pickle. The store has verified the file, or it is the user's
        own `model:`.

        Raises:
            NotFoundError: the folder contains neither `FILE` nor exactly one file.
            UserError: the file cannot be unpickled, or the model is a search with `refit=False`.
        """
        import joblib

        file = find_file(folder, FILE)
        try:
            model = joblib.load(file)
        except Exception as error:
            raise UserError(
                f"the model cannot be unpickled: {type(error).__name__}: {error}",
                where=file.name,
                remedy="Write the file with joblib or pickle, with the package versions of this "
                "environment.",
            ) from error
        return unwrap_search(model)

    def _convert_loadable(
        self, model: object, layout: InputLayout, opset: int
    ) -> tuple[Any, InputLayout]:
        """Return a graph that ONNX Runtime can load, and its layout.

        The layout is in float32 if an operator requires float32. Operators of trees, nearest
        neighbors, kernels and others do not support float64. Scalers before them do not support
        integers. scikit-learn's trees also convert their rows to float32. The graph of a layout
        with only float32 and texts is returned without loading it.

        Raises:
            UserError: the converter refuses the model.
        """
        refusals: list[UserError] = []
        for tried in dict.fromkeys([layout, layout.as_float32("f8"), layout.as_float32("f8", "i")]):
            try:
                converted = _convert(self._convertible(model), tried, opset, self.tools[0])
            except UserError as error:
                refusals.append(error)
                continue
            is_as_given = all(kind not in ("f8", "i") for _, kind, _ in tried.types)
            if is_as_given or _loads(converted):
                return converted, tried
        # The last layout contains only float32 and texts, so the converter refused it.
        raise refusals[0]

    def export(self, model: object, request: ExportRequest) -> None:
        """Convert the estimator with skl2onnx and tidy the inputs and outputs of the file."""
        _check_estimator(model)
        section, samples = request.section, request.samples
        rewritten, steps = rewrite_model(model)
        parts = list_estimators(rewritten)
        check_convertible(parts, last=get_last_step(rewritten))
        layout = choose_layout(model, parts, request)
        first_answers = self._answer_first_row(model, samples)
        _check_label(model, first_answers)
        from onnx_ops.adapters.exporters.sklearn_trees import route_missing_values

        check_section(section, samples)
        converted, layout = self._convert_loadable(rewritten, layout, section.opset)
        converted.ir_version = section.ir_version
        converted.producer_version = ""
        outputs = list_outputs(model)
        if LABEL not in outputs and len(converted.graph.output) > 1:
            del converted.graph.output[0]
        del converted.graph.output[len(outputs) :]
        tidy_outputs(converted, rewritten, outputs)
        _append_steps(converted.graph, VARIABLE, steps)
        _set_locale(converted.graph)
        connect_inputs(converted, layout, samples)
        batch = next((axes[0] for axes in section.dynamic.values() if 0 in axes), "batch")
        _name_row_axes(converted.graph, batch)
        for value in converted.graph.output:
            dimensions = value.type.tensor_type.shape.dim
            # Converters of ensembles declare one target, even if the model has several.
            if value.name == VARIABLE and value.name in first_answers and len(dimensions) == 2:
                dimensions[1].dim_value = first_answers[VARIABLE].shape[1]
        route_missing_values(converted, rewritten)
        renumber_names(converted, _GENERATED)
        write_model(converted, request.path)

    def _answer_first_row(self, model: object, samples: Tensors) -> Tensors:
        """Return the answers to the first row; empty if the model refuses the row.

        A later step of the export reports a refused row.
        """
        row = {name: array[:1] for name, array in samples.items()}
        try:
            return self.reference(model, row, "float64") or {}
        except ValueError:
            return {}

    def _convertible(self, model: object) -> object:
        """Return the model in the form that the converters accept."""
        return model

    def reference(self, model: object, inputs: Tensors, precision: Precision) -> Tensors | None:
        """Return the answers of the estimator.

        For float32, the weights of the estimator are rounded to float32. The difference from the
        answers in float64 then includes this rounding. For float32, the result is None if the
        estimator supports only float64.

        Raises:
            ValueError: the estimator refuses the inputs.
        """
        estimator: Any = (
            _round_in_place(copy.deepcopy(model), set()) if precision == "float32" else model
        )
        rows = build_rows(model, inputs, precision)
        try:
            with warnings.catch_warnings():
                # The extreme inputs of probes can overflow, as intended.
                warnings.simplefilter("ignore", RuntimeWarning)
                return _answers(estimator, rows)
        except IndexError as error:  # CategoricalNB raises IndexError for an unseen category.
            raise ValueError(f"{type(estimator).__name__}: {error}") from error
        except ValueError as error:
            if precision == "float32" and "Buffer dtype mismatch" in str(error):
                return None  # The compiled code of this estimator supports only float64.
            raise

    def trees(self, model: object) -> tuple[Tree, ...] | None:
        """Return the trees of the model's last step, or None; see `read_source_trees`."""
        from onnx_ops.adapters.exporters.sklearn_trees import read_source_trees

        return read_source_trees(model)


def list_outputs(model: object) -> tuple[str, ...]:
    """Return the names of a model's outputs.

    The output of a regressor, ranker or transformer is its variable. The outputs of a classifier or
    mixture are its label and probabilities. The outputs of a detector of outliers are its label (1
    or -1) and scores. The output of a clustering is its label.

    A classifier without probabilities has only a label, since the shapes of its scores differ
    between skl2onnx and scikit-learn. OneClassSVM has only scores: the score of the support vectors
    on its margin is 0, so rounding determines their label.
    """
    from sklearn.base import is_outlier_detector, is_regressor

    is_ranker = type(get_last_step(model)).__name__ in RANKERS
    if is_regressor(model) or is_ranker or not hasattr(model, "predict"):
        return (VARIABLE,)
    if is_outlier_detector(model):
        return (
            (SCORES,) if type(get_last_step(model)).__name__ == "OneClassSVM" else (LABEL, SCORES)
        )
    return (LABEL, PROBABILITIES) if hasattr(model, "predict_proba") else (LABEL,)


def _answers(estimator: Any, rows: Any) -> dict[str, Array]:
    """Return the answers of an estimator, by the names of `list_outputs`."""
    import numpy as np

    outputs = list_outputs(estimator)
    if not hasattr(estimator, "predict"):
        transformed = estimator.transform(rows)
        dense = transformed.toarray() if hasattr(transformed, "toarray") else transformed
        return {VARIABLE: np.asarray(dense).reshape(len(rows), -1)}
    predicted = estimator.predict(rows)
    if predicted.dtype.kind == "O":
        predicted = predicted.astype(str)
    if VARIABLE in outputs:
        return {VARIABLE: predicted.reshape(len(rows), -1)}
    answers = {LABEL: predicted} if LABEL in outputs else {}
    if PROBABILITIES in outputs:
        answers[PROBABILITIES] = estimator.predict_proba(rows)
    if SCORES in outputs:
        answers[SCORES] = estimator.decision_function(rows).reshape(len(rows), -1)
    return answers


def _check_estimator(model: object) -> None:
    """Raise UserError if a model cannot answer new rows."""
    if not hasattr(model, "predict") and not hasattr(model, "transform"):
        name = type(get_last_step(model)).__name__
        what = f"{name} has neither `predict` nor `transform`, which compute answers for new rows"
        remedy = (
            "Set novelty=True."
            if name == "LocalOutlierFactor"
            else "Return a fitted estimator with `predict` or `transform`."
        )
        raise UserError(what, where="export", remedy=remedy)


def _check_label(model: object, answers: Tensors) -> None:
    """Raise UserError if the model's answers have several labels for each row."""
    if LABEL in answers and answers[LABEL].ndim > 1:
        raise UserError(
            f"{type(get_last_step(model)).__name__} predicts several labels",
            where="export",
            remedy="Train one model for each label.",
        )


def _append_steps(graph: Any, output: str, steps: Sequence[Step]) -> None:
    """Append operators to an output of a graph, without changing the output's name."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    if not steps:
        return
    value = f"{output}_transformed"
    rename_values(graph, {output: value})
    declared = next(entry for entry in graph.output if entry.name == output)
    is_double = declared.type.tensor_type.elem_type == TensorProto.DOUBLE
    for place, (operator, array) in enumerate(steps):
        inputs = [value]
        if array is not None:
            inputs.append(f"{output}_constant{place}")
            constant = np.asarray(array, dtype=np.float64 if is_double else np.float32)
            graph.initializer.append(numpy_helper.from_array(constant, inputs[1]))
        value = output if place == len(steps) - 1 else f"{output}_step{place}"
        graph.node.append(
            helper.make_node(operator, inputs, [value], name=f"{output}_{place}_{operator}")
        )


def _set_locale(graph: Any) -> None:
    """Set the locale of operators that convert texts to lower case.

    The locale is C.UTF-8, which slim images contain. The default en_US is missing in them.
    """
    from onnx import helper

    for node in graph.node:
        if node.op_type == "StringNormalizer" and not any(
            entry.name == "locale" for entry in node.attribute
        ):
            node.attribute.append(helper.make_attribute("locale", b"C.UTF-8"))


def _name_row_axes(graph: Any, name: str) -> None:
    """Name the first dimension of inputs and outputs where its size is free."""
    for value in (*graph.input, *graph.output):
        dimensions = value.type.tensor_type.shape.dim
        if dimensions and not dimensions[0].dim_value:
            dimensions[0].dim_param = name


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
    packages = {type(part).__module__.partition(".")[0]: None for part in list_estimators(model)}
    remedy = _REMEDY
    if layout.is_table and getattr(model, "steps", None) is None:
        remedy = (
            f"Select the columns in a first step: make_pipeline(columns, "
            f"{type(model).__name__}(estimator))."
        )
    if others := [
        package for package in packages if package in ("xgboost", "lightgbm") and package != own
    ]:
        remedy = (
            f"Set export.framework: {others[0]}, which converts pipelines with its estimators too."
        )
    what = f"skl2onnx cannot convert {type(model).__name__}"
    with (
        convert_failures(what, remedy),
        warnings.catch_warnings(),
        repair_converters(list_estimators(model)),
    ):
        # skl2onnx 1.20 reads attributes that scikit-learn 1.9 deprecates, such as `probA_` of SVC.
        warnings.simplefilter("ignore", FutureWarning)
        # For an imputer of integers, skl2onnx casts its missing value NaN, and NumPy warns.
        warnings.simplefilter("ignore", RuntimeWarning)
        return skl2onnx.to_onnx(
            model,
            initial_types=[
                (name, kinds[kind]([None, columns])) for name, kind, columns in layout.types
            ],
            # The export uses version 3 of `ai.onnx.ml`, so that targets with an older ONNX Runtime
            # accept the file. ONNX Runtime 1.31 accepts versions up to 5.
            target_opset={"": opset, "ai.onnx.ml": 3},
            options=options,
            name="model",
        )


def _loads(converted: Any) -> bool:
    """Return whether ONNX Runtime can load a graph on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(
            converted.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception:
        # ONNX Runtime raises several types of exceptions without a common base class.
        return False
    return True


def _options(model: object) -> dict[Any, Any]:
    """Return the options of skl2onnx for the parts of a model.

    Without ZipMap, probabilities are a tensor. Scalers divide as in scikit-learn, because a
    multiplication rounds differently, and trees could choose another branch.
    """
    from sklearn.base import is_classifier
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import LinearSVC

    options: dict[Any, Any] = {}
    last = get_last_step(model)
    # LinearSVC has no option `zipmap`. Another option is set, because in a pipeline, skl2onnx sets
    # `zipmap` for a classifier without options.
    if is_classifier(last):
        options[id(last)] = {"nocl": False} if isinstance(last, LinearSVC) else {"zipmap": False}
    for part in list_estimators(model):
        if isinstance(part, StandardScaler):
            options[id(part)] = {"div": "div"}
        # An RFE of a classifier counts as a classifier, so skl2onnx would set `zipmap` for it.
        if hasattr(part, "get_support"):
            options[id(part)] = {}
        if hasattr(part, "build_analyzer"):
            _check_analyzer(part)
            options[id(part)] = {"tokenexp": _WORD}
    return options


def _check_analyzer(part: Any) -> None:
    """Raise UserError if a vectorizer does not split texts in the default way.

    The export always uses the default pattern. It cannot contain another analyzer, preprocessor,
    tokenizer or `strip_accents`.
    """
    own = [name for name in ("preprocessor", "tokenizer") if getattr(part, name) is not None]
    if part.strip_accents is not None:
        own.append("strip_accents")
    if part.analyzer != "word":
        own.append("analyzer")
    elif part.token_pattern != _PATTERN:
        own.append("token_pattern")
    if own:
        raise UserError(
            f"{type(part).__name__} with a custom {own[0]} cannot be converted faithfully",
            where="export",
            why="the export can only split texts into words of letters, digits and underscores",
            remedy=f"Remove {own[0]}, or prepare the texts before the pipeline.",
        )


def _round_in_place(thing: Any, visited: set[int]) -> Any:
    """Convert the float64 arrays of an estimator and its parts to float32.

    Objects without `get_params`, such as compiled trees, stay unchanged. `visited` contains the ids
    of the estimators that were converted before.
    """
    import numpy as np

    if isinstance(thing, np.ndarray):
        return thing.astype(np.float32) if thing.dtype == np.float64 else thing
    if thing is np.float64:  # The value is the `dtype` parameter of an encoder or a vectorizer.
        return np.float32
    if type(thing) in (list, tuple):
        # A named tuple cannot be created from a list, so it stays unchanged.
        return type(thing)(_round_in_place(item, visited) for item in thing)
    if isinstance(thing, dict):
        return {key: _round_in_place(value, visited) for key, value in thing.items()}
    if hasattr(thing, "get_params") and id(thing) not in visited:
        visited.add(id(thing))
        for name, value in vars(thing).items():
            setattr(thing, name, _round_in_place(value, visited))
    return thing
