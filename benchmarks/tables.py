# ruff: noqa: E501 (a case is one line)
"""Write a table of tabular models, from a file to an answer of the endpoint.

Each case is fitted on columns of a CSV file, exported, and compared with its source on every group
of inputs of the parity gate. It is then published to an endpoint server's process, which answers
requests. The outcome is `works`, `differs` with the place, or the error that ended the case.

    python -m benchmarks.tables > docs/tables-cases.md
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from sklearn import (
    calibration,
    cluster,
    decomposition,
    ensemble,
    linear_model,
    mixture,
    model_selection,
    naive_bayes,
    neighbors,
    neural_network,
    svm,
    tree,
)
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.covariance import EllipticEnvelope
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.feature_selection import RFE, SelectKBest, VarianceThreshold
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.impute import SimpleImputer
from sklearn.kernel_approximation import Nystroem, RBFSampler
from sklearn.multiclass import OneVsRestClassifier
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
    SplineTransformer,
    StandardScaler,
    TargetEncoder,
)
from sklearn.random_projection import GaussianRandomProjection
from sklearn.semi_supervised import SelfTrainingClassifier

from benchmarks.sklearn_estimators import estimators, shorten
from onnx_ops.adapters.data.file import FileSource
from onnx_ops.adapters.exporters.boosted import LightgbmExporter, XgboostExporter
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.exporters.sklearn_wrappers import unwrap_search
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.artifact import MODEL_FILE, Manifest, digest_bytes, digest_file
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.pipeline import Export, FileData
from onnx_ops.domain.target import Target
from onnx_ops.errors import OnnxOpsError
from onnx_ops.measure.parity import measure_parity
from onnx_ops.measure.reference_outputs import collect_reference_outputs
from onnx_ops.ports import ExportRequest
from onnx_ops.ports.data import frame_of
from onnx_ops.testing.endpoints import state_of
from tests.support.server import ServerFamily

ROWS = 300
ASKED = 24
NUMBERS = ("age", "income", "score", "visits")
MIXED = (*NUMBERS, "city", "plan", "member")
EVERYTHING = (*MIXED, "note")

Case = tuple[str, Any, tuple[str, ...], str]
"""Name, estimator, columns, and what is predicted.

What is predicted is `class`, `three`, `text`, `labels`, `amount`, `rank`, `share` or `amounts`.
Instead of one estimator, there can be a list of them with what they predict: the first that can be
fitted counts.
"""


KNOWN_WRONG = frozenset(
    {
        "mixed, one-hot, unknown categories as infrequent",
        "HistGradientBoosting, categories",
        "HistGradientBoosting, Poisson",
        "KNeighborsClassifier weighted by distance, p = 1",
        "SGDClassifier, modified Huber loss, three classes",
        "XGBoost, {'objective': 'reg:logistic'}",
        "XGBoost, {'objective': 'survival:cox'}",
        "XGBoost, {'objective': 'reg:quantileerror', 'quantile_alpha': [0.1, 0.9]}",
        "XGBoost, {'booster': 'dart'}",
        "XGBoost, several targets",
        "XGBoost, multi:softmax",
        "XGBoost, several labels",
        "XGBoost, forest, three classes",
        "XGBoost, a data frame's categories",
        "LightGBM, {'boosting_type': 'rf', 'subsample': 0.7, 'subsample_freq': 1}",
        "LightGBM, {'linear_tree': True}",
        "LightGBM, {'zero_as_missing': True}",
        "LightGBM, multiclassova",
        "LightGBM, a data frame's categories",
    }
)
"""Cases that converters turn into another function than the source.

All other cases count as convertible.
"""


def write_csv(path: Path, *, missing: bool) -> None:
    """Write a table of 300 people; `missing` leaves some ages and scores empty."""
    draw = np.random.default_rng(0)
    words = np.array(
        [
            "good",
            "bad",
            "film",
            "food",
            "slow",
            "fast",
            "staff",
            "room",
            "price",
            "again",
            "never",
            "great",
        ]
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


def mixed(
    last: Any, *, numbers: Any = None, encoder: Any = None, text: Any = None, more: Any = ()
) -> Any:
    """Return a pipeline in which each kind of column has its own step."""
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
    """Return all cases, unfitted."""
    logistic = linear_model.LogisticRegression(max_iter=500)
    found: list[Case] = [
        ("numeric columns, one input for each column, logistic regression", make_pipeline(StandardScaler(), logistic), NUMBERS, "class"),
        ("mixed, logistic regression", mixed(logistic), MIXED, "class"),
        ("mixed, three classes as texts", mixed(logistic), MIXED, "text"),
        ("mixed, boolean column passed through", mixed(logistic, more=[("member", "passthrough", ["member"])]), MIXED, "class"),
        ("mixed, boolean column one-hot", mixed(logistic, more=[("member", OneHotEncoder(), ["member"])]), MIXED, "class"),
        ("mixed, remainder passed through", Pipeline([("c", ColumnTransformer([("o", OneHotEncoder(handle_unknown="ignore"), ["city", "plan"])], remainder="passthrough")), ("m", ensemble.RandomForestClassifier(20, random_state=0))]), MIXED, "class"),
        ("mixed, ordinal encoder, random forest", mixed(ensemble.RandomForestClassifier(20, random_state=0), encoder=OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)), MIXED, "class"),
        ("mixed, one-hot, first category dropped", mixed(logistic, encoder=OneHotEncoder(drop="first", handle_unknown="ignore")), MIXED, "class"),
        ("mixed, one-hot, infrequent categories grouped", mixed(logistic, encoder=OneHotEncoder(min_frequency=80, handle_unknown="ignore")), MIXED, "class"),
        ("mixed, one-hot, unknown categories as infrequent", mixed(logistic, encoder=OneHotEncoder(min_frequency=80, handle_unknown="infrequent_if_exist")), MIXED, "class"),
        ("mixed, one-hot, unknown categories refused", mixed(logistic, encoder=OneHotEncoder()), MIXED, "class"),
        ("mixed, target encoder", mixed(logistic, encoder=TargetEncoder(random_state=0)), MIXED, "class"),
        ("mixed, empty texts imputed", mixed(logistic, encoder=make_pipeline(SimpleImputer(strategy="most_frequent", missing_values=""), OneHotEncoder(handle_unknown="ignore"))), MIXED, "class"),
        ("mixed, integer column one-hot", mixed(logistic, more=[("visits", OneHotEncoder(handle_unknown="ignore"), ["visits"])]), MIXED, "class"),
        ("mixed and text, TF-IDF", mixed(logistic, text=TfidfVectorizer()), EVERYTHING, "class"),
        ("mixed and text, word counts", mixed(naive_bayes.MultinomialNB(), numbers=MinMaxScaler(clip=True), text=CountVectorizer()), EVERYTHING, "class"),
        ("mixed and text, TF-IDF of word pairs", mixed(logistic, text=TfidfVectorizer(ngram_range=(1, 2))), EVERYTHING, "class"),
        ("text only, TF-IDF", make_pipeline(TfidfVectorizer(), logistic), ("note",), "class"),
        ("text only, word counts, naive Bayes", make_pipeline(CountVectorizer(), naive_bayes.MultinomialNB()), ("note",), "class"),
        ("text only, TF-IDF, truncated SVD", make_pipeline(TfidfVectorizer(), TruncatedSVD(5, random_state=0), logistic), ("note",), "class"),
        ("text only, TF-IDF of characters", make_pipeline(TfidfVectorizer(analyzer="char"), logistic), ("note",), "class"),
        ("categories only, one-hot", make_pipeline(OneHotEncoder(handle_unknown="ignore"), logistic), ("city", "plan"), "class"),
    ]  # fmt: skip
    for scaler in (
        MinMaxScaler(), MaxAbsScaler(), RobustScaler(), PowerTransformer(), QuantileTransformer(n_quantiles=50),
        KBinsDiscretizer(5), Normalizer(), Binarizer(threshold=0.5), PolynomialFeatures(2), PCA(2), SelectKBest(k=2),
        VarianceThreshold(),
    ):  # fmt: skip
        numbers = make_pipeline(SimpleImputer(), scaler)
        found.append(
            (f"mixed, {type(scaler).__name__}", mixed(logistic, numbers=numbers), MIXED, "class")
        )
    found += [
        ("mixed, missing values marked", mixed(logistic, numbers=make_pipeline(SimpleImputer(add_indicator=True), StandardScaler())), MIXED, "class"),
        ("mixed, FeatureUnion", mixed(logistic, numbers=make_pipeline(SimpleImputer(), FeatureUnion([("s", StandardScaler()), ("p", PCA(2))]))), MIXED, "class"),
        ("mixed, user-defined function", mixed(logistic, numbers=make_pipeline(SimpleImputer(), FunctionTransformer(np.log1p))), MIXED, "class"),
    ]  # fmt: skip
    for model in (
        tree.DecisionTreeClassifier(max_depth=5, random_state=0), ensemble.ExtraTreesClassifier(20, random_state=0),
        ensemble.GradientBoostingClassifier(n_estimators=20, random_state=0), ensemble.AdaBoostClassifier(n_estimators=10, random_state=0),
        ensemble.BaggingClassifier(random_state=0), naive_bayes.GaussianNB(), neighbors.KNeighborsClassifier(), svm.SVC(probability=False), svm.LinearSVC(),
        neural_network.MLPClassifier((8,), max_iter=300, random_state=0), linear_model.SGDClassifier(random_state=0), linear_model.RidgeClassifier(),
        LinearDiscriminantAnalysis(), ensemble.StackingClassifier([("l", logistic), ("t", tree.DecisionTreeClassifier(max_depth=3))]),
    ):  # fmt: skip
        dense = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
        found.append(
            (f"mixed, {type(model).__name__}", mixed(model, encoder=dense), MIXED, "three")
        )
    dense = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    for model in (
        linear_model.LinearRegression(), linear_model.Ridge(), linear_model.Lasso(0.01), linear_model.ElasticNet(0.01), linear_model.HuberRegressor(max_iter=500),
        svm.SVR(), neighbors.KNeighborsRegressor(), ensemble.RandomForestRegressor(20, random_state=0), ensemble.HistGradientBoostingRegressor(max_iter=20),
        neural_network.MLPRegressor(hidden_layer_sizes=(8,), max_iter=300, random_state=0),
    ):  # fmt: skip
        found.append(
            (f"mixed, {type(model).__name__}", mixed(model, encoder=dense), MIXED, "amount")
        )
    found += [
        ("mixed, two targets, Ridge", mixed(linear_model.Ridge()), MIXED, "amounts"),
        ("mixed, two targets, MultiOutputRegressor", mixed(MultiOutputRegressor(tree.DecisionTreeRegressor(max_depth=4))), MIXED, "amounts"),
        ("numeric columns with missing values, HistGradientBoostingClassifier", ensemble.HistGradientBoostingClassifier(max_iter=20), NUMBERS, "class"),
        ("HistGradientBoosting, categories", ensemble.HistGradientBoostingClassifier(max_iter=20, categorical_features=[3]), NUMBERS, "class"),
        ("HistGradientBoosting, Poisson", ensemble.HistGradientBoostingRegressor(max_iter=20, loss="poisson"), NUMBERS, "amount"),
        ("KNeighborsClassifier weighted by distance, p = 1", mixed(neighbors.KNeighborsClassifier(weights="distance", p=1)), MIXED, "class"),
        ("SGDClassifier, log loss, three classes", mixed(linear_model.SGDClassifier(loss="log_loss", random_state=0)), MIXED, "three"),
        ("SGDClassifier, modified Huber loss, three classes", mixed(linear_model.SGDClassifier(loss="modified_huber", random_state=0)), MIXED, "three"),
        *boosted(),
    ]  # fmt: skip
    return [*found, *wrappers(), *others({name for name, *_ in found})]


def wrappers() -> Iterator[Case]:
    """Yield wrappers around whole pipelines, and other last steps.

    The wrappers are, for example, searches, calibrations and votes. The last steps are clusterings,
    detectors of outliers, transformers and a Gaussian process.
    """
    logistic, ridge = linear_model.LogisticRegression(max_iter=500), linear_model.Ridge()
    forest = ensemble.RandomForestClassifier(10, random_state=0)
    calibrated = calibration.CalibratedClassifierCV
    target = TransformedTargetRegressor
    around: list[tuple[str, Any, str]] = [
        ("GridSearchCV", model_selection.GridSearchCV(mixed(logistic), {"model__C": [0.1, 1]}, cv=3), "class"),
        ("RandomizedSearchCV", model_selection.RandomizedSearchCV(mixed(logistic), {"model__C": [0.1, 1]}, n_iter=2, cv=3), "class"),
        ("GridSearchCV with a regressor", model_selection.GridSearchCV(mixed(ridge), {"model__alpha": [0.1, 1]}, cv=3), "amount"),
        ("GridSearchCV over CalibratedClassifierCV", model_selection.GridSearchCV(calibrated(mixed(logistic), cv=3), {"method": ["sigmoid", "isotonic"]}, cv=3), "class"),
        ("CalibratedClassifierCV", calibrated(mixed(logistic), cv=3), "class"),
        ("isotonic CalibratedClassifierCV", calibrated(mixed(forest), cv=3, method="isotonic"), "class"),
        ("CalibratedClassifierCV with ensemble=False", calibrated(mixed(logistic), cv=3, ensemble=False), "class"),
        ("CalibratedClassifierCV with three classes", calibrated(mixed(logistic), cv=3), "three"),
        ("CalibratedClassifierCV with a LinearSVC", calibrated(mixed(svm.LinearSVC()), cv=3), "class"),
        ("TransformedTargetRegressor without a transformation", target(mixed(ridge)), "amount"),
        ("TransformedTargetRegressor with StandardScaler", target(mixed(ridge), transformer=StandardScaler()), "amount"),
        ("TransformedTargetRegressor with log1p", target(mixed(ridge), func=np.log1p, inverse_func=np.expm1), "amount"),
        ("TransformedTargetRegressor with log", target(mixed(ridge), func=np.log, inverse_func=np.exp), "amount"),
        ("TransformedTargetRegressor with QuantileTransformer", target(mixed(ridge), transformer=QuantileTransformer(n_quantiles=50)), "amount"),
        ("soft VotingClassifier", ensemble.VotingClassifier([("a", mixed(logistic)), ("b", mixed(forest))], voting="soft"), "class"),
        ("hard VotingClassifier", ensemble.VotingClassifier([("a", mixed(logistic)), ("b", mixed(forest)), ("c", mixed(tree.DecisionTreeClassifier(max_depth=3)))]), "class"),
        ("VotingRegressor", ensemble.VotingRegressor([("a", mixed(ridge)), ("b", mixed(ensemble.RandomForestRegressor(10, random_state=0)))]), "amount"),
        ("StackingClassifier", ensemble.StackingClassifier([("a", mixed(logistic)), ("b", mixed(forest))], cv=3), "class"),
        ("StackingRegressor", ensemble.StackingRegressor([("a", mixed(ridge)), ("b", mixed(tree.DecisionTreeRegressor(max_depth=3)))], cv=3), "amount"),
        ("OneVsRestClassifier", OneVsRestClassifier(mixed(logistic)), "three"),
        ("MultiOutputRegressor", MultiOutputRegressor(mixed(ridge)), "amounts"),
        ("FixedThresholdClassifier", model_selection.FixedThresholdClassifier(mixed(logistic), threshold=0.3), "class"),
    ]  # fmt: skip
    yield from (
        (f"{name} around a mixed pipeline", model, MIXED, kind) for name, model, kind in around
    )

    def numbers(*steps: Any) -> Any:
        return make_pipeline(SimpleImputer(), StandardScaler(), *steps)

    yield (
        "CalibratedClassifierCV around numeric columns with missing values",
        calibrated(numbers(logistic), cv=3),
        NUMBERS,
        "class",
    )
    yield (
        "SelfTrainingClassifier around numeric columns with missing values",
        SelfTrainingClassifier(numbers(logistic)),
        NUMBERS,
        "class",
    )
    yield (
        "RFE around numeric columns",
        RFE(ridge, n_features_to_select=2),
        NUMBERS,
        "amount",
    )
    yield "BaggingClassifier around numeric columns with missing values", ensemble.BaggingClassifier(numbers(logistic), random_state=0), NUMBERS, "class"  # fmt: skip
    last = (
        cluster.KMeans(3, random_state=0, n_init=1), cluster.MiniBatchKMeans(3, random_state=0, n_init=1), cluster.MeanShift(),
        cluster.AffinityPropagation(random_state=0), cluster.Birch(n_clusters=3), cluster.BisectingKMeans(3, random_state=0),
        mixture.GaussianMixture(3, random_state=0), mixture.GaussianMixture(3, random_state=0, covariance_type="tied"),
        mixture.GaussianMixture(3, random_state=0, covariance_type="diag"), mixture.BayesianGaussianMixture(n_components=3, random_state=0),
        ensemble.IsolationForest(n_estimators=20, random_state=0), neighbors.LocalOutlierFactor(novelty=True),
        svm.OneClassSVM(), linear_model.SGDOneClassSVM(random_state=0), EllipticEnvelope(random_state=0),
        PCA(2), decomposition.IncrementalPCA(2), TruncatedSVD(2), decomposition.FactorAnalysis(2), decomposition.FastICA(2, random_state=0),
        decomposition.KernelPCA(2), decomposition.SparsePCA(2, random_state=0), GaussianRandomProjection(2, random_state=0),
        RBFSampler(n_components=5, random_state=0), Nystroem(n_components=5, random_state=0), PolynomialFeatures(2), PowerTransformer(),
        QuantileTransformer(n_quantiles=20), Normalizer(), SplineTransformer(), SelectKBest(k=2),
    )  # fmt: skip
    for step in last:
        yield (
            f"numeric columns with missing values, {step} as the last step",
            numbers(step),
            NUMBERS,
            "class",
        )
    columns = mixed(
        cluster.KMeans(3, random_state=0, n_init=1), encoder=OneHotEncoder(sparse_output=False)
    )
    yield "mixed, KMeans as the last step", columns, MIXED, "class"
    yield (
        "mixed, IsolationForest as the last step",
        mixed(ensemble.IsolationForest(n_estimators=20, random_state=0)),
        MIXED,
        "class",
    )
    yield "mixed, only the ColumnTransformer", Pipeline(columns.steps[:1]), MIXED, "class"
    yield (
        "numeric columns with missing values, GaussianProcessClassifier",
        numbers(GaussianProcessClassifier()),
        NUMBERS,
        "class",
    )


def others(named: set[str]) -> Iterator[Case]:
    """Yield every other estimator that skl2onnx can convert.

    These are classifiers, regressors, and transformers of numbers.
    """
    from skl2onnx._supported_operators import sklearn_operator_name_map

    # The first category is dropped, since with linearly dependent columns, the answers of some
    # estimators depend on rounding errors.
    dense = OneHotEncoder(handle_unknown="ignore", drop="first", sparse_output=False)
    # Some estimators reject negative numbers, so they get numbers from 0 to 1. Others accept only
    # whole numbers, so they get the numbers of bins.
    scalers = (
        StandardScaler(),
        MinMaxScaler(),
        KBinsDiscretizer(4, encode="ordinal", strategy="uniform"),
    )
    known = set(sklearn_operator_name_map)
    predictors = (
        ("classifier", linear_model.LogisticRegression(), ("three", "class", "labels")),
        ("regressor", linear_model.Ridge(), ("amount", "amounts")),
    )
    for kind, inner, labels in predictors:
        for name, make in estimators(kind):
            if make in known and f"mixed, {name}" not in named:
                models = [
                    mixed(model, numbers=make_pipeline(SimpleImputer(), scaler), encoder=dense)
                    for model in attempts(make, inner)
                    for scaler in scalers
                ]
                yield f"mixed, {name}", [(model, y) for y in labels for model in models], MIXED, ""
    for name, make in estimators("transformer"):
        if make in known and name not in _NO_NUMBERS and f"mixed, {name}" not in named:
            steps = [
                make_pipeline(SimpleImputer(), step)
                for step in attempts(make, linear_model.LogisticRegression())
            ]
            logistic = linear_model.LogisticRegression(max_iter=500)
            yield (
                f"mixed, {name}",
                [(mixed(logistic, numbers=step), "class") for step in steps],
                MIXED,
                "",
            )


_NO_NUMBERS = frozenset(
    {
        *(
            "ColumnTransformer",
            "DictVectorizer",
            "FeatureHasher",
            "FeatureUnion",
            "FunctionTransformer",
        ),
        *(
            "LabelBinarizer",
            "LabelEncoder",
            "OneHotEncoder",
            "OrdinalEncoder",
            "SimpleImputer",
            "TargetEncoder",
        ),
        *("TfidfTransformer", "KernelCenterer", "StackingClassifier", "StackingRegressor"),
        *("VotingClassifier", "VotingRegressor", "KNeighborsTransformer", "PLSRegression"),
    }
)
"""Transformers that `others` leaves out.

They have cases elsewhere, take texts, word counts, labels, kernels or graphs, or are predictors
too.
"""


def attempts(make: Any, inner: Any) -> Iterator[Any]:
    """Yield the estimator with its defaults, and with arguments that it can require."""
    for arguments, options in (
        ((), {}),
        ((), {"random_state": 0}),
        ((inner,), {}),
        (([("a", inner), ("b", inner)],), {}),
        ((), {"n_components": 2}),
    ):
        try:
            yield make(*arguments, **options)
        except TypeError:
            continue


def boosted() -> list[Case]:
    import lightgbm as lgb
    import xgboost as xgb

    def x(kind: str, **settings: Any) -> Any:
        return getattr(xgb, f"XGB{kind}")(
            n_estimators=12, max_depth=4, random_state=0, n_jobs=1, **settings
        )

    def light(kind: str, **settings: Any) -> Any:
        return getattr(lgb, f"LGBM{kind}")(
            n_estimators=12, random_state=0, verbose=-1, n_jobs=1, **settings
        )

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
    types = ["c" if column == "visits" else "q" for column in NUMBERS]
    found += [
        ("XGBoost, several targets", x("Regressor"), NUMBERS, "amounts"),
        ("XGBoost, multi:softmax", x("Classifier", objective="multi:softmax"), NUMBERS, "three"),
        ("XGBoost, several labels", x("Classifier"), NUMBERS, "labels"),
        ("XGBoost, forest", x("Classifier", num_parallel_tree=3), NUMBERS, "class"),
        ("XGBoost, forest, three classes", x("Classifier", num_parallel_tree=3), NUMBERS, "three"),
        (
            "XGBoost, categories by number",
            x("Regressor", enable_categorical=True, feature_types=types),
            NUMBERS,
            "amount",
        ),
        (
            "XGBoost, a data frame's categories",
            x("Regressor", enable_categorical=True),
            NUMBERS,
            "amount",
        ),
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
    found.append(("LightGBM, categories by number", light("Regressor"), NUMBERS, "amount"))
    found.append(("LightGBM, a data frame's categories", light("Regressor"), NUMBERS, "amount"))
    found.append(
        (
            "LightGBM, multiclassova",
            light("Classifier", objective="multiclassova"),
            NUMBERS,
            "three",
        )
    )
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


def outcome(case: Case, folder: Path, endpoint: Endpoint) -> str:
    name, model, wanted, kind = case
    holed = ("missing" in name or "mixed" in name) and "MinMaxScaler(clip" not in repr(model)
    arrays = FileSource().load(FileData(file="missing.csv" if holed else "whole.csv"), folder)
    samples = {column: arrays[column] for column in wanted}
    exporter = choose_exporter(name)
    rows: Any = samples["note"][:, 0] if wanted == ("note",) else frame_of(samples)
    if "a data frame's categories" in name:
        rows["visits"] = rows["visits"].astype("category")
    is_numbered = name == "LightGBM, categories by number"
    more = {"categorical_feature": [NUMBERS.index("visits")]} if is_numbered else {}
    if isinstance(model, list):
        try:
            model = first_fitted(model, rows, arrays)
        except Exception as error:  # An estimator for other kinds of data can raise any error.
            return f"not fitted: {shorten(str(error))}"
    else:
        y = label(kind, arrays, arrays["target"][:, 0])
        model.fit(rows, y, **({"group": [30] * (ROWS // 30)} if kind == "rank" else more))
    model = unwrap_search(model)
    place = Path(tempfile.mkdtemp(dir=folder))
    path = place / MODEL_FILE
    section = Export(framework=exporter.tools[0].replace("scikit-learn", "sklearn"))
    try:
        exporter.export(model, ExportRequest(section=section, samples=samples, path=path))
    except OnnxOpsError as error:
        return f"refused: {shorten(str(error))}"
    if difference := find_difference(exporter, model, path, samples):
        return f"differs: {difference}"
    head = {column: array[:ASKED] for column, array in samples.items()}
    exact: Any = exporter.reference(model, head, "float64")
    rounded: Any = exporter.reference(model, head, "float32") or exact
    return endpoint.compare(name, place, head, exact, rounded)


def choose_exporter(name: str) -> XgboostExporter | LightgbmExporter | SklearnExporter:
    """Return the exporter of the library that a case names; scikit-learn's by default."""
    if "XGBoost" in name:
        return XgboostExporter()
    return LightgbmExporter() if "LightGBM" in name else SklearnExporter()


def find_difference(
    exporter: XgboostExporter | LightgbmExporter | SklearnExporter,
    model: Any,
    path: Path,
    samples: dict[str, Any],
) -> str:
    """Return where an export differs from its model by more than the gate allows.

    The text is empty if there is no such difference.
    """
    reference = collect_reference_outputs(exporter, model, path, samples)
    factor = ParityGate().noise_factor
    for measured in measure_parity(OnnxRuntime(), path, Target(name="cpu"), reference.groups):
        if measured.inside and (measured.mismatch or not measured.ratio <= factor):
            # `not … <=` also reports NaN.
            return (
                f"{measured.output} in {measured.group}, "
                f"{shorten(measured.mismatch or f'{measured.ratio:.3g} x noise')}"
            )
    return ""


def first_fitted(models: list[tuple[Any, str]], rows: Any, arrays: Any) -> Any:
    """Return the first model that can be fitted to its kind of label, fitted.

    Raises:
        Exception: the error of the first model, if none can be fitted.
    """
    first: Exception | None = None
    for model, kind in models:
        try:
            return model.fit(rows, label(kind, arrays, arrays["target"][:, 0]))
        except Exception as error:  # An estimator for other kinds of data can raise any error.
            first = first or error
    raise first or AssertionError("no model was given")


class Endpoint:
    """A server process, to which the model of each case is published in turn.

    Args:
        folder: its state folder, which does not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.server = ServerFamily(folder=folder)
        self.server.start()
        self.generation = 0
        self.answers = 0
        self.rounded: Counter[str] = Counter()
        """By case: number of answers that equal the source's in float32, not in float64."""

    def compare(self, case: str, place: Path, head: Any, exact: Any, rounded: Any) -> str:
        """Publish the model, and compare its answers with those of its source.

        The requests are records, instances and CSV.
        """
        self.generation += 1
        version = str(self.generation)
        deployment = Deployment(
            name=f"v{version}",
            model="m",
            version=version,
            variant="fp32",
            release=digest_bytes(version.encode()),
            manifest=Manifest(files={MODEL_FILE: digest_file(place / MODEL_FILE)}).digest(),
            location=str(place),
        )
        published = self.server.publish(
            state_of(deployment, **{f"v{version}": 100}), self.generation
        )
        if published.status != 200:
            return f"not served: {shorten(published.body.decode())}"
        for form, (body, content_type) in bodies(head).items():
            answer = self.server.call("POST", "/invocations", body, {"content-type": content_type})
            if answer.status != 200:
                return f"not answered: {form}, {shorten(answer.body.decode())}"
            predictions = answer.json()["predictions"]
            for name, expected in exact.items():
                given = (
                    predictions[name]
                    if isinstance(predictions, dict)
                    else [row[name] for row in predictions]
                )
                own, near = (is_close(given, one) for one in (expected, rounded[name]))
                self.answers += len(own)
                self.rounded[case] += int((near & ~own).sum())
                if not (own | near).all():
                    return (
                        f"differs: {name} from the endpoint, {form}, "
                        f"row {int((own | near).argmin()) + 1}"
                    )
        return "works"


def is_close(given: Any, expected: Any) -> Any:
    """Return for each row whether the endpoint's answer is the source's."""
    if expected.dtype.kind != "f":
        return np.array(given).astype(str) == expected.astype(str)
    array = np.array(given, np.float64).reshape(expected.shape)
    return np.isclose(array, expected, rtol=1e-3, atol=1e-4).reshape(len(expected), -1).all(axis=1)


def bodies(head: Any) -> dict[str, tuple[bytes, str]]:
    """Return the same rows as records, instances and CSV.

    A missing number is null, or an empty cell.
    """
    records = [
        {
            n: None if array.dtype.kind == "f" and np.isnan(array[i, 0]) else array[i, 0].item()
            for n, array in head.items()
        }
        for i in range(ASKED)
    ]
    cells = [",".join("" if r[n] is None else str(r[n]) for n in head) for r in records]
    return {
        "records": (orjson.dumps({"dataframe_records": records}), "application/json"),
        "instances": (orjson.dumps({"instances": records}), "application/json"),
        "CSV": ("\n".join([",".join(head), *cells]).encode(), "text/csv"),
    }


def run(case: Case, folder: Path, endpoint: Endpoint) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = outcome(case, folder, endpoint)
        except OnnxOpsError as error:
            result = f"stopped: {shorten(str(error))}"
    print(f"| {case[0].replace('|', '/')} | {result} |", flush=True)
    return result.split(":")[0]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_csv(folder / "whole.csv", missing=False)
        write_csv(folder / "missing.csv", missing=True)
        endpoint = Endpoint(folder / "state")
        try:
            report(folder, endpoint)
        finally:
            endpoint.server.destroy()


HEAD = f"""# Tabular models, case by case

This page lists tabular models of scikit-learn, XGBoost and LightGBM, and whether each works from export to endpoint.
`benchmarks/tables.py` writes this page.

- Each model is fitted on columns of a CSV file, and exported at the default opset. The export is compared with its
  source on all [groups of inputs](parity.md#groups-of-inputs) of the parity gate.
- The model is then published to an endpoint server, which gets {ASKED} rows as records, as instances and as CSV. In
  many cases, some cells are missing. The answers of the endpoint are compared with the source's.

In the names of cases, *mixed* means a pipeline with separate steps for numeric and categorical columns. The text after
*mixed* names an option or a step of the pipeline, or the kind of its target.
"""


def report(folder: Path, endpoint: Endpoint) -> None:
    print(HEAD)
    print("## Cases that the converters should support\n\n| case | outcome |\n|---|---|")
    known = [case for case in cases() if case[0] in KNOWN_WRONG]
    ordinary = Counter(
        run(case, folder, endpoint) for case in cases() if case[0] not in KNOWN_WRONG
    )
    print(
        "\n## Conversions known to be wrong\n\nThe export must refuse each of these cases.\n\n| case | outcome "
        "|\n|---|---|"
    )
    wrong = Counter(run(case, folder, endpoint) for case in known)
    print("\n## Counts\n")
    total = ordinary.total() - ordinary["not fitted"]
    print(
        f"Of {total} cases that the converters should support, {100 * ordinary['works'] / total:.1f} "
        "% work:"
    )
    print(", ".join(f"{count} {what}" for what, count in ordinary.most_common()) + ".")
    print(
        f"Of {wrong.total()} conversions known to be wrong: "
        + ", ".join(f"{n} {what}" for what, n in wrong.most_common())
        + "."
    )
    print(
        f"The endpoint gave {endpoint.answers} answers. {endpoint.rounded.total()} answers are "
        "equal to the source's in float32"
    )
    print(
        "and not in float64. The reason is a number near a threshold (such as a split of a tree): "
        "rounding decides its side. The answers are in these cases:"
    )
    print("; ".join(f"{case} ({count})" for case, count in endpoint.rounded.items() if count) + ".")


if __name__ == "__main__":
    main()
