"""The trees of scikit-learn's estimators, as their export should contain them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnx_ops.adapters.exporters.sklearn_signature import get_last_step
from onnx_ops.onnx_graph.tree_ensembles import ENSEMBLES, order_nodes
from onnx_ops.ports.tree import Tree

_FORESTS = (
    "RandomForestClassifier",
    "RandomForestRegressor",
    "ExtraTreesClassifier",
    "ExtraTreesRegressor",
)
_BOOSTED = ("GradientBoostingClassifier", "GradientBoostingRegressor")


def read_source_trees(model: object) -> tuple[Tree, ...] | None:
    """Return the trees of a decision tree, forest or GradientBoosting model, or None.

    The estimator is the model itself or the last step of a pipeline. A forest averages its trees,
    so each leaf of n trees is multiplied by 1/n. GradientBoosting adds its trees, each
    multiplied by the learning rate. With k > 2 classes, its tree i belongs to class i modulo k. For
    two classes, a tree has only the weights of the second class.
    """
    last, grown = get_last_step(model), _estimators(model)
    if not grown:
        return None
    if _is_one_of(last, _BOOSTED):
        classes = last.estimators_.shape[1]
        return tuple(
            _tree(estimator, float(last.learning_rate), column=place % classes, width=classes)
            for place, estimator in enumerate(grown)
        )
    return tuple(_tree(estimator, 1.0 / len(grown)) for estimator in grown)


def _estimators(model: object) -> list[Any]:
    """Return the trees of a model's last step, in the order of the export.

    The result is empty if the last step has no trees.
    """
    last = get_last_step(model)
    if isinstance(last, importlib.import_module("sklearn.tree").BaseDecisionTree):
        return [last]
    if _is_one_of(last, _FORESTS):
        return list(last.estimators_)
    return list(last.estimators_.ravel()) if _is_one_of(last, _BOOSTED) else []


def _is_one_of(estimator: Any, names: tuple[str, ...]) -> bool:
    module = importlib.import_module("sklearn.ensemble")
    return isinstance(estimator, tuple(getattr(module, name) for name in names))


def _tree(estimator: Any, factor: float, *, column: int | None = None, width: int = 1) -> Tree:
    """Return a tree with the weight of every leaf multiplied by `factor`.

    A boosted tree adds only to output `column` of `width` outputs.
    """
    grown = estimator.tree_
    # The estimator compares float32 features with float64 thresholds, which are therefore rounded
    # down to float32.
    nearest = grown.threshold.astype(np.float32)
    below = np.nextafter(nearest, np.float32(-np.inf))
    limits = np.where(nearest.astype(np.float64) > grown.threshold, below, nearest)
    inner = grown.children_left >= 0
    values = _weights(estimator, grown.value) * factor
    if column is not None:
        whole = np.zeros((len(values), width))
        whole[:, column] = values[:, 0]
        values = whole
    splits = {
        int(node): (
            int(grown.feature[node]),
            float(limits[node]),
            int(grown.children_left[node]),
            int(grown.children_right[node]),
        )
        for node in np.flatnonzero(inner)
    }
    leaves = {int(node): dict(enumerate(values[node].tolist())) for node in np.flatnonzero(~inner)}
    return order_nodes([0], splits, leaves, values.shape[1])


def _weights(estimator: Any, value: Any) -> Any:
    """Return weights of shape (nodes, outputs).

    `value` has the shape (nodes, outputs, classes). For a classifier, the weights are the shares of
    classes in the node's rows. Of two classes, only the second class is returned.
    """
    from sklearn.base import is_classifier

    if not is_classifier(estimator):
        return value[:, :, 0]
    shares = value[:, 0, :] / value[:, 0, :].sum(axis=1, keepdims=True)
    return shares[:, 1:] if shares.shape[1] == 2 else shares


def route_missing_values(converted: Any, model: object) -> None:
    """Route NaN to the same branches in the export as in the source.

    skl2onnx 1.20 does not route NaN in trees, forests and GradientBoosting estimators. The routes
    are changed only if the source ends in one of them, and the export contains one tree ensemble. A
    tree that was trained without NaN routes NaN with the majority of its training rows.
    """
    ensembles = [node for node in converted.graph.node if node.op_type in ENSEMBLES]
    grown = [estimator.tree_ for estimator in _estimators(model)]
    if len(ensembles) != 1 or not grown:
        return
    lists = [
        a for a in ensembles[0].attribute if a.name.startswith("nodes_") and a.name.endswith("ids")
    ]
    values = {
        a.name: list(importlib.import_module("onnx").helper.get_attribute_value(a)) for a in lists
    }
    tracks = _find_tracks(grown, values)
    for attribute in ensembles[0].attribute:
        if attribute.name == "nodes_missing_value_tracks_true":
            attribute.ints[:] = tracks


def _find_tracks(trees: Sequence[Any], values: Mapping[str, Sequence[int]]) -> list[int]:
    """Return 1 for each node of an export whose true branch takes NaN, otherwise 0.

    The trees of source and export are traversed together from the root, so the numbers of the
    export's nodes do not matter.

    Args:
        trees: scikit-learn's trees, in the order of the export.
        values: the attributes of the export's nodes, by name.
    """
    numbers = zip(values["nodes_treeids"], values["nodes_nodeids"], strict=True)
    places = {number: place for place, number in enumerate(numbers)}
    tracks = [0] * len(places)
    for number, tree in enumerate(trees):
        goes_low = tree.missing_go_to_left
        waiting = [(0, 0)]
        while waiting:
            source_node, node = waiting.pop()
            if tree.children_left[source_node] < 0:
                # Only a leaf has no children. It has no branch for NaN.
                continue
            place = places[number, node]
            tracks[place] = int(goes_low[source_node])
            waiting.append(
                (int(tree.children_left[source_node]), values["nodes_truenodeids"][place])
            )
            waiting.append(
                (int(tree.children_right[source_node]), values["nodes_falsenodeids"][place])
            )
    return tracks
