"""Wrappers, clusterings, outlier detectors and transformers of scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.exporters.sklearn import SklearnExporter, list_outputs
from onnx_ops.adapters.exporters.sklearn_wrappers import interpolate, list_estimators, rewrite_model
from onnx_ops.domain.pipeline import Export
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports.data import Dataset, Tensors
from tests.adapters import model_runs
from tests.adapters.model_runs import piped, sk
from tests.adapters.test_exporter_tables import check_same

SECTION = Export(framework="sklearn")
_DRAW = np.random.default_rng(11)
ROWS = 120
_AGE = _DRAW.normal(40, 12, (ROWS, 1)).astype(np.float32)
NUMBERS: Tensors = {"age": _AGE, "visits": _DRAW.integers(0, 9, (ROWS, 1))}
COLUMNS: Tensors = {**NUMBERS, "city": _DRAW.choice(["Oslo", "Rome", "Paris"], (ROWS, 1))}
LABEL = (_AGE[:, 0] + _DRAW.normal(0, 4, ROWS) > 40).astype(np.int64)
AMOUNT = np.abs(_AGE[:, 0] / 10 + _DRAW.normal(0, 0.5, ROWS))
THREE = np.digitize(_AGE[:, 0], [34, 46])


def select_columns(*numbers: str) -> Any:
    """Return a transformer that selects numeric and text columns by name."""
    steps = [
        ("numbers", sk("preprocessing.StandardScaler"), list(numbers or NUMBERS)),
        ("texts", sk("preprocessing.OneHotEncoder", handle_unknown="ignore"), ["city"]),
    ]
    return sk("compose.ColumnTransformer", steps)


def mixed(*steps: Any) -> Any:
    return piped(select_columns(), *steps)


def scaled(*steps: Any) -> Any:
    return piped(sk("preprocessing.StandardScaler"), *steps)


def logistic() -> Any:
    return sk("linear_model.LogisticRegression")


def forest() -> Any:
    return sk("ensemble.RandomForestClassifier", n_estimators=8, random_state=0)


def ridge() -> Any:
    return sk("linear_model.Ridge")


WRAPPERS: dict[str, tuple[Any, Any]] = {
    "calibrated pipelines": (
        lambda: sk("calibration.CalibratedClassifierCV", mixed(logistic()), cv=3),
        LABEL,
    ),
    "calibrated, three classes": (
        lambda: sk("calibration.CalibratedClassifierCV", mixed(logistic()), cv=3),
        THREE,
    ),
    "calibrated forests, isotonic": (
        lambda: sk("calibration.CalibratedClassifierCV", mixed(forest()), cv=3, method="isotonic"),
        LABEL,
    ),
    "calibrated once": (
        lambda: sk("calibration.CalibratedClassifierCV", mixed(logistic()), cv=3, ensemble=False),
        LABEL,
    ),
    "calibrated within, isotonic": (
        lambda: mixed(
            sk("calibration.CalibratedClassifierCV", logistic(), cv=3, method="isotonic")
        ),
        LABEL,
    ),
    "target, logarithm": (
        lambda: sk(
            "compose.TransformedTargetRegressor",
            mixed(ridge()),
            func=np.log1p,
            inverse_func=np.expm1,
        ),
        AMOUNT,
    ),
    "target, scaled": (
        lambda: sk(
            "compose.TransformedTargetRegressor",
            mixed(ridge()),
            transformer=sk("preprocessing.StandardScaler"),
        ),
        AMOUNT,
    ),
    "target, only divided": (
        lambda: sk(
            "compose.TransformedTargetRegressor",
            mixed(ridge()),
            transformer=sk("preprocessing.StandardScaler", with_mean=False),
        ),
        AMOUNT,
    ),
    "target within": (
        lambda: mixed(
            sk("compose.TransformedTargetRegressor", ridge(), func=np.log, inverse_func=np.exp)
        ),
        AMOUNT,
    ),
    "search of calibrated": (
        lambda: sk(
            "model_selection.GridSearchCV",
            sk("calibration.CalibratedClassifierCV", mixed(logistic()), cv=3),
            {"method": ["sigmoid"]},
            cv=2,
        ),
        LABEL,
    ),
    "one against the rest": (
        lambda: sk("multiclass.OneVsRestClassifier", mixed(logistic())),
        THREE,
    ),
    "stacked pipelines": (
        lambda: sk(
            "ensemble.StackingClassifier", [("a", mixed(logistic())), ("b", mixed(forest()))], cv=3
        ),
        LABEL,
    ),
    "several targets": (
        lambda: sk("multioutput.MultiOutputRegressor", mixed(ridge())),
        np.stack([AMOUNT, AMOUNT**2], axis=1),
    ),
    "frozen and calibrated": (
        lambda: sk(
            "calibration.CalibratedClassifierCV",
            sk(
                "frozen.FrozenEstimator",
                mixed(logistic()).fit(Dataset(inputs=COLUMNS).frame(), LABEL),
            ),
        ),
        LABEL,
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_export_of_wrapped_pipeline_equals_source(tmp_path: Path, name: str) -> None:
    make, target = WRAPPERS[name]
    model = make().fit(Dataset(inputs=COLUMNS).frame(), target)
    SklearnExporter().save(model, tmp_path)
    check_same(SklearnExporter(), SklearnExporter().load(tmp_path), COLUMNS, tmp_path)


OTHERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "cluster.KMeans": ({"n_clusters": 3, "n_init": 1, "random_state": 0}, ("label",)),
    "cluster.MiniBatchKMeans": ({"n_clusters": 3, "n_init": 1, "random_state": 0}, ("label",)),
    "cluster.MeanShift": ({}, ("label",)),
    "cluster.AffinityPropagation": ({"random_state": 0}, ("label",)),
    "cluster.Birch": ({"n_clusters": 3}, ("label",)),
    "mixture.GaussianMixture": ({"n_components": 2, "random_state": 0}, ("label", "probabilities")),
    "mixture.BayesianGaussianMixture": (
        {"n_components": 2, "max_iter": 2000},
        ("label", "probabilities"),
    ),
    "ensemble.IsolationForest": ({"n_estimators": 10, "random_state": 0}, ("label", "scores")),
    "neighbors.LocalOutlierFactor": ({"novelty": True}, ("label", "scores")),
    "linear_model.SGDOneClassSVM": ({"random_state": 0}, ("label", "scores")),
    "svm.OneClassSVM": ({}, ("scores",)),
    "decomposition.PCA": ({"n_components": 1}, ("variable",)),
    "decomposition.FactorAnalysis": ({"n_components": 1}, ("variable",)),
    "decomposition.FastICA": ({"random_state": 0}, ("variable",)),
    "decomposition.SparsePCA": ({"n_components": 2, "random_state": 0}, ("variable",)),
    "kernel_approximation.RBFSampler": ({"n_components": 4, "random_state": 0}, ("variable",)),
    "preprocessing.PolynomialFeatures": ({}, ("variable",)),
}


@pytest.mark.parametrize("path", OTHERS)
def test_export_of_unsupervised_estimator_equals_source_in_output_names_and_values(
    tmp_path: Path, path: str
) -> None:
    options, outputs = OTHERS[path]
    model = scaled(sk(path, **options)).fit(Dataset(inputs=NUMBERS).frame())
    check_same(SklearnExporter(), model, NUMBERS, tmp_path)
    assert tuple(spec.name for spec in read_model_info(tmp_path / "model.onnx").outputs) == outputs
    assert list_outputs(model) == outputs


def test_export_of_column_transformer_equals_source(tmp_path: Path) -> None:
    model = select_columns().fit(Dataset(inputs=COLUMNS).frame())
    check_same(SklearnExporter(), model, COLUMNS, tmp_path)


@pytest.mark.parametrize("method", ["clip", "nan", "raise"])
def test_export_of_isotonic_regression_accepts_only_clip_of_out_of_bounds_values(
    tmp_path: Path, method: str
) -> None:
    rows = {"age": NUMBERS["age"]}
    model = sk("isotonic.IsotonicRegression", out_of_bounds=method).fit(rows["age"], AMOUNT)
    if method == "clip":
        check_same(SklearnExporter(), model, rows, tmp_path)
        return
    with pytest.raises(UserError, match="out_of_bounds='clip'"):
        model_runs.export(SklearnExporter(), model, rows, tmp_path / "model.onnx", SECTION)


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "transformer of the target": (
        lambda: sk(
            "compose.TransformedTargetRegressor",
            mixed(ridge()),
            transformer=sk("preprocessing.QuantileTransformer", n_quantiles=20),
        ),
        AMOUNT,
        "with QuantileTransformer cannot be converted",
    ),
    "function of the user": (
        lambda: sk(
            "compose.TransformedTargetRegressor",
            mixed(ridge()),
            func=np.log,
            inverse_func=exp,
            check_inverse=False,
        ),
        AMOUNT,
        "the inverse function exp",
    ),
    "threshold": (
        lambda: sk("model_selection.FixedThresholdClassifier", mixed(logistic()), threshold=0.3),
        LABEL,
        "does not convert the threshold",
    ),
    "no converter": (
        lambda: mixed(sk("neighbors.NearestCentroid")),
        LABEL,
        "no converter for NearestCentroid",
    ),
    "clusters as a step": (
        lambda: mixed(sk("cluster.KMeans", n_clusters=2, n_init=1), logistic()),
        LABEL,
        "KMeans as a step",
    ),
    "pipelines that begin differently": (
        lambda: sk(
            "ensemble.StackingRegressor",
            [
                ("a", mixed(ridge())),
                (
                    "b",
                    piped(
                        sk("compose.ColumnTransformer", [("age", "passthrough", ["age"])]), ridge()
                    ),
                ),
            ],
            cv=3,
        ),
        AMOUNT,
        "Select the columns in a first step: make_pipeline",
    ),
}


def exp(values: Any) -> Any:
    """Return something other than NumPy's function of the same name."""
    return 2**values


@pytest.mark.parametrize("name", REFUSED)
def test_export_of_unsupported_wrapper_or_step_raises_user_error_with_remedy(
    tmp_path: Path, name: str
) -> None:
    make, target, message = REFUSED[name]
    model = make().fit(Dataset(inputs=COLUMNS).frame(), target)
    with pytest.raises(UserError) as caught:
        model_runs.export(SklearnExporter(), model, COLUMNS, tmp_path / "model.onnx", SECTION)
    assert message in str(caught.value)
    assert caught.value.remedy


def test_rewrite_model_leaves_trained_model_unchanged() -> None:
    model = sk("calibration.CalibratedClassifierCV", mixed(logistic()), cv=3)
    model.fit(Dataset(inputs=COLUMNS).frame(), LABEL)
    before = model.predict_proba(Dataset(inputs=COLUMNS).frame())
    rewritten, _ = rewrite_model(model)
    assert any(type(part).__name__ == "ColumnTransformer" for part in list_estimators(rewritten))
    np.testing.assert_array_equal(model.predict_proba(Dataset(inputs=COLUMNS).frame()), before)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_interpolate_between_and_beyond_points_equals_numpy_interp(count: int) -> None:
    places, values = np.arange(count) ** 2.0, np.arange(count)[::-1] * 1.5
    points = np.linspace(-1, count**2, 31)[:, None]
    answer = points
    operations = {
        "Sub": np.subtract,
        "Div": np.divide,
        "Max": np.maximum,
        "Min": np.minimum,
        "MatMul": np.matmul,
        "Add": np.add,
    }
    for operator, array in interpolate(places, values):
        answer = operations[operator](answer, array)
    np.testing.assert_allclose(answer[:, 0], np.interp(points[:, 0], places, values))
