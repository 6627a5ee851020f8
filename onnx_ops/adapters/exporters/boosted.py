"""Exporters of XGBoost and LightGBM estimators, alone or in pipelines.

The exporters register the converters of onnxmltools in skl2onnx.
"""

from __future__ import annotations

import copy
import functools
import importlib
import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from onnx_ops.adapters.exporters.signature import Precision
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.exporters.sklearn_wrappers import list_estimators
from onnx_ops.errors import UserError
from onnx_ops.ports.data import Tensors
from onnx_ops.ports.export import ExportRequest

_CLASSIFIER_OPTIONS = {
    "nocl": [True, False],
    "zipmap": [True, False, "columns"],
    "raw_scores": [True, False],
}

_MOST_NESTED = 500
"""Maximum depth of an exported XGBoost tree, in which each category is a split.

onnxmltools recurses once for each level. ONNX Runtime 1.31 crashes when it loads a tree of several
thousand levels (https://github.com/microsoft/onnxruntime/issues/25400).
"""


class _BoostedExporter(SklearnExporter):
    """Base of the exporters of gradient boosting libraries.

    With precision float64, `reference` computes the steps of a pipeline before the estimator in
    float64. The trees of the estimator compare and add values in the precision of their library.
    """

    converters = ("onnxmltools", *SklearnExporter.converters)
    _package: str
    _native: str
    _converter: tuple[str, str]
    """Converter: a module below `onnxmltools.convert`, and a function of the module."""
    _estimators: tuple[tuple[str, bool], ...]
    """Names of estimator classes, and whether each of them is a classifier."""

    def export(self, model: object, request: ExportRequest) -> None:
        if type(model).__name__ == "Booster" or type(model).__module__.startswith(
            f"{self._package}.basic"
        ):
            raise UserError(
                f"a Booster of {self._package} does not record whether it is a classifier",
                where="export",
                remedy=f"`train.run` must return {self._native}, or a pipeline that ends in one. "
                "The file of `model:` must contain one too: `joblib.dump(estimator, FILE)`.",
            )
        with warnings.catch_warnings():
            # Warnings at the import of these packages are not about the user's model.
            warnings.simplefilter("ignore")
            from skl2onnx import update_registered_converter
            from skl2onnx.common import shape_calculator as shapes

            package = importlib.import_module(self._package)
            converters = importlib.import_module(f"onnxmltools.convert.{self._converter[0]}")
        for name, classifies in self._estimators:
            update_registered_converter(
                getattr(package, name),
                f"OnnxOps{name}",
                shapes.calculate_linear_classifier_output_shapes
                if classifies
                else shapes.calculate_linear_regressor_output_shapes,
                getattr(converters, self._converter[1]),
                overwrite=True,
                options=_CLASSIFIER_OPTIONS if classifies else {"split": None},
            )
        super().export(model, request)


class XgboostExporter(_BoostedExporter):
    """Exporter of XGBoost estimators, alone or at the end of scikit-learn pipelines."""

    tools = ("xgboost", *SklearnExporter.tools)
    _package = "xgboost"
    _native = (
        "an XGBClassifier, XGBRegressor or XGBRanker (whose `load_model` reads a Booster's file)"
    )
    _converter = ("xgboost.operator_converters.XGBoost", "convert_xgboost")
    _estimators = (
        ("XGBClassifier", True),
        ("XGBRegressor", False),
        ("XGBRanker", False),
        ("XGBRFClassifier", True),
        ("XGBRFRegressor", False),
    )

    def export(self, model: object, request: ExportRequest) -> None:
        """Convert the estimator with a function that visits each node of a tree once.

        onnxmltools 1.16 writes a split by category as a chain of splits with a common branch. It
        visits the branch again for each split, so its time grows exponentially with the depth.
        """
        with warnings.catch_warnings():
            # Warnings at the import of the converter are not about the user's model.
            warnings.simplefilter("ignore")
            module: Any = importlib.import_module(f"onnxmltools.convert.{self._converter[0]}")
        converter, name = module.XGBConverter, "_remap_nodeid"
        original = getattr(converter, name)
        setattr(converter, name, staticmethod(_number_nodes))
        try:
            super().export(model, request)
        finally:
            setattr(converter, name, staticmethod(original))

    def reference(self, model: object, inputs: Tensors, precision: Precision) -> Tensors | None:
        """Run the estimator; refuse an empty batch.

        XGBoost 3.2 answers an empty batch with two classes, whatever the number of classes is.
        """
        if not all(len(array) for array in inputs.values()):
            raise ValueError("xgboost can return a wrong shape for an empty batch")
        return super().reference(model, inputs, precision)

    def _convertible(self, model: object) -> object:
        """Return a copy of the model from which onnxmltools reads the trees correctly.

        onnxmltools only accepts column names such as `f0` and `f1`, and reads the numbers in them.
        It reads a threshold in every split, and XGBoost writes none for columns of booleans. For
        two classes, it counts the trees of a round by `n_estimators`, which is wrong for forests
        and after continued training.
        """
        copied = copy.deepcopy(model)
        for part in list_estimators(copied):
            if type(part).__module__.startswith("xgboost"):
                booster: Any = part.get_booster()  # type: ignore[attr-defined]
                types = ["c" if kind == "c" else "q" for kind in booster.feature_types or ()]
                booster.feature_names, booster.feature_types = None, types or None
                part.n_estimators = None  # type: ignore[attr-defined]
        return copied


def _number_nodes(
    node: Mapping[str, Any], numbers: dict[int, int] | None = None, depth: int = 0
) -> dict[int, int]:
    """Return the numbers of a tree's nodes in the file, by their numbers in XGBoost.

    Raises:
        NotImplementedError: the splits are nested too deeply for onnxmltools and ONNX Runtime.
    """
    numbers = {} if numbers is None else numbers
    if depth > _MOST_NESTED:
        raise NotImplementedError(
            f"a path through a tree tests more than {_MOST_NESTED} thresholds and categories"
        )
    if node["nodeid"] not in numbers:
        numbers[node["nodeid"]] = len(numbers)
        for child in node.get("children", ()):
            _number_nodes(child, numbers, depth + 1)
    return numbers


class LightgbmExporter(_BoostedExporter):
    """Exporter of LightGBM estimators, alone or at the end of scikit-learn pipelines."""

    tools = ("lightgbm", *SklearnExporter.tools)
    _package = "lightgbm"
    _native = "an LGBMClassifier, LGBMRegressor or LGBMRanker"

    _converter = ("lightgbm.operator_converters.LightGbm", "convert_lightgbm")
    _estimators = (("LGBMClassifier", True), ("LGBMRegressor", False), ("LGBMRanker", False))

    def export(self, model: object, request: ExportRequest) -> None:
        """Convert the estimator with a JSON parser that accepts control characters.

        LightGBM 4.7 writes control characters in names of columns into its JSON without escapes,
        which Python's parser refuses by default.
        """
        with warnings.catch_warnings():
            # Warnings at the import of the converter are not about the user's model.
            warnings.simplefilter("ignore")
            converter: Any = importlib.import_module(f"onnxmltools.convert.{self._converter[0]}")
        strict = converter.json
        converter.json = SimpleNamespace(
            **{**vars(strict), "loads": functools.partial(strict.loads, strict=False)}
        )
        try:
            super().export(model, request)
        finally:
            converter.json = strict
