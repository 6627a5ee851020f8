"""XGBoost and LightGBM, over models trained on bundled data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.exporters.boosted import LightgbmExporter, XgboostExporter
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.target import Target
from onnx_ops.errors import UserError
from onnx_ops.ports import ExportRequest, Tensors
from onnx_ops.testing.exporters import ExporterSuite

SECTION = Export(framework="xgboost")


def fit(model: Any, name: str) -> tuple[Any, Any]:
    """The model, trained on a bundled set, and the set's rows."""
    from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris

    data = {"iris": load_iris, "cancer": load_breast_cancer, "diabetes": load_diabetes}[name]()
    rows = data.data.astype(np.float32)
    return model.fit(rows, data.target), rows


def lgbm(kind: str, **settings: Any) -> Any:
    import lightgbm

    estimator = getattr(lightgbm, f"LGBM{kind}")
    return estimator(n_estimators=15, random_state=0, verbose=-1, n_jobs=1, **settings)


def xgb(kind: str, **settings: Any) -> Any:
    import xgboost

    return getattr(xgboost, f"XGB{kind}")(**{"n_estimators": 15, "random_state": 0, "n_jobs": 1, **settings})


class TestXgboost(ExporterSuite):
    @pytest.fixture
    def exporter(self) -> SklearnExporter:
        return XgboostExporter()

    @pytest.fixture
    def trained(self) -> tuple[Any, Any]:
        return fit(xgb("Classifier"), "iris")

    @pytest.fixture
    def model(self, trained: tuple[Any, Any]) -> object:
        return trained[0]

    @pytest.fixture
    def section(self) -> Export:
        return SECTION

    @pytest.fixture
    def samples(self, trained: tuple[Any, Any]) -> Tensors:
        return {"x": trained[1][::4]}


class TestXgboostTwoClassesInAPipeline(TestXgboost):
    @pytest.fixture
    def trained(self) -> tuple[Any, Any]:
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        return fit(make_pipeline(StandardScaler(), xgb("Classifier", max_depth=3)), "cancer")


class TestXgboostRegression(TestXgboost):
    @pytest.fixture
    def trained(self) -> tuple[Any, Any]:
        return fit(xgb("Regressor"), "diabetes")


class TestLightgbm(TestXgboost):
    @pytest.fixture
    def exporter(self) -> SklearnExporter:
        return LightgbmExporter()

    @pytest.fixture
    def trained(self) -> tuple[Any, Any]:
        return fit(lgbm("Classifier"), "iris")


class TestLightgbmTwoClassesInAPipeline(TestLightgbm):
    @pytest.fixture
    def trained(self) -> tuple[Any, Any]:
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        return fit(make_pipeline(StandardScaler(), lgbm("Classifier")), "cancer")


class TestLightgbmRegression(TestLightgbm):
    @pytest.fixture
    def trained(self) -> tuple[Any, Any]:
        return fit(lgbm("Regressor"), "diabetes")


@pytest.mark.parametrize("exporter", [XgboostExporter(), LightgbmExporter()])
@pytest.mark.parametrize("opset", [15, 18, 21])
def test_a_scaler_before_the_trees_moves_no_row_to_another_leaf(
    tmp_path: Path, exporter: SklearnExporter, opset: int
) -> None:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    last = xgb("Classifier") if isinstance(exporter, XgboostExporter) else lgbm("Classifier")
    model, rows = fit(make_pipeline(StandardScaler(), last), "cancer")
    request = ExportRequest(section=Export(framework="x", opset=opset), samples={"x": rows}, path=tmp_path / "m.onnx")
    exporter.export(model, request)
    (answers,) = OnnxRuntime().run(request.path, Target(name="cpu"), ({"x": rows},))
    np.testing.assert_array_equal(answers["label"], model.predict(rows))
    assert np.abs(answers["probabilities"] - model.predict_proba(rows)).max() < 1e-5


@pytest.mark.parametrize("exporter", [XgboostExporter(), LightgbmExporter()])
def test_missing_values_take_the_way_that_they_take_in_the_source(tmp_path: Path, exporter: SklearnExporter) -> None:
    from sklearn.datasets import load_iris

    data = load_iris()
    rows = data.data.astype(np.float32)
    rows[np.random.default_rng(0).random(rows.shape) < 0.2] = np.nan
    last = xgb("Classifier") if isinstance(exporter, XgboostExporter) else lgbm("Classifier")
    model = last.fit(rows, data.target)
    request = ExportRequest(section=SECTION, samples={"x": rows}, path=tmp_path / "m.onnx")
    exporter.export(model, request)
    (answers,) = OnnxRuntime().run(request.path, Target(name="cpu"), ({"x": rows},))
    assert np.abs(answers["probabilities"] - model.predict_proba(rows)).max() < 1e-5


@pytest.mark.parametrize("exporter", [XgboostExporter(), LightgbmExporter()])
def test_a_booster_is_refused_with_the_way_to_bring_it(tmp_path: Path, exporter: SklearnExporter) -> None:
    model, rows = fit(xgb("Classifier") if isinstance(exporter, XgboostExporter) else lgbm("Classifier"), "iris")
    booster = model.get_booster() if isinstance(exporter, XgboostExporter) else model.booster_
    with pytest.raises(UserError, match="Booster") as refused:
        exporter.export(booster, ExportRequest(section=SECTION, samples={"x": rows}, path=tmp_path / "m.onnx"))
    assert "Classifier" in refused.value.remedy


@pytest.mark.parametrize("kind", ["RFClassifier", "Classifier"])
def test_a_forest_that_the_converter_gets_wrong_is_refused(tmp_path: Path, kind: str) -> None:
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline

    settings = {} if kind == "RFClassifier" else {"num_parallel_tree": 3}
    model, rows = fit(make_pipeline(SimpleImputer(), xgb(kind, **settings)), "iris")
    with pytest.raises(UserError) as refused:
        XgboostExporter().export(model, ExportRequest(section=SECTION, samples={"x": rows}, path=tmp_path / "m.onnx"))
    assert refused.value.remedy


def test_the_sklearn_exporter_names_the_one_that_can(tmp_path: Path) -> None:
    import xgboost
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline

    class Mine(xgboost.XGBClassifier):
        """A class that nothing has registered."""

    Mine.__module__ = "xgboost.sklearn"

    model, rows = fit(make_pipeline(SimpleImputer(), Mine(n_estimators=2)), "iris")
    with pytest.raises(UserError, match=r"skl2onnx cannot convert .* Set export.framework: xgboost"):
        SklearnExporter().export(model, ExportRequest(section=SECTION, samples={"x": rows}, path=tmp_path / "m.onnx"))
