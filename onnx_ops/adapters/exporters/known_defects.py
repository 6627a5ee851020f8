"""Models whose conversion is known to be wrong or impossible.

The exporter in module `sklearn` refuses these models before the conversion, by class and settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from onnx_ops.errors import UserError

ConversionDefect = tuple[str, str, str]
"""The part that cannot be converted, the reason, and an alternative."""

_SPARSE = "skl2onnx does not convert this step with sparse output"

_DIFFERS = "in tests of onnx-ops, the converted model gave other answers than its source"


_WRONG_AS_STEP = ("KMeans", "MiniBatchKMeans")
"""Estimators whose `predict` is converted correctly, but whose `transform` is not."""

LOST_IN_FLOAT32 = 1e-6
"""Smallest ratio of an eigenvalue to the largest at which float32 is precise.

Rounding the entries of a kernel adds about 6e-8 of the largest eigenvalue to each eigenvalue.
"""


def check_convertible(parts: list[object], *, last: object) -> None:
    """Refuse estimators and steps whose conversion is wrong or impossible.

    Args:
        last: the last step of the model, which computes the answers.

    Raises:
        UserError: the conversion of one of the estimators or steps is wrong or impossible.
    """
    for part in parts:
        if part is last and type(part).__name__ in _WRONG_AS_STEP:
            continue
        package = type(part).__module__.partition(".")[0]
        faults = {"xgboost": _xgboost, "lightgbm": _lightgbm, "sklearn": _sklearn}.get(package)
        for what, why, remedy in () if faults is None else faults(part):
            raise UserError(
                f"{what} cannot be converted faithfully", where="export", why=why, remedy=remedy
            )


def _xgboost(part: Any) -> Iterator[ConversionDefect]:
    settings = part.get_params()
    objective = str(getattr(part, "objective", "") or settings.get("objective") or "")
    name = type(part).__name__
    learner = json.loads(part.get_booster().save_config())["learner"]
    if (booster := learner["gradient_booster"]["name"]) in ("dart", "gblinear"):
        yield (
            f"{name} with booster {booster}",
            "onnxmltools reads only plain trees",
            "Use booster gbtree.",
        )
    others = {
        "survival:cox": "Train with another objective, such as reg:squarederror.",
        "reg:logistic": "For labels 0 and 1, train an XGBClassifier with binary:logistic. For "
        "other targets, train with reg:squarederror on the logit of the target.",
        "multi:softmax": "Use objective multi:softprob: `predict` returns the same classes.",
    }
    if objective in others:
        yield f"{name} with objective {objective}", _DIFFERS, others[objective]
    alpha = settings.get("quantile_alpha")
    if objective == "reg:quantileerror" and isinstance(alpha, list | tuple) and len(alpha) > 1:
        yield f"{name} with several quantiles", _DIFFERS, "Train one model for each quantile."
    elif int(learner["learner_model_param"].get("num_target", "1")) > 1:
        yield f"{name} with several targets", _DIFFERS, "Train one model for each target."
    if int(learner["gradient_booster"]["gbtree_model_param"]["num_parallel_tree"]) > 1:
        yield from _xgboost_forest(part, int(learner["learner_model_param"]["num_class"]))
    if "c" in (part.get_booster().feature_types or ()):
        yield from _xgboost_categories(part)


def _xgboost_forest(part: Any, classes: int) -> Iterator[ConversionDefect]:
    name = f"{type(part).__name__} with several trees in a round (num_parallel_tree)"
    if hasattr(part, "best_iteration"):
        yield (
            f"{name} and early stopping",
            "onnxmltools keeps one tree for each round",
            "Set n_estimators to best_iteration + 1, and train without early_stopping_rounds.",
        )
    if classes > 1:
        yield (
            f"{name} and {classes} classes",
            "onnxmltools assigns successive trees to successive classes",
            "Train an XGBClassifier with num_parallel_tree=1, or use a forest of scikit-learn.",
        )


def _xgboost_categories(part: Any) -> Iterator[ConversionDefect]:
    name = type(part).__name__
    if not part.get_booster().get_categories().empty():
        yield (
            f"{name} with data frame columns of type category",
            "XGBoost assigns numbers to the categories, which the export does not contain",
            (
                "Encode the column in a ColumnTransformer with OrdinalEncoder, "
                "and mark it with c in `feature_types`."
            ),
        )
    if hasattr(part, "classes_") and part.get_booster()[:1].get_dump()[0].startswith("0:leaf"):
        yield (
            f"{name} with categories and a first tree without splits",
            "ONNX Runtime 1.31 can add leaves of other trees to this tree",
            "Encode the column in a ColumnTransformer, with OneHotEncoder.",
        )


def _lightgbm(part: Any) -> Iterator[ConversionDefect]:
    settings = {**part.get_params(), **getattr(part, "_other_params", {})}
    name = type(part).__name__
    if "rf" in (settings.get("boosting_type"), settings.get("boosting")):
        yield (
            f"{name} with boosting rf",
            _DIFFERS,
            "Use boosting gbdt or dart, or a forest of scikit-learn.",
        )
    if settings.get("objective") in (
        "cross_entropy",
        "xentropy",
        "cross_entropy_lambda",
        "xentlambda",
    ):
        yield (
            f"{name} with objective {settings['objective']}",
            "onnxmltools does not support this objective",
            (
                "For labels 0 and 1, train an LGBMClassifier with objective binary. For other "
                "targets, train with objective regression on the logit of the target."
            ),
        )
    if part.booster_.pandas_categorical:
        yield (
            f"{name} with data frame columns of type category",
            "LightGBM assigns numbers to the categories, which the export does not contain",
            (
                "Encode the column in a ColumnTransformer with OrdinalEncoder, "
                "and name it in `categorical_feature`."
            ),
        )
    if settings.get("linear_tree"):
        yield f"{name} with linear_tree", _DIFFERS, "Remove linear_tree."
    if settings.get("zero_as_missing"):
        remedy = "Replace 0 by NaN in the data, and remove zero_as_missing."
        yield f"{name} with zero_as_missing", _DIFFERS, remedy
    if str(getattr(part, "objective_", settings.get("objective"))) in (
        "multiclassova",
        "multiclass_ova",
        "ova",
        "ovr",
    ):
        yield f"{name} with objective multiclassova", _DIFFERS, "Use objective multiclass."


def _sklearn(part: Any) -> Iterator[ConversionDefect]:
    find = _SKLEARN.get(type(part).__name__)
    return find(part) if find else iter(())


def _histogram_boosting(part: Any) -> Iterator[ConversionDefect]:
    name = type(part).__name__
    if getattr(part, "is_categorical_", None) is not None and part.is_categorical_.any():
        remedy = "Encode the column in a ColumnTransformer, and set categorical_features=None."
        yield f"{name} with categorical_features", _DIFFERS, remedy
    if getattr(part, "loss", "") in ("poisson", "gamma"):
        yield (
            f"{name} with loss {part.loss}",
            _DIFFERS,
            "Train with another loss, such as squared_error.",
        )


def _neighbors(part: Any) -> Iterator[ConversionDefect]:
    if part.weights == "distance" and part.effective_metric_ in ("manhattan", "cityblock", "l1"):
        what = f"{type(part).__name__} with weights='distance' and the Manhattan metric"
        yield what, _DIFFERS, "Use p=2, or weights='uniform'."


def _neighbors_in_radius(part: Any) -> Iterator[ConversionDefect]:
    name = type(part).__name__
    reason = (
        "in tests of onnx-ops, the converted model failed if rows had different numbers of "
        "neighbors, or none"
    )
    yield name, reason, f"Use K{name.removeprefix('Radius')}."


def _stochastic_gradient(part: Any) -> Iterator[ConversionDefect]:
    if part.loss == "modified_huber" and len(part.classes_) > 2:
        what = f"{type(part).__name__} with loss {part.loss} and {len(part.classes_)} classes"
        yield what, _DIFFERS, "Use loss='log_loss'."


def _imputer(part: Any) -> Iterator[ConversionDefect]:
    if part.add_indicator:
        yield (
            "SimpleImputer with add_indicator",
            "the converted model does not contain the indicators",
            "Remove add_indicator.",
        )


def _one_hot(part: Any) -> Iterator[ConversionDefect]:
    if part.handle_unknown not in ("error", "ignore"):
        yield (
            f"OneHotEncoder with handle_unknown={part.handle_unknown!r}",
            (
                "in tests of onnx-ops, the converted model failed on a category that is not in its "
                "training data"
            ),
            "Use handle_unknown='ignore'.",
        )


def _word_weights(part: Any) -> Iterator[ConversionDefect]:
    if part.sublinear_tf:
        yield (
            f"{type(part).__name__} with sublinear_tf",
            "skl2onnx computes log(1 + n) for a word that occurs n times, instead of 1 + log(n)",
            "Use sublinear_tf=False.",
        )


def _bins(part: Any) -> Iterator[ConversionDefect]:
    if part.encode == "onehot":
        remedy = "Use encode='onehot-dense', which returns the same numbers."
        yield "KBinsDiscretizer with encode='onehot'", _SPARSE, remedy


def _tree_embedding(part: Any) -> Iterator[ConversionDefect]:
    if part.sparse_output:
        yield (
            "RandomTreesEmbedding with sparse output",
            _SPARSE,
            "Use sparse_output=False, which returns the same numbers.",
        )


def _cluster_step(part: Any) -> Iterator[ConversionDefect]:
    yield (
        f"{type(part).__name__} as a step",
        "the converted step returns the number of the cluster too, not only the distances",
        (
            "Remove the step, or use another transformer, "
            "such as KBinsDiscretizer or GaussianRandomProjection."
        ),
    )


def _gaussian_process(_: Any) -> Iterator[ConversionDefect]:
    reason = "its export requires the operator Solve, which ONNX Runtime does not implement"
    yield "GaussianProcessClassifier", reason, "Use another classifier, such as LogisticRegression."


def _threshold(part: Any) -> Iterator[ConversionDefect]:
    name = type(part).__name__
    threshold = "`best_threshold_`" if name.startswith("Tuned") else "the threshold"
    remedy = (
        f"Return the model's `estimator_`, and compare the probability with {threshold} in the "
        "application."
    )
    yield name, "skl2onnx does not convert the threshold", remedy


def _kernel_components(part: Any) -> Iterator[ConversionDefect]:
    if part.eigenvalues_[-1] < LOST_IN_FLOAT32 * part.eigenvalues_[0]:
        yield (
            (
                "KernelPCA whose smallest eigenvalue is "
                f"{part.eigenvalues_[-1] / part.eigenvalues_[0]:.0e} of the largest"
            ),
            "float32 loses components with such small eigenvalues",
            "Reduce n_components, or scale the columns before KernelPCA.",
        )


def _function(part: Any) -> Iterator[ConversionDefect]:
    if part.func is not None:
        yield (
            "FunctionTransformer with a function",
            "Python code has no counterpart in ONNX",
            "Compute the column before the pipeline, or use a transformer of scikit-learn.",
        )


_SKLEARN: Mapping[str, Callable[[Any], Iterator[ConversionDefect]]] = {
    "HistGradientBoostingClassifier": _histogram_boosting,
    "HistGradientBoostingRegressor": _histogram_boosting,
    "KNeighborsClassifier": _neighbors,
    "KNeighborsRegressor": _neighbors,
    "RadiusNeighborsClassifier": _neighbors_in_radius,
    "RadiusNeighborsRegressor": _neighbors_in_radius,
    "SGDClassifier": _stochastic_gradient,
    "SimpleImputer": _imputer,
    "OneHotEncoder": _one_hot,
    "KBinsDiscretizer": _bins,
    "TfidfTransformer": _word_weights,
    "TfidfVectorizer": _word_weights,
    "RandomTreesEmbedding": _tree_embedding,
    "KMeans": _cluster_step,
    "MiniBatchKMeans": _cluster_step,
    "GaussianProcessClassifier": _gaussian_process,
    "TunedThresholdClassifierCV": _threshold,
    "FixedThresholdClassifier": _threshold,
    "KernelPCA": _kernel_components,
    "FunctionTransformer": _function,
}
"""For each class, a function that yields the defects of an estimator's conversion."""
