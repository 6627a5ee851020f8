"""Estimators that were fitted on data frames, one input per column."""

from __future__ import annotations

from contextlib import nullcontext
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
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import ExportRequest
from onnx_ops.ports.data import Dataset, Tensors
from tests.adapters.model_runs import export, piped, reference, sk

_DRAW = np.random.default_rng(0)
COLUMNS: dict[str, Any] = {
    "age": np.where(np.arange(120) % 7, _DRAW.normal(40, 10, 120), np.nan).astype(np.float32)[
        :, None
    ],
    "visits": _DRAW.integers(0, 9, (120, 1)),
    "member": _DRAW.random((120, 1)) < 0.5,
    "city": _DRAW.choice(["Oslo", "Rome", ""], (120, 1)),
    "note": _DRAW.choice(["a good film", "ÉTÉ bad food", "fast slow"], (120, 1)),
}
LABEL = (COLUMNS["visits"][:, 0] > 4).astype(np.int64)
NUMBERS = {name: COLUMNS[name] for name in ("age", "visits")}


def pipeline(last: Any) -> Any:
    steps = [
        (
            "numbers",
            piped(sk("impute.SimpleImputer"), sk("preprocessing.StandardScaler")),
            ["age", "visits"],
        ),
        ("texts", sk("preprocessing.OneHotEncoder", handle_unknown="ignore"), ["member", "city"]),
        ("words", sk("feature_extraction.text.TfidfVectorizer"), "note"),
    ]
    return piped(sk("compose.ColumnTransformer", steps), last)


def check_same(exporter: SklearnExporter, model: object, samples: Tensors, folder: Path) -> None:
    path = folder / "model.onnx"
    exporter.export(
        model, ExportRequest(section=Export(framework="sklearn"), samples=samples, path=path)
    )
    (answers,) = OnnxRuntime().run(path, Target(name="cpu"), (samples,))
    expected: Any = exporter.reference(model, samples, "float64")
    for name, array in expected.items():
        np.testing.assert_allclose(np.asarray(answers[name], np.float64), array, atol=1e-5)


def test_export_of_mixed_columns_equals_source_with_one_input_per_column(tmp_path: Path) -> None:
    model = pipeline(sk("linear_model.LogisticRegression")).fit(
        Dataset(inputs=COLUMNS).frame(), LABEL
    )
    check_same(SklearnExporter(), model, COLUMNS, tmp_path)
    found = {
        spec.name: (spec.dtype, spec.shape)
        for spec in read_model_info(tmp_path / "model.onnx").inputs
    }
    assert found == {
        name: (kind, ("batch", 1))
        for name, kind in zip(
            COLUMNS, ("float32", "int64", "bool", "string", "string"), strict=True
        )
    }


@pytest.mark.parametrize("order", [("age", "visits"), ("visits", "age")])
def test_export_of_imputer_over_integers_and_fractions_equals_source(
    order: tuple[str, ...], tmp_path: Path
) -> None:
    columns = sk(
        "compose.ColumnTransformer", [("numbers", sk("impute.SimpleImputer"), list(order))]
    )
    model = piped(columns, sk("linear_model.LogisticRegression")).fit(
        Dataset(inputs=NUMBERS).frame(), LABEL
    )
    check_same(SklearnExporter(), model, NUMBERS, tmp_path)


@pytest.mark.parametrize("search", ["GridSearchCV", "RandomizedSearchCV"])
def test_load_search_object_returns_its_best_estimator(tmp_path: Path, search: str) -> None:
    model = pipeline(sk("linear_model.LogisticRegression"))
    given = {"logisticregression__C": [0.1, 1.0]}
    options = {"n_iter": 2, "random_state": 0} if search == "RandomizedSearchCV" else {}
    searched = sk(f"model_selection.{search}", model, given, cv=2, **options)
    searched.fit(Dataset(inputs=COLUMNS).frame(), LABEL)
    exporter = SklearnExporter()
    exporter.save(searched, tmp_path)
    loaded = exporter.load(tmp_path)
    assert type(loaded) is type(searched.best_estimator_)
    check_same(exporter, loaded, COLUMNS, tmp_path)
    expected = exporter.reference(loaded, COLUMNS, "float64")
    assert expected is not None
    np.testing.assert_array_equal(
        expected["label"], searched.predict(Dataset(inputs=COLUMNS).frame())
    )


def test_load_search_object_without_refit_raises_user_error(tmp_path: Path) -> None:
    searched = sk(
        "model_selection.GridSearchCV",
        sk("linear_model.Ridge"),
        {"alpha": [0.1, 1.0]},
        cv=2,
        refit=False,
    )
    searched.fit(COLUMNS["visits"], LABEL)
    SklearnExporter().save(searched, tmp_path)
    with pytest.raises(UserError, match="`refit` is off") as refused:
        SklearnExporter().load(tmp_path)
    assert "unpickled" not in str(refused.value)


def test_export_of_imputer_over_integers_equals_source(tmp_path: Path) -> None:
    visits = {"visits": COLUMNS["visits"]}
    columns = sk("compose.ColumnTransformer", [("numbers", sk("impute.SimpleImputer"), ["visits"])])
    model = piped(columns, sk("linear_model.LogisticRegression")).fit(
        Dataset(inputs=visits).frame(), LABEL
    )
    check_same(SklearnExporter(), model, visits, tmp_path)


def test_export_of_data_frame_model_without_column_transformer_equals_source(
    tmp_path: Path,
) -> None:
    model = piped(sk("impute.SimpleImputer"), sk("linear_model.LogisticRegression")).fit(
        Dataset(inputs=NUMBERS).frame(), LABEL
    )
    check_same(SklearnExporter(), model, NUMBERS, tmp_path)


def test_export_of_column_transformer_with_matrix_input_equals_source(tmp_path: Path) -> None:
    steps = [
        ("scaled", sk("preprocessing.StandardScaler"), ["visits"]),
        ("filled", sk("impute.SimpleImputer"), ["age"]),
    ]
    model = piped(sk("compose.ColumnTransformer", steps), sk("linear_model.LogisticRegression"))
    model.fit(Dataset(inputs=NUMBERS).frame(), LABEL)
    check_same(
        SklearnExporter(),
        model,
        {"x": np.hstack(list(NUMBERS.values())).astype(np.float32)},
        tmp_path,
    )


@pytest.mark.parametrize("dtype", ["int64", "bool"])
@pytest.mark.parametrize("last", ["ensemble.RandomForestClassifier", "linear_model.Perceptron"])
def test_export_of_named_columns_with_matrix_of_integers_equals_source(
    tmp_path: Path, last: str, dtype: str
) -> None:
    rows = np.hstack([COLUMNS["visits"], COLUMNS["visits"] % 2]).astype(dtype)
    steps = [("scaled", sk("preprocessing.StandardScaler"), ["even"])]
    columns = sk("compose.ColumnTransformer", steps, remainder="passthrough")
    model = piped(columns, sk(last, random_state=0))
    model.fit(Dataset(inputs={"visits": rows[:, :1], "even": rows[:, 1:]}).frame(), LABEL)
    check_same(SklearnExporter(), model, {"x": rows}, tmp_path)


@pytest.mark.parametrize("opset", [12, 17, 22])
def test_export_of_named_columns_with_matrix_input_at_old_or_new_opset_equals_source(
    tmp_path: Path, opset: int
) -> None:
    columns = sk("compose.ColumnTransformer", [("scaled", "passthrough", ["visits"])])
    model = piped(columns, sk("linear_model.LogisticRegression"))
    model.fit(Dataset(inputs=NUMBERS).frame(), LABEL)
    rows = np.hstack(list(NUMBERS.values())).astype(np.float32)
    answers = export(
        SklearnExporter(),
        model,
        {"x": rows},
        tmp_path / "model.onnx",
        Export(framework="sklearn", opset=opset),
    )
    expected = reference(SklearnExporter(), model, {"x": rows}, "float64")
    np.testing.assert_allclose(answers["probabilities"], expected["probabilities"], atol=1e-5)


@pytest.mark.parametrize(
    "kind", ["XGBClassifier", "XGBRegressor", "XGBRanker", "LGBMClassifier", "LGBMRanker"]
)
def test_export_of_boosting_on_data_frame_equals_source(tmp_path: Path, kind: str) -> None:
    package, exporter = (
        ("xgboost", XgboostExporter()) if kind[0] == "X" else ("lightgbm", LightgbmExporter())
    )
    model = getattr(__import__(package), kind)(n_estimators=5, n_jobs=1)
    model.fit(
        Dataset(inputs=NUMBERS).frame(), LABEL, **({"group": [30] * 4} if "Ranker" in kind else {})
    )
    check_same(exporter, model, NUMBERS, tmp_path)


def test_export_with_column_unknown_to_fit_raises_user_error(tmp_path: Path) -> None:
    model = sk("linear_model.LogisticRegression").fit(
        Dataset(inputs={"visits": COLUMNS["visits"]}).frame(), LABEL
    )
    request = ExportRequest(
        section=Export(framework="sklearn"), samples=NUMBERS, path=tmp_path / "model.onnx"
    )
    with pytest.raises(UserError, match="also has 'age'"):
        SklearnExporter().export(model, request)


def test_export_of_multiclass_modified_huber_classifier_raises_user_error(tmp_path: Path) -> None:
    model = sk("linear_model.SGDClassifier", loss="modified_huber").fit(
        COLUMNS["visits"], np.arange(120) % 3
    )
    samples = {"x": COLUMNS["visits"]}
    request = ExportRequest(
        section=Export(framework="sklearn"), samples=samples, path=tmp_path / "model.onnx"
    )
    with pytest.raises(UserError, match="modified_huber and 3 classes"):
        SklearnExporter().export(model, request)


def test_export_of_encoder_raises_user_error_only_if_it_groups_unseen_categories(
    tmp_path: Path,
) -> None:
    samples = {"city": COLUMNS["city"]}
    request = ExportRequest(
        section=Export(framework="sklearn"), samples=samples, path=tmp_path / "model.onnx"
    )
    for unseen in ("error", "infrequent_if_exist"):
        encoder = sk(
            "compose.ColumnTransformer",
            [("texts", sk("preprocessing.OneHotEncoder", handle_unknown=unseen), ["city"])],
        )
        model = piped(encoder, sk("linear_model.LogisticRegression")).fit(
            Dataset(inputs=samples).frame(), LABEL
        )
        if unseen == "error":
            check_same(SklearnExporter(), model, samples, tmp_path)
        else:
            with pytest.raises(UserError, match="handle_unknown='infrequent_if_exist'"):
                SklearnExporter().export(model, request)


def test_export_of_lightgbm_with_categorical_columns_raises_user_error(tmp_path: Path) -> None:
    lightgbm: Any = pytest.importorskip("lightgbm")
    model = lightgbm.LGBMClassifier(n_estimators=2, n_jobs=1, verbose=-1)
    frame = Dataset(inputs=NUMBERS).frame()
    model.fit(frame.assign(visits=(frame["visits"] * 10).astype("category")), LABEL)
    request = ExportRequest(
        section=Export(framework="lightgbm"), samples=NUMBERS, path=tmp_path / "model.onnx"
    )
    with pytest.raises(UserError, match="type category"):
        LightgbmExporter().export(model, request)


def test_export_with_matrix_refuses_only_known_columns_in_other_order(tmp_path: Path) -> None:
    model = sk("impute.SimpleImputer")
    model = piped(model, sk("linear_model.LogisticRegression")).fit(
        Dataset(inputs=NUMBERS).frame(), LABEL
    )
    samples = {"x": np.hstack(list(NUMBERS.values())).astype(np.float32)}
    for features, refused in (
        (("age", "visits"), False),
        (("visits", "age"), True),
        (("a", "b"), False),
    ):
        path = tmp_path / "model.onnx"
        section = Export(framework="sklearn")
        request = ExportRequest(
            section=section, samples=samples, path=path, features={"x": features}
        )
        with (
            pytest.raises(UserError, match="differs from the order")
            if refused
            else nullcontext() as raised
        ):
            SklearnExporter().export(model, request)
        if raised is not None:
            assert (
                raised.value.remedy
                == "List the columns in every data set: `columns: [age, visits]`."
            )
