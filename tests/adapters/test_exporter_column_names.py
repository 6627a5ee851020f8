"""Columns of unusual names, and rows of float and integer types.

The models are of scikit-learn, XGBoost and LightGBM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.exporters.boosted import LightgbmExporter, XgboostExporter
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.domain.pipeline import Export
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports.data import Dataset, Tensors
from onnx_ops.ports.export import ExportRequest
from tests.adapters.model_runs import piped, sk
from tests.adapters.test_exporter_tables import check_same

NAMES = (
    "merged_columns", "variable", "Monthly Charges", "Tenure (months)",
    "pH-value", "a.b", "%fat", "fat%", "a/b", "a\\b", "1st", "42", "[z]", "{z}",
    "a,b", "a:b", "a;b", "a=b", "a&b", "a|b", "a<b", "a>b", "a?", "a!", "a#1", "a@b", "a$", "a^b",
    "a~b", "a`b", "a'b", 'a"b', "a*b", "a+b", " lead", "trail ", "two  spaces", "tab\there",
    "bell\x07", "ünïcode", "年齢", "🙂", "_", "__",
    "x" * 200, "input_0_inside", "input", "float_input", "variable_inside", "Column_0", "f0",
    "scores", "batch", "kernel", "shape",
)  # fmt: skip
PAIRS = (("a b", "a_b"), ("a-b", "a_b"), ("x.1", "x_1"), ("A", "a"), ("a b", "a  b"), ("1a", "_1a"))
"""Pairs of names that become equal where a converter replaces characters."""
_DRAW = np.random.default_rng(7)
FIRST = _DRAW.normal(size=(80, 1)).astype(np.float32)
SECOND = _DRAW.normal(size=(80, 1)).astype(np.float32)
TEXTS = _DRAW.choice(["Oslo", "Rome"], (80, 1))
LABEL = (FIRST[:, 0] > 0).astype(np.int64)
FORBIDDEN = '[]{}<>,":\t'
"""Characters that XGBoost, LightGBM or LightGBM's own JSON refuse in names."""


def by_column(*columns: tuple[str, str]) -> Any:
    """Return a pipeline that scales the numeric columns and encodes the text columns.

    It selects the columns by name.
    """
    parts = {"number": "preprocessing.StandardScaler", "text": "preprocessing.OneHotEncoder"}
    steps = [
        (f"step{place}", sk(parts[kind]), [name]) for place, (name, kind) in enumerate(columns)
    ]
    return piped(sk("compose.ColumnTransformer", steps), sk("linear_model.LogisticRegression"))


def build_xgboost() -> Any:
    import xgboost

    return xgboost.XGBClassifier(n_estimators=3, n_jobs=1)


def build_lightgbm() -> Any:
    import lightgbm

    return lightgbm.LGBMClassifier(n_estimators=3, n_jobs=1, min_child_samples=2, verbose=-1)


def fit_and_check(exporter: SklearnExporter, model: Any, columns: Tensors, folder: Path) -> None:
    model.fit(Dataset(inputs=columns).frame(), LABEL)
    check_same(exporter, model, columns, folder)
    assert [spec.name for spec in read_model_info(folder / "model.onnx").inputs] == list(columns)


@pytest.mark.parametrize(
    "name", [*NAMES[:10], *(pytest.param(name, marks=pytest.mark.nightly) for name in NAMES[10:])]
)
def test_export_column_with_unusual_name_keeps_input_name_and_predictions(
    tmp_path: Path, name: str
) -> None:
    numbers = {name: FIRST, "other": SECOND}
    joined = piped(sk("preprocessing.StandardScaler"), sk("linear_model.LogisticRegression"))
    fit_and_check(SklearnExporter(), joined, numbers, tmp_path)
    fit_and_check(
        SklearnExporter(), by_column((name, "number"), ("other", "number")), numbers, tmp_path
    )
    mixed = {"other": SECOND, name: TEXTS}
    fit_and_check(
        SklearnExporter(), by_column(("other", "number"), (name, "text")), mixed, tmp_path
    )
    if not set(name) & set(FORBIDDEN):
        fit_and_check(XgboostExporter(), build_xgboost(), numbers, tmp_path)
        fit_and_check(LightgbmExporter(), build_lightgbm(), numbers, tmp_path)


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_export_of_columns_with_colliding_names_keeps_them_apart(
    tmp_path: Path, one: str, other: str
) -> None:
    for columns in ({one: FIRST, other: SECOND}, {other: SECOND, one: FIRST}):
        fit_and_check(SklearnExporter(), sk("linear_model.LogisticRegression"), columns, tmp_path)
        kinds = [(name, "number") for name in columns]
        fit_and_check(SklearnExporter(), by_column(*kinds), columns, tmp_path)


@pytest.mark.parametrize("pair", [("input_0", "other"), ("a", "a_inside")])
def test_export_of_cast_column_with_name_of_inner_value_keeps_columns_apart(
    tmp_path: Path, pair: tuple[str, str]
) -> None:
    whole = np.round(FIRST * 10).astype(np.int64)
    columns: Tensors = {pair[0]: whole, pair[1]: SECOND}
    fit_and_check(SklearnExporter(), sk("linear_model.LogisticRegression"), columns, tmp_path)


def test_export_of_cast_matrix_with_name_of_inner_value_keeps_predictions(tmp_path: Path) -> None:
    rows = np.round(np.hstack([FIRST, SECOND]) * 10).astype(np.int64)
    model = by_column(("a", "number"), ("b", "number"))
    model.fit(Dataset(inputs={"a": rows[:, :1], "b": rows[:, 1:]}).frame(), LABEL)
    check_same(SklearnExporter(), model, {"input_0": rows}, tmp_path)


@pytest.mark.parametrize("name", ["label", "probabilities"])
def test_export_column_named_like_output_raises_user_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="has the name of an output") as caught:
        fit_and_check(
            SklearnExporter(),
            sk("linear_model.LogisticRegression"),
            {name: FIRST, "other": SECOND},
            tmp_path,
        )
    assert "another name" in caught.value.remedy


def export_lightgbm_with_space(
    samples: Tensors, folder: Path, features: tuple[str, ...] = ()
) -> None:
    """Export a model that was fitted on the columns `monthly fee` and `age`.

    LightGBM calls the first column `monthly_fee`.
    """
    model = build_lightgbm().fit(
        Dataset(inputs={"monthly fee": FIRST, "age": SECOND}).frame(), LABEL
    )
    request = ExportRequest(
        section=Export(framework="lightgbm"),
        samples=samples,
        path=folder / "model.onnx",
        features={"x": features},
    )
    LightgbmExporter().export(model, request)


@pytest.mark.parametrize("name", ["monthly fee", "monthly_fee"])
def test_lightgbm_export_with_missing_or_spare_column_raises_user_error_naming_it(
    tmp_path: Path, name: str
) -> None:
    listed = f"columns: [{name}, age]"
    with pytest.raises(UserError, match="the data lacks 'age'") as refused:
        export_lightgbm_with_space({name: FIRST, "height": SECOND}, tmp_path)
    assert listed in refused.value.remedy
    with pytest.raises(UserError, match="the data also has 'height'") as refused:
        export_lightgbm_with_space({name: FIRST, "age": SECOND, "height": SECOND}, tmp_path)
    assert listed in refused.value.remedy


def test_lightgbm_export_of_matrix_with_exchanged_columns_raises_user_error(
    tmp_path: Path,
) -> None:
    samples = {"x": np.hstack([FIRST, SECOND])}
    export_lightgbm_with_space(samples, tmp_path, ("monthly fee", "age"))
    with pytest.raises(UserError, match="differs from the order") as refused:
        export_lightgbm_with_space(samples, tmp_path, ("age", "monthly fee"))
    assert "columns: [monthly fee, age]" in refused.value.remedy


def test_export_with_one_of_two_similar_names_raises_user_error(tmp_path: Path) -> None:
    model = sk("linear_model.LogisticRegression")
    model.fit(Dataset(inputs={"a_b": FIRST, "a b": SECOND}).frame(), LABEL)
    request = ExportRequest(
        section=Export(framework="sklearn"),
        samples={"a b": SECOND, "other": FIRST},
        path=tmp_path / "model.onnx",
    )
    with pytest.raises(UserError, match="the data lacks 'a_b'"):
        SklearnExporter().export(model, request)


FEW = {"n_estimators": 3, "random_state": 0}
MODELS: Mapping[str, Callable[[], Any]] = {
    "linear": lambda: sk("linear_model.LogisticRegression"),
    "ridge": lambda: sk("linear_model.Ridge"),
    "tree": lambda: sk("tree.DecisionTreeClassifier", random_state=0),
    "forest": lambda: sk("ensemble.RandomForestClassifier", **FEW),
    "extra trees": lambda: sk("ensemble.ExtraTreesRegressor", **FEW),
    "gradient boosting": lambda: sk("ensemble.GradientBoostingClassifier", **FEW),
    "hist gradient boosting": lambda: sk("ensemble.HistGradientBoostingClassifier", max_iter=3),
    "ada boost": lambda: sk("ensemble.AdaBoostClassifier", **FEW),
    "bagging": lambda: sk("ensemble.BaggingClassifier", **FEW),
    "svc": lambda: sk("svm.SVC"),
    "svr": lambda: sk("svm.SVR"),
    "neighbours": lambda: sk("neighbors.KNeighborsClassifier"),
    "bayes": lambda: sk("naive_bayes.GaussianNB"),
    "mlp": lambda: sk("neural_network.MLPClassifier", max_iter=5, random_state=0),
    "scaled forest": lambda: piped(
        sk("preprocessing.StandardScaler"), sk("ensemble.RandomForestClassifier", **FEW)
    ),
    "by column": lambda: None,
    "xgboost": build_xgboost,
    "lightgbm": build_lightgbm,
}
"""Functions that make the models; their packages are slow to import."""
EXPORTERS: Mapping[str, SklearnExporter] = {
    "xgboost": XgboostExporter(),
    "lightgbm": LightgbmExporter(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "dtype",
    ["float64", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("float32", "int64"))],
)
@pytest.mark.parametrize("name", MODELS)
def test_export_of_float_or_integer_rows_keeps_dtype_and_predictions(
    tmp_path: Path, name: str, dtype: str
) -> None:
    exporter, model = EXPORTERS.get(name, SklearnExporter()), MODELS[name]()
    rows: Any = np.round(np.hstack([FIRST, SECOND]) * 100).astype(dtype)
    if name == "by column":
        columns = {"Monthly Charges": rows[:, :1], "a/b": rows[:, 1:]}
        fit_and_check(
            exporter, by_column(*((column, "number") for column in columns)), columns, tmp_path
        )
    else:
        model.fit(rows, LABEL)
        check_same(exporter, model, {"x": rows}, tmp_path)
    assert {spec.dtype for spec in read_model_info(tmp_path / "model.onnx").inputs} == {dtype}
