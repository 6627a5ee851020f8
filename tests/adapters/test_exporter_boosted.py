"""The exporters of XGBoost and LightGBM, over models trained on bundled data."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.exporters.boosted import LightgbmExporter, XgboostExporter
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.domain.pipeline import Export
from onnx_ops.errors import UserError
from onnx_ops.ports import Tensors
from onnx_ops.testing.exporters import ExporterSuite
from tests.adapters.model_runs import export, piped, sk
from tests.support.fixtures import fixed

SECTION = Export(framework="xgboost")
EXPORTERS = {"xgboost": XgboostExporter(), "lightgbm": LightgbmExporter()}
by_package = pytest.mark.parametrize("package", EXPORTERS)


def boosted(package: str, kind: str = "Classifier", **settings: Any) -> Any:
    name, quiet = ("XGB", {}) if package == "xgboost" else ("LGBM", {"verbose": -1})
    made = {"n_estimators": 15, "random_state": 0, "n_jobs": 1, **quiet, **settings}
    return getattr(importlib.import_module(package), name + kind)(**made)


def fit(model: Any, name: str) -> tuple[Any, Any]:
    """Return the model, trained on a bundled data set, and the set's rows."""
    from sklearn import datasets

    data = getattr(datasets, f"load_{name}")()
    rows = data.data.astype(np.float32)
    return model.fit(rows, data.target), rows


@by_package
@pytest.mark.parametrize("data", ["iris", "breast_cancer", "diabetes"])
class TestBoosted(ExporterSuite):
    @pytest.fixture
    def exporter(self, package: str) -> SklearnExporter:
        return EXPORTERS[package]

    @pytest.fixture
    def trained(self, package: str, data: str) -> tuple[Any, Any]:
        if data == "breast_cancer":
            # This case covers a model that is the last step of a pipeline.
            settings: dict[str, Any] = {"max_depth": 3} if package == "xgboost" else {}
            return fit(
                piped(sk("preprocessing.StandardScaler"), boosted(package, **settings)), data
            )
        return fit(boosted(package, "Regressor" if data == "diabetes" else "Classifier"), data)

    @pytest.fixture
    def model(self, trained: tuple[Any, Any]) -> object:
        return trained[0]

    section = fixed(SECTION)

    @pytest.fixture
    def samples(self, trained: tuple[Any, Any]) -> Tensors:
        return {"x": trained[1][::4]}


@pytest.mark.parametrize(
    ("package", "reason"), [("xgboost", "wrong shape"), ("lightgbm", r"0 sample\(s\)")]
)
def test_reference_of_empty_batch_raises_value_error_with_reason_of_library(
    package: str, reason: str
) -> None:
    model, rows = fit(boosted(package), "iris")
    with pytest.raises(ValueError, match=reason):
        EXPORTERS[package].reference(model, {"x": rows[:0]}, "float32")


@by_package
@pytest.mark.parametrize("opset", [15, 18, 21])
def test_export_boosted_trees_after_scaler_equals_source_for_all_rows(
    tmp_path: Path, package: str, opset: int
) -> None:
    model, rows = fit(piped(sk("preprocessing.StandardScaler"), boosted(package)), "breast_cancer")
    section = Export(framework="x", opset=opset)
    answers = export(EXPORTERS[package], model, {"x": rows}, tmp_path / "m.onnx", section)
    np.testing.assert_array_equal(answers["label"], model.predict(rows))
    assert np.abs(answers["probabilities"] - model.predict_proba(rows)).max() < 1e-5


@by_package
def test_export_boosted_trees_with_missing_values_equals_source(
    tmp_path: Path, package: str
) -> None:
    from sklearn import datasets

    data = datasets.load_iris()
    rows = data.data.astype(np.float32)
    rows[np.random.default_rng(0).random(rows.shape) < 0.2] = np.nan
    model = boosted(package).fit(rows, data.target)
    answers = export(EXPORTERS[package], model, {"x": rows}, tmp_path / "m.onnx", SECTION)
    assert np.abs(answers["probabilities"] - model.predict_proba(rows)).max() < 1e-5


@by_package
def test_export_of_raw_booster_raises_user_error_with_remedy(tmp_path: Path, package: str) -> None:
    model, rows = fit(boosted(package), "iris")
    booster = model.get_booster() if package == "xgboost" else model.booster_
    with pytest.raises(UserError, match="Booster") as refused:
        export(EXPORTERS[package], booster, {"x": rows}, tmp_path / "m.onnx", SECTION)
    assert "Classifier" in refused.value.remedy
    assert "joblib.dump" in refused.value.remedy


@pytest.mark.parametrize(
    ("kind", "settings"), [("RFClassifier", {}), ("Classifier", {"num_parallel_tree": 3})]
)
def test_export_of_xgboost_forest_raises_user_error(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    model, rows = fit(
        piped(sk("impute.SimpleImputer"), boosted("xgboost", kind, **settings)), "iris"
    )
    with pytest.raises(UserError) as refused:
        export(XgboostExporter(), model, {"x": rows}, tmp_path / "m.onnx", SECTION)
    assert refused.value.remedy


def test_sklearn_export_of_xgboost_model_without_converter_raises_user_error_with_remedy(
    tmp_path: Path,
) -> None:
    import xgboost

    class Mine(xgboost.XGBClassifier):
        """A subclass that no converter is registered for."""

    Mine.__module__ = "xgboost.sklearn"
    model, rows = fit(piped(sk("impute.SimpleImputer"), Mine(n_estimators=2)), "iris")
    with pytest.raises(
        UserError, match=r"skl2onnx cannot convert .* Set export.framework: xgboost"
    ):
        export(SklearnExporter(), model, {"x": rows}, tmp_path / "m.onnx", SECTION)
