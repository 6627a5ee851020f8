"""Conversion of estimators to equivalent estimators that skl2onnx supports.

skl2onnx converts most wrappers only around an estimator whose input is one matrix. It has no
converter for some clusterings and linear transformers, which are rewritten as other estimators. The
parity gate compares the export with the model that training returned.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from onnx_ops.errors import UserError

Step = tuple[str, Any]
"""An ONNX operator and its second input.

The second input is an array or a number, or None for an operator with one input.
"""


def rewrite_model(model: object) -> tuple[object, tuple[Step, ...]]:
    """Return an equivalent model that skl2onnx converts, and steps after its output.

    Raises:
        UserError: a transformed target has an unknown inverse function, an isotonic regression does
            not clip, or a search has `refit=False`.
    """
    model = unwrap_search(model)
    rewrite = _REWRITES.get(type(model).__name__)
    return (model, ()) if rewrite is None else rewrite(model)


def list_estimators(model: object) -> list[object]:
    """Return the estimator, and those in its steps, transformers and ensembles."""
    estimators = [model]
    for attribute in ("steps", "transformer_list", "transformers_", "estimators_"):
        listed = getattr(model, attribute, None)
        for entry in () if listed is None else listed:
            parts = entry if isinstance(entry, tuple | list) else (entry,)
            for part in parts:
                if hasattr(part, "get_params"):
                    estimators += list_estimators(part)
    return estimators


def unwrap_search(model: object) -> object:
    """Return the refitted estimator of a search object; return other models unchanged.

    Search objects are `GridSearchCV`, `RandomizedSearchCV` and others. Their `predict` calls the
    refitted estimator.

    Raises:
        UserError: the search has not refitted an estimator.
    """
    while hasattr(model, "best_params_"):
        if not hasattr(model, "best_estimator_"):
            what = f"{type(model).__name__} contains no fitted estimator, since `refit` is off"
            raise UserError(
                what,
                where="export",
                remedy="Remove `refit=False`, or return a fitted estimator.",
            )
        model = model.best_estimator_
    return model


def _rewrite_pipeline(model: Any) -> tuple[object, tuple[Step, ...]]:
    name, last = model.steps[-1]
    rewritten, steps = rewrite_model(last)
    return (
        (model, ())
        if rewritten is last
        else (_make_pipeline([*model.steps[:-1], (name, rewritten)]), steps)
    )


def _rewrite_selection(model: Any) -> tuple[object, tuple[Step, ...]]:
    """Return a pipeline of a feature selection and the estimator fitted after it.

    The converters treat the selection as a transformer.
    """
    rewritten, steps = rewrite_model(model.estimator_)
    return _make_pipeline([("selection", model), ("model", rewritten)]), steps


def _rewrite_target(model: Any) -> tuple[object, tuple[Step, ...]]:
    rewritten, steps = rewrite_model(model.regressor_)
    return rewritten, (*steps, *_invert(model.transformer_))


def _rewrite_calibration(model: Any) -> tuple[object, tuple[Step, ...]]:
    """Return the mean of pipelines with calibrated last steps.

    If the model is not a calibration of pipelines, it is returned unchanged.

    Raises:
        UserError: an inner estimator cannot be rewritten (see `rewrite_model`).
    """
    pipelines = []
    for calibrated in model.calibrated_classifiers_:
        inner, steps = rewrite_model(calibrated.estimator)
        if steps or not hasattr(inner, "steps"):
            return model, ()
        flat = _flatten(inner)
        single, entry = copy.copy(model), copy.copy(calibrated)
        entry.estimator = flat[-1][1]
        single.calibrated_classifiers_, single.estimator = [entry], entry.estimator
        pipelines.append(_make_pipeline([*flat[:-1], ("calibrated", single)]))
    return (pipelines[0] if len(pipelines) == 1 else _average(pipelines, model.classes_)), ()


def _rewrite_ensemble(model: Any) -> tuple[object, tuple[Step, ...]]:
    """Return a pipeline of the shared first steps and an ensemble of the last steps.

    A model that is not an ensemble of pipelines with the same first steps is returned unchanged.
    """
    import joblib

    flat = [_flatten(inner) for inner in model.estimators_ if hasattr(inner, "steps")]
    prefixes = {joblib.hash([step for _, step in steps[:-1]]) for steps in flat}
    if len(flat) != len(model.estimators_) or len(prefixes) != 1:
        return model, ()
    ensemble = copy.copy(model)
    ensemble.estimators_ = [steps[-1][1] for steps in flat]
    return _make_pipeline([*flat[0][:-1], ("ensemble", ensemble)]), ()


def _flatten(pipeline: Any) -> list[tuple[str, Any]]:
    """Return the steps of a pipeline.

    A last step that is a pipeline is replaced by its steps.
    """
    *steps, (name, last) = pipeline.steps
    return [*steps, *(_flatten(last) if hasattr(last, "steps") else [(name, last)])]


def _average(models: list[object], classes: Any) -> object:
    """Return a classifier whose probabilities are the mean of several classifiers."""
    from sklearn.ensemble import VotingClassifier
    from sklearn.preprocessing import LabelEncoder

    voting = VotingClassifier(
        [(f"fold{place}", model) for place, model in enumerate(models)], voting="soft"
    )
    voting.estimators_ = models
    voting.le_ = LabelEncoder().fit(classes)
    voting.classes_ = classes
    return voting


def _rewrite_isotonic(model: Any) -> tuple[object, tuple[Step, ...]]:
    """Return the identity, and steps for an isotonic regression.

    The steps interpolate between the points of the monotonic function.

    Raises:
        UserError: the regression does not clip values outside its range.
    """
    from sklearn.preprocessing import FunctionTransformer

    if model.out_of_bounds != "clip":
        raise UserError(
            f"IsotonicRegression with out_of_bounds={model.out_of_bounds!r} cannot be converted "
            "faithfully",
            where="export",
            why="outside the training range, the export returns the value at the end of the range",
            remedy="Set out_of_bounds='clip'.",
        )
    return FunctionTransformer(), interpolate(model.X_thresholds_, model.y_thresholds_)


def interpolate(places: Any, values: Any) -> tuple[Step, ...]:
    """Return steps that interpolate linearly between values at increasing places.

    The input is a column x. The output is values[0] + Σ clip((x - places[i]) / (places[i+1] -
    places[i]), 0, 1) (values[i+1] - values[i]).
    """
    import numpy as np

    places, values = (np.asarray(array, dtype=np.float64) for array in (places, values))
    if len(places) == 1:
        places, values = np.array([places[0], places[0] + 1]), np.repeat(values, 2)
    return (
        ("Sub", places[None, :-1]),
        ("Div", np.diff(places)[None]),
        ("Max", np.zeros(1)),
        ("Min", np.ones(1)),
        ("MatMul", np.diff(values)[:, None]),
        ("Add", values[:1]),
    )


def _rewrite_centers(model: Any) -> tuple[object, tuple[Step, ...]]:
    """Return k-means with the centers of a clustering.

    The `predict` method of the clustering must return the number of the nearest center.
    """
    from sklearn.cluster import KMeans

    centers = model.cluster_centers_
    rewritten = KMeans(len(centers))
    rewritten.cluster_centers_, rewritten.n_features_in_ = centers, centers.shape[1]
    return rewritten, ()


def _rewrite_subclusters(model: Any) -> tuple[object, tuple[Step, ...]]:
    """Return a nearest neighbor classifier of the centers of a clustering.

    The clustering must have a label for each center.
    """
    from sklearn.neighbors import KNeighborsClassifier

    return KNeighborsClassifier(1).fit(model.subcluster_centers_, model.subcluster_labels_), ()


def _rewrite_projection(model: Any) -> tuple[object, tuple[Step, ...]]:
    """Return principal components with the matrix of a linear transformer.

    The columns of the matrix are the transforms of unit vectors.
    """
    import numpy as np
    from sklearn.decomposition import PCA

    mean = model.mean_
    with_units = model.transform(np.vstack([mean, mean + np.eye(len(mean))]))
    rewritten = PCA(with_units.shape[1])
    # In exact arithmetic, the transform of the mean is 0. Its actual value is a rounding error of
    # every row, so it is subtracted.
    rewritten.components_ = (with_units[1:] - with_units[0]).T
    rewritten.mean_, rewritten.n_features_in_ = mean, len(mean)
    rewritten.explained_variance_ = np.ones(with_units.shape[1])
    rewritten.n_components_ = with_units.shape[1]
    return rewritten, ()


def _rewrite_fourier(model: Any) -> tuple[object, tuple[Step, ...]]:
    """Return the identity, and steps for random Fourier features.

    The steps compute √(2/n) cos(x W + b) for a row x.
    """
    from sklearn.preprocessing import FunctionTransformer

    scale = (2.0 / model.random_weights_.shape[1]) ** 0.5
    steps = (
        ("MatMul", model.random_weights_),
        ("Add", model.random_offset_),
        ("Cos", None),
        ("Mul", scale),
    )
    return FunctionTransformer(), steps


def _make_pipeline(steps: list[tuple[str, Any]]) -> object:
    """Return a pipeline of fitted steps."""
    from sklearn.pipeline import Pipeline

    names = {name for name, _ in steps}
    return Pipeline(
        steps
        if len(names) == len(steps)
        else [(f"{at}-{name}", s) for at, (name, s) in enumerate(steps)]
    )


def _invert(transformer: Any) -> tuple[Step, ...]:
    """Return the steps that convert a transformed target to the target.

    Raises:
        UserError: this module has no ONNX steps for the inverse function.
    """
    name = type(transformer).__name__
    if name == "FunctionTransformer":
        function = transformer.inverse_func
        steps = _FUNCTIONS.get(
            getattr(function, "__name__", "") if _is_from_numpy(function) else str(function)
        )
        if steps is not None:
            return steps
        name = f"the inverse function {getattr(function, '__name__', function)}"
    elif name == "Pipeline":
        return tuple(step for _, part in reversed(transformer.steps) for step in _invert(part))
    elif name in _SCALERS:
        return _SCALERS[name](transformer)
    raise UserError(
        f"TransformedTargetRegressor with {name} cannot be converted faithfully",
        where="export",
        why="onnx-ops has no ONNX operators for its inverse transformation",
        remedy=f"Use one of the scalers {', '.join(_SCALERS)}, or an inverse_func of "
        f"{', '.join(list(_FUNCTIONS)[1:])}, or transform the answers in the application.",
    )


def _is_from_numpy(function: object) -> bool:
    return type(function).__name__ == "ufunc"


_FUNCTIONS: Mapping[str, tuple[Step, ...]] = {
    "None": (),
    "exp": (("Exp", None),),
    "expm1": (("Exp", None), ("Sub", 1.0)),
    "exp2": (("Mul", 0.6931471805599453), ("Exp", None)),
    "log": (("Log", None),),
    "log1p": (("Add", 1.0), ("Log", None)),
    "sqrt": (("Sqrt", None),),
    "square": (("Pow", 2.0),),
    "negative": (("Neg", None),),
    "absolute": (("Abs", None),),
    "reciprocal": (("Reciprocal", None),),
    "tanh": (("Tanh", None),),
    "expit": (("Sigmoid", None),),
}
"""Steps of the inverse functions of NumPy and SciPy by name.

The name `None` means that there is no function.
"""


def _list_affine(scale: Any, offset: Any) -> tuple[Step, ...]:
    steps = (("Mul", scale), ("Add", offset))
    return tuple((operator, array) for operator, array in steps if array is not None)


_SCALERS: Mapping[str, Callable[[Any], tuple[Step, ...]]] = {
    # `mean_` can be an array even with `with_mean=False`; `scale_` is None with `with_std=False`.
    "StandardScaler": lambda scaler: _list_affine(
        scaler.scale_, scaler.mean_ if scaler.with_mean else None
    ),
    "RobustScaler": lambda scaler: _list_affine(
        scaler.scale_ if scaler.with_scaling else None,
        scaler.center_ if scaler.with_centering else None,
    ),
    "MaxAbsScaler": lambda scaler: _list_affine(scaler.scale_, None),
    "MinMaxScaler": lambda scaler: (("Sub", scaler.min_), ("Div", scaler.scale_)),
}

_REWRITES: Mapping[str, Callable[[Any], tuple[object, tuple[Step, ...]]]] = {
    **dict.fromkeys(("RFE", "RFECV"), _rewrite_selection),
    "Pipeline": _rewrite_pipeline,
    "FrozenEstimator": lambda model: rewrite_model(model.estimator),
    "SelfTrainingClassifier": lambda model: rewrite_model(model.estimator_),
    "TransformedTargetRegressor": _rewrite_target,
    "CalibratedClassifierCV": _rewrite_calibration,
    **dict.fromkeys(("MeanShift", "AffinityPropagation"), _rewrite_centers),
    **dict.fromkeys(
        ("MultiOutputRegressor", "OneVsRestClassifier", "StackingClassifier", "StackingRegressor"),
        _rewrite_ensemble,
    ),
    "IsotonicRegression": _rewrite_isotonic,
    "RBFSampler": _rewrite_fourier,
    "Birch": _rewrite_subclusters,
    **dict.fromkeys(
        ("FastICA", "FactorAnalysis", "SparsePCA", "MiniBatchSparsePCA"), _rewrite_projection
    ),
}
