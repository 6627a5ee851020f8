"""The exporters of XGBoost and LightGBM, over models trained on bundled data."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.exporters.boosted import (
    LightgbmExporter,
    XgboostExporter,
    _number_nodes,
)
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.domain.pipeline import Export
from onnx_ops.errors import UserError
from onnx_ops.ports import Tensors
from onnx_ops.testing.exporters import ExporterSuite
from tests.adapters.model_runs import export, piped, reference, sk
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


def check_xgboost_export(model: Any, rows: Any, folder: Path) -> None:
    """Check that the export gives the same answers as the model."""
    exporter = XgboostExporter()
    answers = export(exporter, model, {"x": rows}, folder / "m.onnx", SECTION)
    expected = reference(exporter, model, {"x": rows}, "float64")
    assert list(answers) == list(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(answers[name], array, rtol=1e-5, atol=1e-5)


def refuse_xgboost(model: Any, rows: Any, folder: Path) -> UserError:
    with pytest.raises(UserError) as refused:
        export(XgboostExporter(), model, {"x": rows}, folder / "m.onnx", SECTION)
    return refused.value


@pytest.mark.parametrize(
    ("kind", "settings", "data"),
    [
        ("Regressor", {"num_parallel_tree": 3}, "diabetes"),
        ("RFRegressor", {}, "diabetes"),
        ("Classifier", {"num_parallel_tree": 3}, "breast_cancer"),
        ("RFClassifier", {}, "breast_cancer"),
    ],
)
def test_export_of_xgboost_forest_equals_source(
    tmp_path: Path, kind: str, settings: dict[str, Any], data: str
) -> None:
    model, rows = fit(boosted("xgboost", kind, subsample=0.7, **settings), data)
    check_xgboost_export(model, rows, tmp_path)


@pytest.mark.parametrize(
    ("kind", "settings"), [("RFClassifier", {}), ("Classifier", {"num_parallel_tree": 3})]
)
def test_export_of_xgboost_forest_for_three_classes_raises_user_error(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    model, rows = fit(
        piped(sk("impute.SimpleImputer"), boosted("xgboost", kind, **settings)), "iris"
    )
    error = refuse_xgboost(model, rows, tmp_path)
    assert "successive classes" in str(error)
    assert error.remedy


def test_export_of_xgboost_forest_with_early_stopping_raises_user_error(tmp_path: Path) -> None:
    _, rows = fit(boosted("xgboost", "Regressor"), "diabetes")
    target = rows[:, 2] + rows[:, 8]
    model = boosted("xgboost", "Regressor", num_parallel_tree=2, early_stopping_rounds=2)
    model.fit(rows, target, eval_set=[(rows, target)], verbose=False)
    assert "early stopping" in str(refuse_xgboost(model, rows, tmp_path))


def test_export_of_xgboost_classifier_after_continued_training_equals_source(
    tmp_path: Path,
) -> None:
    first, rows = fit(boosted("xgboost"), "breast_cancer")
    model = boosted("xgboost").fit(rows, first.predict(rows), xgb_model=first.get_booster())
    check_xgboost_export(model, rows, tmp_path)


def make_category_rows() -> tuple[Any, Any]:
    """Return rows of two columns of categories and a column of numbers, and their scores.

    Some values are missing.
    """
    draw = np.random.default_rng(0)
    codes = np.stack([draw.integers(0, 9, 400), draw.integers(0, 3, 400)], axis=1)
    numbers = draw.normal(size=(400, 1))
    scores = draw.normal(size=9)[codes[:, 0]] + codes[:, 1] * numbers[:, 0]
    rows = np.concatenate([codes, numbers], axis=1).astype(np.float32)
    rows[draw.random(rows.shape) < 0.1] = np.nan
    return rows, scores


CATEGORIES: dict[str, Any] = {"enable_categorical": True, "feature_types": ["c", "c", "q"]}


@pytest.mark.parametrize("largest_one_hot", [1, 4, 64])
@pytest.mark.parametrize(
    ("kind", "classes"), [("Regressor", 0), ("Classifier", 2), ("Classifier", 3)]
)
def test_export_of_xgboost_model_with_categories_equals_source(
    tmp_path: Path, kind: str, classes: int, largest_one_hot: int
) -> None:
    rows, scores = make_category_rows()
    bounds = [0.3] if classes == 2 else [-0.5, 0.5]
    model = boosted("xgboost", kind, max_cat_to_onehot=largest_one_hot, **CATEGORIES)
    model.fit(rows, np.digitize(scores, bounds) if classes else scores)
    unseen = rows[:30].copy()
    unseen[:, 0] = np.repeat([9, 40, 1000], 10)
    check_xgboost_export(model, np.concatenate([rows, unseen]), tmp_path)


def test_export_of_xgboost_model_with_category_frame_raises_user_error(tmp_path: Path) -> None:
    pandas: Any = importlib.import_module("pandas")
    rows, scores = make_category_rows()
    frame = pandas.DataFrame(
        {"city": pandas.Categorical(np.where(scores > 0, "Oslo", "Rome")), "age": rows[:, 2]}
    )
    model = boosted("xgboost", "Regressor", enable_categorical=True).fit(frame, scores)
    assert "of type category" in str(refuse_xgboost(model, rows[:, 1:], tmp_path))


def test_export_of_xgboost_categories_after_tree_without_splits_raises_user_error(
    tmp_path: Path,
) -> None:
    rows, scores = make_category_rows()
    stump = boosted("xgboost", n_estimators=1, gamma=1e9, **CATEGORIES).fit(rows, scores > 0.3)
    model = boosted("xgboost", **CATEGORIES).fit(rows, scores > 0.3, xgb_model=stump.get_booster())
    assert "first tree without splits" in str(refuse_xgboost(model, rows, tmp_path))


def chain(length: int) -> dict[str, Any]:
    """Return a tree with splits in a row, whose two branches are the same."""
    node: dict[str, Any] = {"nodeid": 0}
    for number in range(1, length):
        node = {"nodeid": number, "children": [node, node]}
    return node


def test_number_nodes_of_common_branches_visits_each_once() -> None:
    assert _number_nodes(chain(100)) == {99 - number: number for number in range(100)}


def test_number_nodes_of_too_deep_tree_raises_not_implemented_error() -> None:
    with pytest.raises(NotImplementedError, match="more than 500"):
        _number_nodes(chain(502))


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
