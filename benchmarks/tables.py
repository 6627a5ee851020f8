# ruff: noqa: E501, PERF401 (a case is one line)
"""Models of tables, from a file to an answer of the endpoint, as a table for the docs.

Each case is fitted on columns of a CSV file, exported, compared with its source on every group of inputs that parity
asks, and asked through the endpoint's own reading of records and CSV. The outcome is `works`, `differs` with where,
or the refusal.

    python -m benchmarks.tables > docs/tables-cases.md
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from sklearn import ensemble, linear_model, naive_bayes, neighbors, neural_network, svm, tree
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.feature_selection import SelectKBest, VarianceThreshold
from sklearn.impute import SimpleImputer
from sklearn.multioutput import MultiOutputRegressor
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import (
    Binarizer,
    FunctionTransformer,
    KBinsDiscretizer,
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    PowerTransformer,
    QuantileTransformer,
    RobustScaler,
    StandardScaler,
    TargetEncoder,
)

from onnx_ops.adapters.data.file import FileSource
from onnx_ops.adapters.exporters.boosted import LightgbmExporter, XgboostExporter
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.pipeline import Export, FileData
from onnx_ops.domain.target import Target
from onnx_ops.errors import OnnxOpsError
from onnx_ops.graph.inspect import info
from onnx_ops.ports import ExportRequest
from onnx_ops.ports.data import frame_of
from onnx_ops.serving.wire import Signature, read_invocation, write
from onnx_ops.stages.asking import ask_source
from onnx_ops.stages.parity import measure_parity

ROWS = 300
NUMBERS = ("age", "income", "score", "visits")
MIXED = (*NUMBERS, "city", "plan", "member")
EVERYTHING = (*MIXED, "note")

Case = tuple[str, Any, tuple[str, ...], str]
"""Name, estimator, columns, and what is predicted: `class`, `three`, `text`, `amount`, `rank` or `amounts`."""


def write_csv(path: Path, *, missing: bool) -> None:
    """A table of 300 people; `missing` leaves some ages and scores empty."""
    draw = np.random.default_rng(0)
    words = np.array(
        ["good", "bad", "film", "food", "slow", "fast", "staff", "room", "price", "again", "never", "great"]
    )
    lines = [",".join([*EVERYTHING, "target"])]
    for row in range(ROWS):
        note = " ".join(draw.choice(words, 5))
        cells = [
            "" if missing and row % 7 == 0 else f"{draw.normal(40, 12):.2f}",
            f"{draw.lognormal(10, 0.5):.2f}",
            "" if missing and row % 11 == 0 else f"{draw.random():.4f}",
            str(draw.integers(0, 12)),
            draw.choice(["Paris", "Rome", "Oslo", "São Paulo"]),
            draw.choice(["basic", "plus", "pro"]),
            draw.choice(["true", "false"]),
            note,
            f"{draw.normal():.4f}",
        ]
        lines.append(",".join(map(str, cells)))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def mixed(last: Any, *, numbers: Any = None, encoder: Any = None, text: Any = None, more: Any = ()) -> Any:
    """A pipeline of which each kind of column has its own step."""
    plain = numbers or make_pipeline(SimpleImputer(), StandardScaler())
    steps = [
        ("numbers", plain, list(NUMBERS)),
        ("categories", encoder or OneHotEncoder(handle_unknown="ignore"), ["city", "plan"]),
        *more,
    ]
    if text is not None:
        steps.append(("text", text, "note"))
    return Pipeline([("columns", ColumnTransformer(steps)), ("model", last)])


def cases() -> list[Case]:
    """All of them, unfitted."""
    logistic = linear_model.LogisticRegression(max_iter=500)
    found: list[Case] = [
        (
            "numbers, one input a column, logistic regression",
            make_pipeline(StandardScaler(), logistic),
            NUMBERS,
            "class",
        ),
        ("mixed, logistic regression", mixed(logistic), MIXED, "class"),
        ("mixed, three classes as texts", mixed(logistic), MIXED, "text"),
        (
            "mixed, truth values passed through",
            mixed(logistic, more=[("member", "passthrough", ["member"])]),
            MIXED,
            "class",
        ),
        (
            "mixed, truth values one-hot",
            mixed(logistic, more=[("member", OneHotEncoder(), ["member"])]),
            MIXED,
            "class",
        ),
        (
            "mixed, remainder passed through",
            Pipeline(
                [
                    (
                        "c",
                        ColumnTransformer(
                            [("o", OneHotEncoder(handle_unknown="ignore"), ["city", "plan"])], remainder="passthrough"
                        ),
                    ),
                    ("m", ensemble.RandomForestClassifier(20, random_state=0)),
                ]
            ),
            MIXED,
            "class",
        ),
        (
            "mixed, ordinal encoder, random forest",
            mixed(
                ensemble.RandomForestClassifier(20, random_state=0),
                encoder=OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1),
            ),
            MIXED,
            "class",
        ),
        (
            "mixed, one-hot, dropped first",
            mixed(logistic, encoder=OneHotEncoder(drop="first", handle_unknown="ignore")),
            MIXED,
            "class",
        ),
        (
            "mixed, one-hot, infrequent",
            mixed(logistic, encoder=OneHotEncoder(min_frequency=80, handle_unknown="infrequent_if_exist")),
            MIXED,
            "class",
        ),
        ("mixed, target encoder", mixed(logistic, encoder=TargetEncoder(random_state=0)), MIXED, "class"),
        (
            "mixed, text imputed",
            mixed(
                logistic,
                encoder=make_pipeline(
                    SimpleImputer(strategy="most_frequent", missing_values=""), OneHotEncoder(handle_unknown="ignore")
                ),
            ),
            MIXED,
            "class",
        ),
        (
            "mixed, whole numbers one-hot",
            mixed(logistic, more=[("visits", OneHotEncoder(handle_unknown="ignore"), ["visits"])]),
            MIXED,
            "class",
        ),
        ("mixed and text, TF-IDF", mixed(logistic, text=TfidfVectorizer()), EVERYTHING, "class"),
        (
            "mixed and text, counts",
            mixed(naive_bayes.MultinomialNB(), numbers=MinMaxScaler(clip=True), text=CountVectorizer()),
            EVERYTHING,
            "class",
        ),
        (
            "mixed and text, TF-IDF of word pairs",
            mixed(logistic, text=TfidfVectorizer(ngram_range=(1, 2))),
            EVERYTHING,
            "class",
        ),
        ("text only, TF-IDF", make_pipeline(TfidfVectorizer(), logistic), ("note",), "class"),
        (
            "text only, counts, naive Bayes",
            make_pipeline(CountVectorizer(), naive_bayes.MultinomialNB()),
            ("note",),
            "class",
        ),
        (
            "text only, TF-IDF, truncated SVD",
            make_pipeline(TfidfVectorizer(), TruncatedSVD(5, random_state=0), logistic),
            ("note",),
            "class",
        ),
        ("text only, characters", make_pipeline(TfidfVectorizer(analyzer="char"), logistic), ("note",), "class"),
        (
            "categories only, one-hot",
            make_pipeline(OneHotEncoder(handle_unknown="ignore"), logistic),
            ("city", "plan"),
            "class",
        ),
    ]
    for scaler in (
        MinMaxScaler(),
        MaxAbsScaler(),
        RobustScaler(),
        PowerTransformer(),
        QuantileTransformer(n_quantiles=50),
        KBinsDiscretizer(5),
        Normalizer(),
        Binarizer(threshold=0.5),
        PolynomialFeatures(2),
        PCA(2),
        SelectKBest(k=2),
        VarianceThreshold(),
    ):
        found.append(
            (
                f"mixed, {type(scaler).__name__}",
                mixed(logistic, numbers=make_pipeline(SimpleImputer(), scaler)),
                MIXED,
                "class",
            )
        )
    found += [
        (
            "mixed, missing marked",
            mixed(logistic, numbers=make_pipeline(SimpleImputer(add_indicator=True), StandardScaler())),
            MIXED,
            "class",
        ),
        (
            "mixed, FeatureUnion",
            mixed(
                logistic, numbers=make_pipeline(SimpleImputer(), FeatureUnion([("s", StandardScaler()), ("p", PCA(2))]))
            ),
            MIXED,
            "class",
        ),
        (
            "mixed, function of the user",
            mixed(logistic, numbers=make_pipeline(SimpleImputer(), FunctionTransformer(np.log1p))),
            MIXED,
            "class",
        ),
    ]
    for model in (
        tree.DecisionTreeClassifier(max_depth=5, random_state=0), ensemble.ExtraTreesClassifier(20, random_state=0),
        ensemble.GradientBoostingClassifier(n_estimators=20, random_state=0), ensemble.AdaBoostClassifier(n_estimators=10, random_state=0),
        ensemble.BaggingClassifier(random_state=0), naive_bayes.GaussianNB(), neighbors.KNeighborsClassifier(), svm.SVC(probability=False), svm.LinearSVC(),
        neural_network.MLPClassifier((8,), max_iter=300, random_state=0), linear_model.SGDClassifier(random_state=0), linear_model.RidgeClassifier(),
        LinearDiscriminantAnalysis(), ensemble.StackingClassifier([("l", logistic), ("t", tree.DecisionTreeClassifier(max_depth=3))]),
    ):  # fmt: skip
        dense = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
        found.append((f"mixed, {type(model).__name__}", mixed(model, encoder=dense), MIXED, "three"))
    dense = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    for model in (
        linear_model.LinearRegression(), linear_model.Ridge(), linear_model.Lasso(0.01), linear_model.ElasticNet(0.01), linear_model.HuberRegressor(max_iter=500),
        svm.SVR(), neighbors.KNeighborsRegressor(), ensemble.RandomForestRegressor(20, random_state=0), ensemble.HistGradientBoostingRegressor(max_iter=20),
        neural_network.MLPRegressor(hidden_layer_sizes=(8,), max_iter=300, random_state=0),
    ):  # fmt: skip
        found.append((f"mixed, {type(model).__name__}", mixed(model, encoder=dense), MIXED, "amount"))
    found += [
        ("mixed, two targets, Ridge", mixed(linear_model.Ridge()), MIXED, "amounts"),
        ("mixed, two targets, MultiOutputRegressor", mixed(MultiOutputRegressor(tree.DecisionTreeRegressor(max_depth=4))), MIXED, "amounts"),
        ("missing, HistGradientBoostingClassifier", ensemble.HistGradientBoostingClassifier(max_iter=20), NUMBERS, "class"),
        ("HistGradientBoosting, categories", ensemble.HistGradientBoostingClassifier(max_iter=20, categorical_features=[3]), NUMBERS, "class"),
        ("HistGradientBoosting, Poisson", ensemble.HistGradientBoostingRegressor(max_iter=20, loss="poisson"), NUMBERS, "amount"),
        ("neighbours by distance, p = 1", mixed(neighbors.KNeighborsClassifier(weights="distance", p=1)), MIXED, "class"),
        ("SGD, log loss, three classes", mixed(linear_model.SGDClassifier(loss="log_loss", random_state=0)), MIXED, "three"),
        ("SGD, modified Huber, three classes", mixed(linear_model.SGDClassifier(loss="modified_huber", random_state=0)), MIXED, "three"),
        *boosted(),
    ]  # fmt: skip
    return found


def boosted() -> list[Case]:
    import lightgbm as lgb
    import xgboost as xgb

    def x(kind: str, **settings: Any) -> Any:
        return getattr(xgb, f"XGB{kind}")(n_estimators=12, max_depth=4, random_state=0, n_jobs=1, **settings)

    def light(kind: str, **settings: Any) -> Any:
        return getattr(lgb, f"LGBM{kind}")(n_estimators=12, random_state=0, verbose=-1, n_jobs=1, **settings)

    found: list[Case] = []
    for name, make in (("XGBoost", x), ("LightGBM", light)):
        found += [
            (f"{name}, data frame with missing numbers", make("Classifier"), NUMBERS, "class"),
            (f"{name}, three classes", make("Classifier"), NUMBERS, "three"),
            (f"{name}, regression", make("Regressor"), NUMBERS, "amount"),
            (f"{name}, mixed pipeline", mixed(make("Classifier")), MIXED, "class"),
            (f"{name}, mixed pipeline, regression", mixed(make("Regressor")), MIXED, "amount"),
            (f"{name}, ranking", make("Ranker"), NUMBERS, "rank"),
        ]
    for settings in (
        {"objective": "reg:squarederror"},
        {"objective": "reg:absoluteerror"},
        {"objective": "count:poisson"},
        {"objective": "reg:gamma"},
        {"objective": "reg:tweedie"},
        {"objective": "reg:logistic"},
        {"objective": "survival:cox"},
        {"objective": "reg:quantileerror", "quantile_alpha": 0.5},
        {"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.9]},
        {"booster": "dart"},
    ):
        found.append((f"XGBoost, {settings}", x("Regressor", **settings), NUMBERS, "share"))
    found += [
        ("XGBoost, several targets", x("Regressor"), NUMBERS, "amounts"),
        ("XGBoost, multi:softmax", x("Classifier", objective="multi:softmax"), NUMBERS, "three"),
        ("XGBoost, several labels", x("Classifier"), NUMBERS, "labels"),
        ("XGBoost, forest", x("Classifier", num_parallel_tree=3), NUMBERS, "class"),
    ]
    for settings in (  # type: ignore[assignment]
        {"objective": "l1"},
        {"objective": "poisson"},
        {"objective": "gamma"},
        {"objective": "tweedie"},
        {"objective": "quantile"},
        {"objective": "cross_entropy"},
        {"boosting_type": "dart"},
        {"boosting_type": "rf", "subsample": 0.7, "subsample_freq": 1},
        {"linear_tree": True},
        {"zero_as_missing": True},
    ):
        found.append((f"LightGBM, {settings}", light("Regressor", **settings), NUMBERS, "share"))
    found.append(("LightGBM, multiclassova", light("Classifier", objective="multiclassova"), NUMBERS, "three"))
    return found


def label(kind: str, columns: Any, target: Any) -> Any:
    three = np.digitize(columns["income"][:, 0], [18_000, 28_000])
    amount = np.nan_to_num(columns["age"][:, 0]) / 10 + target
    match kind:
        case "class":
            return (three > 0).astype(int)
        case "three":
            return three
        case "text":
            return np.array(["low", "middle", "high"])[three]
        case "labels":
            return np.stack([three > 0, target > 0], axis=1).astype(int)
        case "amounts":
            return np.stack([amount, target], axis=1)
        case "rank":
            return three
        case "share":
            return 1 / (1 + np.exp(-target))
        case _:
            return np.abs(amount)


def outcome(case: Case, folder: Path) -> str:
    name, model, wanted, kind = case
    file = "missing.csv" if "missing" in name or "mixed" in name else "whole.csv"
    if "mixed" in name and "MinMaxScaler(clip" in repr(model):
        file = "whole.csv"
    arrays = FileSource().load(FileData(file=file), folder)
    samples = {column: arrays[column] for column in wanted}
    y = label(kind, arrays, arrays["target"][:, 0])
    exporter = next(
        (make() for word, make in (("XGBoost", XgboostExporter), ("LightGBM", LightgbmExporter)) if word in name),
        SklearnExporter(),
    )
    rows = samples["note"][:, 0] if wanted == ("note",) else frame_of(samples)
    model.fit(rows, y, **({"group": [30] * (ROWS // 30)} if kind == "rank" else {}))
    path = folder / "model.onnx"
    try:
        exporter.export(
            model,
            ExportRequest(
                section=Export(framework=exporter.tools[0].replace("scikit-learn", "sklearn")),
                samples=samples,
                path=path,
            ),
        )
    except OnnxOpsError as error:
        return f"refused: {short(str(error))}"
    asked = ask_source(exporter, model, path, samples)
    factor = ParityGate().noise_factor
    for found in measure_parity(OnnxRuntime(), path, Target(name="cpu"), asked.groups):
        if found.inside and (found.mismatch or not found.ratio <= factor):
            return f"differs: {found.output} in {found.group}, {short(found.mismatch or f'{found.ratio:.3g} x noise')}"
    return served(path, samples)


def served(path: Path, samples: Any) -> str:
    """Compare the endpoint's answers to three records and three lines of CSV with the export's."""
    graph = info(path)
    signature = Signature(
        model="m", version="1", inputs={s.name: s for s in graph.inputs}, outputs={s.name: s for s in graph.outputs}
    )
    head = {name: array[:3] for name, array in samples.items()}
    values: dict[str, Any] = dict(head)
    records: list[dict[str, Any]] = [
        {
            n: None if array.dtype.kind == "f" and np.isnan(array[i, 0]) else array[i, 0].item()
            for n, array in values.items()
        }
        for i in range(3)
    ]
    cells = [",".join("" if r[n] is None else str(r[n]) for n in head) for r in records]
    (expected,) = OnnxRuntime().run(path, Target(name="cpu"), (head,))  # which parity held against the source
    bodies = {
        "dataframe_records": (orjson.dumps({"dataframe_records": records}), "application/json"),
        "instances": (orjson.dumps({"instances": records}), "application/json"),
        "CSV": ("\n".join([",".join(head), *cells]).encode(), "text/csv"),
    }
    for form, (body, content_type) in bodies.items():
        call = read_invocation(body, content_type, None, signature)
        feed = {n: a.astype(np.str_) if a.dtype.kind == "O" else a for n, a in call.feed.items()}
        (answers,) = OnnxRuntime().run(path, Target(name="cpu"), (feed,))
        write(
            call,
            signature,
            [a.astype(object) if a.dtype.kind == "U" else a for a in (answers[n] for n in call.outputs)],
        )
        for name, array in expected.items():
            if array.dtype.kind == "f" and not np.allclose(answers[name], array, rtol=1e-3, atol=1e-4):
                return f"differs: {name} served from {form}"
            if array.dtype.kind != "f" and (answers[name].astype(str) != array.astype(str)).any():
                return f"differs: {name} served from {form}"
    return "works"


def short(text: str) -> str:
    return " ".join(text.split())[:300].replace("|", "/")


def run(case: Case, folder: Path, show: Callable[[str], None] = lambda _: None) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = outcome(case, folder)
        except OnnxOpsError as error:
            result = f"stopped: {short(str(error))}"
    show(f"| {case[0].replace('|', '/')} | {result} |")
    return result


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_csv(folder / "whole.csv", missing=False)
        write_csv(folder / "missing.csv", missing=True)
        print("# Models of tables, case by case\n")
        print(
            "Written by `benchmarks/tables.py`: fitted on a CSV file, exported at the default opset, compared with its"
        )
        print("source on all groups of inputs, and asked through the endpoint's records and CSV.\n")
        print("| case | outcome |\n|---|---|")
        results = Counter(run(case, folder, print).split(":")[0] for case in cases())
        print("\n" + ", ".join(f"{count} {what}" for what, count in results.most_common()) + ".")


if __name__ == "__main__":
    main()
