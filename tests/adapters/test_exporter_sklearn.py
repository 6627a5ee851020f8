"""The scikit-learn exporter, over real estimators."""

from __future__ import annotations

import functools
import importlib
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.exporters.sklearn import LABEL, PROBABILITIES, VARIABLE, SklearnExporter
from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.pipeline import Export
from onnx_ops.errors import NotFoundError, UserError
from onnx_ops.onnx_graph.compatibility import check_model
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.testing.exporters import ExporterSuite
from tests.adapters import model_runs
from tests.adapters.model_runs import piped, reference, sk
from tests.support.fixtures import fixed, made

SECTION = Export(framework="sklearn", opset=17, ir_version=9)


def export(model: Any, rows: Any, path: Path, section: Export = SECTION) -> dict[str, Any]:
    return model_runs.export(SklearnExporter(), model, {"x": rows}, path, section)


def bundled(name: str) -> tuple[Any, Any]:
    """Return rows and labels of a bundled data set."""
    rows, target = getattr(importlib.import_module("sklearn.datasets"), f"load_{name}")(
        return_X_y=True
    )
    return rows, target


def load(name: str) -> tuple[Any, Any]:
    rows, target = bundled(name)
    return rows.astype(np.float32), target


def scaled(*steps: Any) -> Any:
    return piped(sk("preprocessing.StandardScaler"), *steps)


@functools.cache
def digits() -> object:
    """Return a perceptron behind a scaler, trained once."""
    network = sk("neural_network.MLPClassifier", (16,), max_iter=60, tol=1e-2, random_state=0)
    return scaled(network).fit(*bundled("digits"))


class TestClassifier(ExporterSuite):
    exporter = fixed(SklearnExporter())
    model = made(digits)
    section = fixed(SECTION)
    samples = made(lambda: {"x": load("digits")[0][:32]})


class TestRegressor(TestClassifier):
    model = made(lambda: sk("linear_model.Ridge").fit(*bundled("diabetes")))
    samples = made(lambda: {"x": load("diabetes")[0][:32]})


def tumours() -> tuple[Any, Any]:
    rows, labels = load("breast_cancer")
    return rows / rows.std(axis=0), labels


def holed() -> tuple[Any, Any]:
    rows, target = load("diabetes")
    rows[::7, 2] = np.nan
    return rows, target


def twice() -> tuple[Any, Any]:
    rows, target = load("diabetes")
    return rows, np.stack([target, -target], axis=1)


def named(kind: type = str) -> tuple[Any, Any]:
    rows, labels = load("iris")
    return rows, np.array(["setosa", "versicolor", "virginica"], kind)[labels]


IRIS, DIABETES = functools.partial(load, "iris"), functools.partial(load, "diabetes")
SOURCES: dict[str, tuple[Callable[[], Any], Callable[[], tuple[Any, Any]]]] = {
    "texts": (
        lambda: piped(sk("decomposition.PCA", 2), sk("linear_model.LogisticRegression")),
        named,
    ),
    "texts as objects": (
        lambda: sk("linear_model.LogisticRegression", max_iter=500),
        lambda: named(object),
    ),
    "truth values": (
        lambda: sk("linear_model.LogisticRegression"),
        lambda: (load("iris")[0], load("iris")[1] > 0),
    ),
    "two targets": (lambda: sk("linear_model.Ridge"), twice),
    "two targets of trees": (
        lambda: sk("ensemble.RandomForestRegressor", 3, random_state=0),
        twice,
    ),
    "boosted trees": (
        lambda: sk("ensemble.GradientBoostingRegressor", n_estimators=4, random_state=0),
        DIABETES,
    ),
    # The converter writes booleans into fields of integers, which protobuf 7 rejects.
    "histograms": (
        lambda: sk("ensemble.HistGradientBoostingRegressor", max_iter=20, random_state=0),
        holed,
    ),
    # skl2onnx declares the shape of labels as a row or as a column. It names the scaler's value
    # `variable`, as the export names its output.
    "neighbors": (lambda: scaled(sk("neighbors.KNeighborsRegressor")), DIABETES),
    "one vs one": (
        lambda: sk("multiclass.OneVsOneClassifier", sk("linear_model.LogisticRegression")),
        IRIS,
    ),
    "discriminant": (
        lambda: scaled(sk("discriminant_analysis.QuadraticDiscriminantAnalysis")),
        IRIS,
    ),
    # skl2onnx names the output `GPmean`.
    "Gaussian process": (
        lambda: sk("gaussian_process.GaussianProcessRegressor", alpha=0.1, optimizer=None),
        DIABETES,
    ),
    "no probabilities": (lambda: sk("linear_model.RidgeClassifier"), tumours),
    "no probabilities in a pipeline": (lambda: scaled(sk("linear_model.RidgeClassifier")), tumours),
    "soft votes": (
        lambda: sk("ensemble.VotingClassifier", [("a", logistic())], voting="soft"),
        IRIS,
    ),
    "chosen columns": (lambda: piped(sk("feature_selection.RFE", logistic()), logistic()), IRIS),
    "a margin": (lambda: sk("svm.LinearSVC"), tumours),
    "a margin in a pipeline": (lambda: scaled(sk("svm.LinearSVC")), tumours),
}


@pytest.mark.parametrize("source", SOURCES)
def test_sklearn_export_of_estimator_matches_names_shapes_and_values(
    tmp_path: Path, source: str
) -> None:
    make, read = SOURCES[source]
    rows, target = read()
    estimator = make().fit(rows, target)
    answers = export(estimator, rows, tmp_path / "m.onnx")
    expected = reference(SklearnExporter(), estimator, {"x": rows}, "float64")
    outputs = [(VARIABLE,), (LABEL,), (LABEL, PROBABILITIES)]
    assert tuple(answers) == tuple(expected)
    assert (
        tuple(expected)
        == outputs[target.dtype.kind != "f" and 1 + hasattr(estimator, "predict_proba")]
    )
    declared = {spec.name: spec.shape for spec in read_model_info(tmp_path / "m.onnx").outputs}
    for name, array in expected.items():
        assert answers[name].shape == array.shape
        assert declared[name] == ("batch", *array.shape[1:])
        if array.dtype.kind == "f":
            np.testing.assert_allclose(answers[name], array, rtol=1e-3, atol=1e-3)
        else:
            assert array.dtype.kind != "O"
            np.testing.assert_array_equal(answers[name].astype(array.dtype), array)
    check_model(tmp_path / "m.onnx")


def logistic() -> Any:
    return sk("linear_model.LogisticRegression", max_iter=500)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (
            lambda: scaled(sk("neighbors.RadiusNeighborsClassifier", 5.0)),
            "Use KNeighborsClassifier.",
        ),
        (lambda: sk("neighbors.RadiusNeighborsRegressor", 5.0), "Use KNeighborsRegressor."),
        (
            lambda: sk("model_selection.TunedThresholdClassifierCV", logistic(), cv=2),
            "Return the model's `estimator_`",
        ),
        (lambda: piped(sk("cluster.KMeans", 2, n_init=1), logistic()), "Remove the step"),
        (
            lambda: piped(sk("decomposition.KernelPCA", kernel="rbf"), logistic()),
            "Reduce n_components",
        ),
        (
            lambda: piped(sk("ensemble.RandomTreesEmbedding", 3), logistic()),
            "Use sparse_output=False",
        ),
    ],
)
def test_sklearn_export_without_faithful_conversion_raises_user_error_with_remedy(
    tmp_path: Path, make: Callable[[], Any], remedy: str
) -> None:
    rows, labels = load("iris")
    with pytest.raises(UserError, match="cannot be converted faithfully") as caught:
        export(make().fit(rows, labels > 0), rows, tmp_path / "m.onnx")
    assert (caught.value.remedy or "").startswith(remedy)


def test_sklearn_export_of_scaled_forest_equals_source_where_its_precisions_agree(
    tmp_path: Path,
) -> None:
    rows, labels = load("iris")
    forest = scaled(sk("ensemble.RandomForestClassifier", 30, random_state=0)).fit(rows, labels)
    answers = export(forest, rows, tmp_path / "m.onnx")
    single = reference(SklearnExporter(), forest, {"x": rows})["probabilities"]
    double = reference(SklearnExporter(), forest, {"x": rows}, "float64")["probabilities"]
    apart = np.abs(answers["probabilities"] - double).max(axis=1)
    unsure = np.abs(single - double).max(axis=1)
    assert (unsure < 1e-6).any()
    assert (apart[unsure < 1e-6] < 1e-6).all()


def test_sklearn_reference_in_float32_differs_from_float64_by_rounding_and_keeps_model() -> None:
    rows, labels = load("iris")
    pipeline = scaled(sk("linear_model.LogisticRegression")).fit(
        rows.astype(np.float64) * 1.1, labels
    )
    rounded = reference(SklearnExporter(), pipeline, {"x": rows})["probabilities"]
    exact = reference(SklearnExporter(), pipeline, {"x": rows}, "float64")["probabilities"]
    assert (rounded.dtype, exact.dtype) == (np.float32, np.float64)
    noise = np.abs(rounded - exact).max()
    assert 0 < noise < 1e-5
    assert pipeline[-1].coef_.dtype == np.float64


def test_sklearn_reference_of_unsupported_precision_returns_none() -> None:
    data, target = bundled("diabetes")
    estimator = sk("svm.SVR").fit(data, target)
    rows = {"x": data[:5].astype(np.float32)}
    assert SklearnExporter().reference(estimator, rows, "float32") is None
    assert SklearnExporter().reference(estimator, rows, "float64") is not None


def test_sklearn_reference_of_rows_with_nan_raises_value_error() -> None:
    estimator = sk("svm.SVR").fit(*bundled("diabetes"))
    with pytest.raises(ValueError, match="NaN"):
        SklearnExporter().reference(
            estimator, {"x": np.full((2, 10), np.nan, np.float32)}, "float64"
        )


def test_sklearn_export_twice_in_process_writes_same_bytes(tmp_path: Path) -> None:
    rows, labels = load("iris")
    neighbours = sk("neighbors.KNeighborsClassifier").fit(rows, labels)
    digests = set()
    for index in range(2):
        answers = export(neighbours, rows, tmp_path / f"{index}.onnx")
        np.testing.assert_array_equal(answers["label"], neighbours.predict(rows))
        digests.add(digest_file(tmp_path / f"{index}.onnx"))
    assert len(digests) == 1


def test_sklearn_export_with_named_batch_axis_uses_name(tmp_path: Path) -> None:
    rows, labels = load("iris")
    section = Export(framework="sklearn", dynamic={"x": {0: "rows"}})
    export(
        sk("linear_model.LogisticRegression", max_iter=500).fit(rows, labels),
        rows,
        tmp_path / "m.onnx",
        section,
    )
    found = read_model_info(tmp_path / "m.onnx")
    assert found.inputs[0].shape == ("rows", 4)
    assert {spec.shape[0] for spec in found.outputs} == {"rows"}


def test_sklearn_export_with_unsuitable_model_data_or_opset_raises_user_error(
    tmp_path: Path,
) -> None:
    rows, labels = load("iris")
    estimator = sk("linear_model.LogisticRegression", max_iter=500).fit(rows, labels)
    words = np.array([["good film"], ["bad food"]] * 75)
    texts = piped(sk("feature_extraction.text.TfidfVectorizer"), sk("svm.LinearSVC")).fit(
        words[:, 0], labels > 0
    )
    logarithms = piped(
        sk("feature_extraction.text.TfidfVectorizer", sublinear_tf=True), sk("svm.LinearSVC")
    ).fit(words[:, 0], labels > 0)
    newer, neither = replace(SECTION, opset=28), "neither `predict` nor `transform`"
    for model, samples, section, message in (
        (sk("cluster.DBSCAN").fit(rows), {"x": rows}, SECTION, neither),
        (object(), {"x": rows}, SECTION, neither),
        (None, {"x": rows}, SECTION, neither),
        (estimator, {"x": rows, "y": rows}, SECTION, r"one matrix: `inputs: \{x: '\*'\}`"),
        (estimator, {"x": rows[:, 0]}, SECTION, "matrix"),
        (
            estimator,
            {"x": rows[:, :1], "y": rows[:, :1]},
            SECTION,
            r"takes 4 columns; the data has 2.*`inputs: \{FIRST: ARRAY, SECOND: ARRAY\}`",
        ),
        (texts, {"x": words, "y": words}, SECTION, "takes 1 column; the data has 2"),
        (logarithms, {"x": words}, SECTION, "TfidfVectorizer with sublinear_tf"),
        (estimator, {"x": rows}, newer, "skl2onnx"),
    ):
        with pytest.raises(UserError, match=message):
            model_runs.export(SklearnExporter(), model, samples, tmp_path / "m.onnx", section)


def test_sklearn_load_accepts_single_valid_pickle_only(tmp_path: Path) -> None:
    rows, labels = load("iris")
    estimator = sk("linear_model.LogisticRegression", max_iter=500).fit(rows, labels)
    (tmp_path / "mine.pkl").write_bytes(pickle.dumps(estimator))
    loaded: Any = SklearnExporter().load(tmp_path)
    np.testing.assert_array_equal(loaded.coef_, estimator.coef_)
    (tmp_path / "mine.pkl").write_bytes(b"\x80\x04not a pickle")
    with pytest.raises(UserError, match="unpickle"):
        SklearnExporter().load(tmp_path)
    (tmp_path / "second.pkl").write_bytes(b"")
    with pytest.raises(NotFoundError):
        SklearnExporter().load(tmp_path)
