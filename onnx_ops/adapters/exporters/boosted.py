"""Exporters of XGBoost and LightGBM estimators, alone or in pipelines.

The exporters register the converters of onnxmltools in skl2onnx.
"""

from __future__ import annotations

import copy
import functools
import importlib
import warnings
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
    _estimators = (("XGBClassifier", True), ("XGBRegressor", False), ("XGBRanker", False))

    def reference(self, model: object, inputs: Tensors, precision: Precision) -> Tensors | None:
        """Run the estimator; refuse an empty batch.

        XGBoost 3.2 answers an empty batch with two classes, whatever the number of classes is.
        """
        if not all(len(array) for array in inputs.values()):
            raise ValueError("xgboost can return a wrong shape for an empty batch")
        return super().reference(model, inputs, precision)

    def _convertible(self, model: object) -> object:
        """Return a copy of the model whose boosters have no column names.

        onnxmltools only accepts names such as `f0` and `f1`, and reads the numbers in them.
        """
        copied = copy.deepcopy(model)
        for part in list_estimators(copied):
            if type(part).__module__.startswith("xgboost"):
                booster: Any = part.get_booster()  # type: ignore[attr-defined]
                booster.feature_names = booster.feature_types = None
        return copied


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
