"""Models of scikit-learn, XGBoost and LightGBM, and pipelines of them.

They are fitted on scikit-learn's own data sets.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from lightgbm import LGBMClassifier, LGBMRegressor
from sklearn import (
    datasets,
    ensemble,
    feature_selection,
    linear_model,
    naive_bayes,
    neighbors,
    svm,
    tree,
)
from sklearn import preprocessing as prepare
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.impute import SimpleImputer
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline, make_union
from xgboost import XGBClassifier, XGBRegressor

from benchmarks.sklearn_estimators import estimators, fitted
from benchmarks.truth.draws import make_generator

Rows = npt.NDArray[Any]

ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A fitted model with its rows.

    `rows` are float32; `framework` names the exporter.
    """

    name: str
    framework: str
    model: Any
    rows: Rows


def fitted_models(step: int = 1) -> Iterator[Fitted]:
    """Yield every `step`-th model.

    The models are each estimator that can be fitted, pipelines, and boosted trees with missing
    values and categories.
    """
    makers: list[Callable[[], Fitted | None]] = []
    for kind, load in (("classifier", datasets.load_iris), ("regressor", datasets.load_diabetes)):
        makers += [
            functools.partial(_estimator, kind, name, make, load) for name, make in estimators(kind)
        ]
    for name, make_pipe, load_set in PIPELINES:
        makers.append(functools.partial(_fit, name, "sklearn", make_pipe, load_set))
    for name, make_model, load_set, framework in BOOSTED:
        makers.append(functools.partial(_fit, name, framework, make_model, load_set))
    for maker in makers[::step]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one = maker()
        if one is not None:
            yield one


def _estimator(kind: str, name: str, make: Any, load: Callable[[], Any]) -> Fitted | None:
    data = load()
    with contextlib.suppress(Exception):
        # An estimator for other kinds of data can raise any error.
        model, rows = fitted(make, kind, data.data.astype(np.float32), data.target)
        return Fitted(name=name, framework="sklearn", model=model, rows=_shuffled(rows))
    return None


def _fit(
    name: str, framework: str, make: Callable[[], Any], load: Callable[[], tuple[Rows, Rows]]
) -> Fitted:
    rows, labels = load()
    return Fitted(
        name=name, framework=framework, model=make().fit(rows, labels), rows=_shuffled(rows)
    )


def _shuffled(rows: Rows) -> Rows:
    return rows[make_generator(0).permutation(len(rows))][:ROWS]


def _set(load: Callable[[], Any]) -> Callable[[], tuple[Rows, Rows]]:
    def read() -> tuple[Rows, Rows]:
        data = load()
        return data.data.astype(np.float32), data.target

    return read


IRIS, WINE = _set(datasets.load_iris), _set(datasets.load_wine)
CANCER, DIGITS, DIABETES = (
    _set(datasets.load_breast_cancer),
    _set(datasets.load_digits),
    _set(datasets.load_diabetes),
)


def _holed(load: Callable[[], tuple[Rows, Rows]]) -> Callable[[], tuple[Rows, Rows]]:
    """Return a loader with a tenth of the values missing."""

    def read() -> tuple[Rows, Rows]:
        rows, labels = load()
        draw = make_generator(1)
        return np.where(draw.random(rows.shape) < 0.1, np.float32(np.nan), rows), labels

    return read


def _with_categories(load: Callable[[], tuple[Rows, Rows]]) -> Callable[[], tuple[Rows, Rows]]:
    """Return a loader whose first two columns are whole numbers from 0 to 7.

    The numbers follow from the rank of the values.
    """

    def read() -> tuple[Rows, Rows]:
        rows, labels = load()
        rows = rows.copy()
        for column in (0, 1):
            rows[:, column] = np.argsort(np.argsort(rows[:, column])) * 8 // len(rows)
        return rows, labels

    return read


def _pipe(*steps: Any) -> Callable[[], Any]:
    return lambda: make_pipeline(*(step() for step in steps))


P, L, E = prepare, linear_model, ensemble
_LOGISTIC: Callable[[], Any] = lambda: L.LogisticRegression(max_iter=500)  # noqa: E731
_FOREST: Callable[[], Any] = lambda: E.RandomForestClassifier(30, random_state=0)  # noqa: E731
_UNION = lambda: make_union(PCA(3), feature_selection.SelectKBest(k=3))  # noqa: E731
_KBEST = lambda: feature_selection.SelectKBest(k=5)  # noqa: E731
_BINS = lambda: P.KBinsDiscretizer(5, encode="ordinal")  # noqa: E731
_QUANTILES = lambda: P.QuantileTransformer(n_quantiles=50)  # noqa: E731

PIPELINES: tuple[tuple[str, Callable[[], Any], Callable[[], tuple[Rows, Rows]]], ...] = (
    ("scaler-logistic-iris", _pipe(P.StandardScaler, _LOGISTIC), IRIS),
    ("scaler-logistic-wine", _pipe(P.StandardScaler, _LOGISTIC), WINE),
    ("scaler-logistic-cancer", _pipe(P.StandardScaler, _LOGISTIC), CANCER),
    ("minmax-logistic-digits", _pipe(P.MinMaxScaler, _LOGISTIC), DIGITS),
    ("robust-svc-cancer", _pipe(P.RobustScaler, svm.SVC), CANCER),
    ("scaler-linear-svc-wine", _pipe(P.StandardScaler, svm.LinearSVC), WINE),
    (
        "scaler-svc-probability-iris",
        _pipe(P.StandardScaler, lambda: svm.SVC(probability=True)),
        IRIS,
    ),
    ("scaler-forest-cancer", _pipe(P.StandardScaler, _FOREST), CANCER),
    ("forest-digits", _pipe(_FOREST), DIGITS),
    ("pca-logistic-digits", _pipe(P.StandardScaler, lambda: PCA(20), _LOGISTIC), DIGITS),
    ("svd-logistic-digits", _pipe(lambda: TruncatedSVD(10), _LOGISTIC), DIGITS),
    ("kbest-logistic-cancer", _pipe(_KBEST, P.StandardScaler, _LOGISTIC), CANCER),
    ("union-logistic-wine", _pipe(P.StandardScaler, _UNION, _LOGISTIC), WINE),
    ("poly-logistic-iris", _pipe(P.StandardScaler, P.PolynomialFeatures, _LOGISTIC), IRIS),
    ("poly-ridge-diabetes", _pipe(P.PolynomialFeatures, P.StandardScaler, L.Ridge), DIABETES),
    ("power-logistic-wine", _pipe(P.PowerTransformer, _LOGISTIC), WINE),
    ("quantile-logistic-cancer", _pipe(_QUANTILES, _LOGISTIC), CANCER),
    ("bins-logistic-iris", _pipe(_BINS, _LOGISTIC), IRIS),
    (
        "binarizer-bayes-digits",
        _pipe(lambda: P.Binarizer(threshold=8), naive_bayes.BernoulliNB),
        DIGITS,
    ),
    ("bayes-wine", _pipe(naive_bayes.GaussianNB), WINE),
    ("multinomial-digits", _pipe(naive_bayes.MultinomialNB), DIGITS),
    ("normalizer-knn-digits", _pipe(P.Normalizer, neighbors.KNeighborsClassifier), DIGITS),
    ("scaler-knn-wine", _pipe(P.StandardScaler, neighbors.KNeighborsClassifier), WINE),
    ("scaler-knn-diabetes", _pipe(P.StandardScaler, neighbors.KNeighborsRegressor), DIABETES),
    (
        "scaler-mlp-cancer",
        _pipe(P.StandardScaler, lambda: MLPClassifier((16,), max_iter=300, random_state=0)),
        CANCER,
    ),
    (
        "scaler-mlp-diabetes",
        _pipe(
            P.StandardScaler,
            lambda: MLPRegressor(hidden_layer_sizes=(16,), max_iter=300, random_state=0),
        ),
        DIABETES,
    ),
    ("lda-wine", _pipe(P.StandardScaler, LinearDiscriminantAnalysis), WINE),
    ("qda-iris", _pipe(P.StandardScaler, QuadraticDiscriminantAnalysis), IRIS),
    ("tree-cancer", _pipe(tree.DecisionTreeClassifier), CANCER),
    ("extra-trees-wine", _pipe(lambda: E.ExtraTreesClassifier(30, random_state=0)), WINE),
    ("boosting-cancer", _pipe(E.GradientBoostingClassifier), CANCER),
    ("boosting-diabetes", _pipe(P.StandardScaler, E.GradientBoostingRegressor), DIABETES),
    ("hist-boosting-cancer", _pipe(E.HistGradientBoostingClassifier), CANCER),
    ("hist-boosting-diabetes", _pipe(E.HistGradientBoostingRegressor), DIABETES),
    (
        "forest-diabetes",
        _pipe(P.StandardScaler, lambda: E.RandomForestRegressor(100, random_state=0)),
        DIABETES,
    ),
    ("ada-cancer", _pipe(E.AdaBoostClassifier), CANCER),
    ("bagging-wine", _pipe(P.StandardScaler, E.BaggingClassifier), WINE),
    (
        "voting-cancer",
        _pipe(
            P.StandardScaler,
            lambda: E.VotingClassifier([("a", _LOGISTIC()), ("b", _FOREST())], voting="soft"),
        ),
        CANCER,
    ),
    (
        "stacking-cancer",
        _pipe(
            P.StandardScaler, lambda: E.StackingClassifier([("a", _LOGISTIC()), ("b", _FOREST())])
        ),
        CANCER,
    ),
    ("svr-diabetes", _pipe(P.StandardScaler, svm.SVR), DIABETES),
    ("lasso-diabetes", _pipe(P.StandardScaler, L.Lasso), DIABETES),
    ("huber-diabetes", _pipe(P.RobustScaler, L.HuberRegressor), DIABETES),
    (
        "gaussian-process-diabetes",
        _pipe(P.StandardScaler, lambda: GaussianProcessRegressor(alpha=1.0)),
        DIABETES,
    ),
    ("imputer-logistic-cancer", _pipe(SimpleImputer, P.StandardScaler, _LOGISTIC), _holed(CANCER)),
    (
        "imputer-forest-diabetes",
        _pipe(SimpleImputer, lambda: E.RandomForestRegressor(30, random_state=0)),
        _holed(DIABETES),
    ),
    ("hist-boosting-holes", _pipe(E.HistGradientBoostingClassifier), _holed(WINE)),
    ("scaler-kmeans-iris", _pipe(P.StandardScaler, lambda: KMeans(3, random_state=0)), IRIS),
)

BOOSTED: tuple[tuple[str, Callable[[], Any], Callable[[], tuple[Rows, Rows]], str], ...] = (
    ("xgboost-iris", lambda: XGBClassifier(n_estimators=20), IRIS, "xgboost"),
    ("xgboost-cancer", lambda: XGBClassifier(n_estimators=30), CANCER, "xgboost"),
    ("xgboost-diabetes", lambda: XGBRegressor(n_estimators=30), DIABETES, "xgboost"),
    ("xgboost-holes", lambda: XGBClassifier(n_estimators=30), _holed(CANCER), "xgboost"),
    ("xgboost-holes-diabetes", lambda: XGBRegressor(n_estimators=30), _holed(DIABETES), "xgboost"),
    ("lightgbm-iris", lambda: LGBMClassifier(n_estimators=20, verbose=-1), IRIS, "lightgbm"),
    ("lightgbm-cancer", lambda: LGBMClassifier(n_estimators=30, verbose=-1), CANCER, "lightgbm"),
    ("lightgbm-diabetes", lambda: LGBMRegressor(n_estimators=30, verbose=-1), DIABETES, "lightgbm"),
    (
        "lightgbm-holes",
        lambda: LGBMClassifier(n_estimators=30, verbose=-1),
        _holed(CANCER),
        "lightgbm",
    ),
    (
        "lightgbm-categories",
        lambda: LGBMClassifier(n_estimators=30, verbose=-1, categorical_feature=[0, 1]),
        _with_categories(CANCER),
        "lightgbm",
    ),
    (
        "lightgbm-categories-diabetes",
        lambda: LGBMRegressor(n_estimators=30, verbose=-1, categorical_feature=[0, 1]),
        _with_categories(DIABETES),
        "lightgbm",
    ),
)
