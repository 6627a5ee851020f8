"""The scikit-learn exporter, over real estimators."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.target import Target
from onnx_ops.errors import NotFoundError, UserError
from onnx_ops.onnx_graph.compatibility import check_model
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import ExportRequest, Tensors
from onnx_ops.testing.exporters import ExporterSuite

SECTION = Export(framework="sklearn", opset=17, ir_version=9)


def export(model: Any, rows: Any, path: Path, section: Export = SECTION) -> dict[str, Any]:
    """Export it, and run the export on the same rows."""
    SklearnExporter().export(model, ExportRequest(section=section, samples={"x": rows}, path=path))
    return dict(OnnxRuntime().run(path, Target(name="cpu"), ({"x": rows},))[0])


def iris() -> tuple[Any, Any]:
    from sklearn.datasets import load_iris

    data = load_iris()
    return data.data.astype(np.float32), data.target


@functools.cache
def digits() -> object:
    """A perceptron behind a scaler, trained once."""
    from sklearn.datasets import load_digits
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    data = load_digits()
    network = MLPClassifier((16,), max_iter=60, tol=1e-2, random_state=0)
    return make_pipeline(StandardScaler(), network).fit(data.data, data.target)


class TestClassifier(ExporterSuite):
    @pytest.fixture
    def exporter(self) -> SklearnExporter:
        return SklearnExporter()

    @pytest.fixture
    def model(self) -> object:
        return digits()

    @pytest.fixture
    def section(self) -> Export:
        return SECTION

    @pytest.fixture
    def samples(self) -> Tensors:
        from sklearn.datasets import load_digits

        return {"x": load_digits().data[:32].astype(np.float32)}


class TestRegressor(TestClassifier):
    @pytest.fixture
    def model(self) -> object:
        from sklearn.datasets import load_diabetes
        from sklearn.linear_model import Ridge

        data = load_diabetes()
        return Ridge().fit(data.data, data.target)

    @pytest.fixture
    def samples(self) -> Tensors:
        from sklearn.datasets import load_diabetes

        return {"x": load_diabetes().data[:32].astype(np.float32)}


def test_outputs_have_the_same_names_for_every_estimator(tmp_path: Path) -> None:
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline

    rows, labels = iris()
    names = np.array(["setosa", "versicolor", "virginica"])[labels]
    pipeline = make_pipeline(PCA(2), LogisticRegression()).fit(rows, names)
    answers = export(pipeline, rows, tmp_path / "p.onnx")
    assert list(answers) == ["label", "probabilities"]
    np.testing.assert_array_equal(answers["label"].astype(str), pipeline.predict(rows))
    assert answers["probabilities"].shape == (150, 3)
    two = np.stack([labels, -labels], axis=1).astype(float)
    regressor = export(Ridge().fit(rows, two), rows, tmp_path / "r.onnx")
    assert {name: array.shape for name, array in regressor.items()} == {"variable": (150, 2)}


def one_against_one() -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsOneClassifier

    return OneVsOneClassifier(LogisticRegression())


def discriminant_after_scaler() -> Any:
    from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), QuadraticDiscriminantAnalysis())


def gaussian_process() -> Any:
    from sklearn.gaussian_process import GaussianProcessRegressor

    return GaussianProcessRegressor(alpha=0.1, optimizer=None)


def neighbours_after_scaler() -> Any:
    from sklearn.neighbors import KNeighborsRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), KNeighborsRegressor())


@pytest.mark.parametrize(
    ("make", "data"),
    [
        (neighbours_after_scaler, "diabetes"),
        (one_against_one, "iris"),
        (discriminant_after_scaler, "iris"),
        (gaussian_process, "diabetes"),
    ],
)
def test_answers_have_the_names_and_shapes_of_scikit_learn_s(
    tmp_path: Path, make: Callable[[], Any], data: str
) -> None:
    """skl2onnx gives labels as a row or a column, and calls a variable GPmean, or calls a value inside so."""
    from sklearn.datasets import load_diabetes, load_iris

    found = {"iris": load_iris, "diabetes": load_diabetes}[data]()
    rows = found.data.astype(np.float32)
    estimator = make().fit(rows, found.target)
    answers = export(estimator, rows, tmp_path / "m.onnx")
    reference = SklearnExporter().reference(estimator, {"x": rows}, "float64")
    assert reference is not None
    assert {n: a.shape for n, a in answers.items()} == {n: a.shape for n, a in reference.items()}
    for name in reference:
        expected: np.ndarray[Any, Any] = reference[name]
        np.testing.assert_allclose(answers[name], expected, rtol=1e-3, atol=1e-3)
    check_model(tmp_path / "m.onnx")


def test_an_estimator_whose_conversion_does_not_run_is_refused_with_another(tmp_path: Path) -> None:
    from sklearn.neighbors import RadiusNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rows, labels = iris()
    model = make_pipeline(StandardScaler(), RadiusNeighborsClassifier(5.0)).fit(rows, labels)
    with pytest.raises(UserError, match="does not run") as told:
        export(model, rows, tmp_path / "m.onnx")
    assert told.value.remedy == "Use KNeighborsClassifier."


@pytest.mark.parametrize("kind", ["svm.LinearSVC", "linear_model.RidgeClassifier"])
@pytest.mark.parametrize("in_pipeline", [False, True])
def test_a_classifier_without_probabilities_gives_its_label_alone(
    tmp_path: Path, kind: str, *, in_pipeline: bool
) -> None:
    import sklearn
    from sklearn.datasets import load_breast_cancer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    estimator = attrgetter(kind)(sklearn)()
    if in_pipeline:
        estimator = make_pipeline(StandardScaler(), estimator)
    data = load_breast_cancer()
    rows = (data.data / data.data.std(axis=0)).astype(np.float32)
    estimator.fit(rows, data.target)
    answers = export(estimator, rows, tmp_path / "m.onnx")
    assert list(answers) == ["label"]
    reference = SklearnExporter().reference(estimator, {"x": rows}, "float64")
    assert reference is not None
    assert list(reference) == ["label"]
    np.testing.assert_array_equal(answers["label"], reference["label"])


def test_a_scaler_before_trees_divides_as_its_source_does(tmp_path: Path) -> None:
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rows, labels = iris()
    forest = make_pipeline(StandardScaler(), RandomForestClassifier(30, random_state=0)).fit(rows, labels)
    answers = export(forest, rows, tmp_path / "m.onnx")
    single = SklearnExporter().reference(forest, {"x": rows}, "float32")
    double = SklearnExporter().reference(forest, {"x": rows}, "float64")
    assert single is not None
    assert double is not None
    apart = np.abs(answers["probabilities"] - double["probabilities"]).max(axis=1)
    rounded: np.ndarray[Any, Any] = single["probabilities"]
    unsure = np.abs(rounded - double["probabilities"]).max(axis=1)
    assert (apart[unsure < 1e-6] < 1e-6).all()


def test_precisions_differ_by_rounding_of_weights_and_arithmetic() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rows, labels = iris()
    pipeline = make_pipeline(StandardScaler(), LogisticRegression()).fit(rows.astype(np.float64) * 1.1, labels)
    exporter, feed = SklearnExporter(), {"x": rows}
    single, double = exporter.reference(pipeline, feed, "float32"), exporter.reference(pipeline, feed, "float64")
    assert single is not None
    assert double is not None
    rounded: np.ndarray[Any, Any] = single["probabilities"]
    exact: np.ndarray[Any, Any] = double["probabilities"]
    assert (rounded.dtype, exact.dtype) == (np.float32, np.float64)
    noise = np.abs(rounded - exact).max()
    assert 0 < noise < 1e-5
    assert pipeline[-1].coef_.dtype == np.float64


def test_a_precision_that_an_estimator_does_not_know_is_none_and_refused_rows_are_an_error() -> None:
    from sklearn.datasets import load_diabetes
    from sklearn.svm import SVR

    data = load_diabetes()
    estimator = SVR().fit(data.data, data.target)
    rows = {"x": data.data[:5].astype(np.float32)}
    assert SklearnExporter().reference(estimator, rows, "float32") is None
    assert SklearnExporter().reference(estimator, rows, "float64") is not None
    with pytest.raises(ValueError, match="NaN"):
        SklearnExporter().reference(estimator, {"x": np.full((2, 10), np.nan, np.float32)}, "float64")


def test_names_that_the_converter_counts_per_process_are_counted_per_file(tmp_path: Path) -> None:
    from sklearn.neighbors import KNeighborsClassifier

    rows, labels = iris()
    neighbours = KNeighborsClassifier().fit(rows, labels)
    digests = set()
    for index in range(2):
        answers = export(neighbours, rows, tmp_path / f"{index}.onnx")
        np.testing.assert_array_equal(answers["label"], neighbours.predict(rows))
        digests.add(digest_file(tmp_path / f"{index}.onnx"))
    assert len(digests) == 1


def test_a_named_batch_axis(tmp_path: Path) -> None:
    from sklearn.linear_model import LogisticRegression

    rows, labels = iris()
    section = Export(framework="sklearn", dynamic={"x": {0: "rows"}})
    export(LogisticRegression(max_iter=500).fit(rows, labels), rows, tmp_path / "m.onnx", section)
    found = read_model_info(tmp_path / "m.onnx")
    assert found.inputs[0].shape == ("rows", 4)
    assert {spec.shape[0] for spec in found.outputs} == {"rows"}


def test_what_does_not_fit_is_refused_with_a_remedy(tmp_path: Path) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    rows, labels = iris()
    estimator = LogisticRegression(max_iter=500).fit(rows, labels)
    exporter = SklearnExporter()

    def request(samples: Tensors, section: Export = SECTION) -> ExportRequest:
        return ExportRequest(section=section, samples=samples, path=tmp_path / "m.onnx")

    for model in (StandardScaler().fit(rows), object(), None):
        with pytest.raises(UserError, match="neither a classifier nor a regressor"):
            exporter.export(model, request({"x": rows}))
    with pytest.raises(UserError, match="one input"):
        exporter.export(estimator, request({"x": rows, "y": rows}))
    with pytest.raises(UserError, match="matrix"):
        exporter.export(estimator, request({"x": rows[:, 0]}))
    with pytest.raises(UserError, match="skl2onnx"):
        exporter.export(estimator, request({"x": rows}, Export(framework="sklearn", opset=28)))


def test_a_model_may_be_brought_as_a_pickle_and_damage_is_told(tmp_path: Path) -> None:
    from sklearn.linear_model import LogisticRegression

    rows, labels = iris()
    estimator = LogisticRegression(max_iter=500).fit(rows, labels)
    (tmp_path / "mine.pkl").write_bytes(pickle.dumps(estimator))
    loaded: Any = SklearnExporter().load(tmp_path)
    np.testing.assert_array_equal(loaded.coef_, estimator.coef_)
    (tmp_path / "mine.pkl").write_bytes(b"\x80\x04not a pickle")
    with pytest.raises(UserError, match="unpickle"):
        SklearnExporter().load(tmp_path)
    (tmp_path / "second.pkl").write_bytes(b"")
    with pytest.raises(NotFoundError):
        SklearnExporter().load(tmp_path)


def test_histograms_of_gradient_boosting_are_converted_with_protobuf_7(tmp_path: Path) -> None:
    """The converter writes truth values where the file holds integers."""
    from sklearn.datasets import load_diabetes
    from sklearn.ensemble import HistGradientBoostingRegressor

    data = load_diabetes()
    rows = data.data.astype(np.float32)
    rows[::7, 2] = np.nan
    model = HistGradientBoostingRegressor(max_iter=20, random_state=0).fit(rows, data.target)
    answers = export(model, rows, tmp_path / "m.onnx")
    assert np.abs(answers["variable"].ravel() - model.predict(rows)).max() < 1e-3
