"""The trees of a file equal those of the estimator that it was made from.

An inconsistent file is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.target import Target
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.tree_ensembles import build_split_probes, has_trees, read_trees
from onnx_ops.ports import Dataset, ExportRequest
from onnx_ops.statistics.tree_parity import compare_trees
from onnx_ops.testing.models import rows, write_perceptron

# The functions take the package `sklearn`, which is slow to import. The texts name the data.
ESTIMATORS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "tree, 3 classes": (lambda sk: sk.tree.DecisionTreeClassifier(max_depth=4), "iris"),
    "tree, 2 classes": (
        lambda sk: sk.tree.DecisionTreeClassifier(max_leaf_nodes=9),
        "breast_cancer",
    ),
    "tree, numbers": (lambda sk: sk.tree.DecisionTreeRegressor(max_depth=4), "diabetes"),
    "forest, 3 classes": (
        lambda sk: sk.ensemble.RandomForestClassifier(5, class_weight="balanced"),
        "iris",
    ),
    "forest, 2 classes": (
        lambda sk: sk.ensemble.RandomForestClassifier(5, max_leaf_nodes=9),
        "breast_cancer",
    ),
    "forest, numbers": (lambda sk: sk.ensemble.RandomForestRegressor(5, max_depth=5), "diabetes"),
    "extra trees": (lambda sk: sk.ensemble.ExtraTreesClassifier(5), "iris"),
    "boosting, 3 classes": (
        lambda sk: sk.ensemble.GradientBoostingClassifier(n_estimators=5),
        "iris",
    ),
    "boosting, 2 classes": (
        lambda sk: sk.ensemble.GradientBoostingClassifier(n_estimators=5),
        "breast_cancer",
    ),
    "boosting, numbers": (
        lambda sk: sk.ensemble.GradientBoostingRegressor(n_estimators=5),
        "diabetes",
    ),
    "scaled forest": (
        lambda sk: sk.pipeline.make_pipeline(
            sk.preprocessing.StandardScaler(), sk.ensemble.RandomForestClassifier(5)
        ),
        "breast_cancer",
    ),
    "pipeline in a pipeline": (
        lambda sk: sk.pipeline.make_pipeline(
            sk.preprocessing.MinMaxScaler(),
            sk.pipeline.make_pipeline(
                sk.preprocessing.StandardScaler(), sk.tree.DecisionTreeClassifier(max_depth=4)
            ),
        ),
        "iris",
    ),
}


def exported(make: Callable[[Any], Any], data: str, path: Path) -> tuple[Any, Any]:
    import sklearn
    import sklearn.datasets

    x, y = getattr(sklearn.datasets, f"load_{data}")(return_X_y=True)
    x = x.astype(np.float32)
    model = make(sklearn)
    random = {name: 0 for name in model.get_params() if name.rpartition("__")[2] == "random_state"}
    model.set_params(**random).fit(x, y)
    request = ExportRequest(section=Export(framework="sklearn"), samples={"x": x}, path=path)
    SklearnExporter().export(model, request)
    return model, x


@pytest.mark.parametrize("name", ESTIMATORS)
def test_read_trees_of_export_matches_source(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model, _ = exported(*ESTIMATORS[name], path)
    trees = SklearnExporter().trees(model)
    assert trees is not None
    found = compare_trees(read_trees(path), trees)
    assert found.changed == 0, found.differences
    assert found.splits > 0


def attribute(model: onnx.ModelProto, name: str) -> Any:
    return next(a for node in model.graph.node for a in node.attribute if a.name == name)


def splits_of(model: onnx.ModelProto) -> list[int]:
    return [
        place
        for place, mode in enumerate(attribute(model, "nodes_modes").strings)
        if mode != b"LEAF"
    ]


def test_read_trees_with_changed_threshold_or_leaf_differs_from_source(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model, _ = exported(*ESTIMATORS["forest, 3 classes"], path)
    trees = SklearnExporter().trees(model)
    assert trees is not None
    whole = onnx.load(path)
    splits = splits_of(whole)
    leaves = [
        place for place, weight in enumerate(attribute(whole, "class_weights").floats) if weight
    ]
    for name, places in (("nodes_values", splits), ("class_weights", leaves)):
        for place in places[:: max(1, len(places) // 8)]:
            changed = onnx.load(path)
            attribute(changed, name).floats[place] *= 1.00001
            onnx.save(changed, tmp_path / "changed.onnx")
            found = compare_trees(read_trees(tmp_path / "changed.onnx"), trees)
            assert found.changed == 1
            assert ("threshold" if name == "nodes_values" else "leaf weight") in found.differences[
                0
            ]


def test_read_trees_with_strict_split_differs_in_threshold(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model, _ = exported(*ESTIMATORS["tree, 3 classes"], path)
    strict = onnx.load(path)
    attribute(strict, "nodes_modes").strings[0] = b"BRANCH_LT"
    onnx.save(strict, path)
    found = compare_trees(read_trees(path), SklearnExporter().trees(model) or ())
    assert found.changed == 1
    assert "threshold" in found.differences[0]


def test_trees_of_unsupported_estimator_or_model_are_absent(tmp_path: Path) -> None:
    model, _ = exported(
        lambda sk: sk.ensemble.AdaBoostClassifier(n_estimators=2), "iris", tmp_path / "model.onnx"
    )
    assert SklearnExporter().trees(model) is None
    write_perceptron(tmp_path / "other.onnx")
    assert not has_trees(tmp_path / "other.onnx")
    assert read_trees(tmp_path / "other.onnx") == ()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("nodes_truenodeids", 0, "malformed"),
        ("class_nodeids", 10_000, "a leaf or an output that does not exist"),
        ("class_ids", 1 << 40, "outputs"),
        ("nodes_modes", b"BRANCH_EQ", "split of mode BRANCH_EQ"),
    ],
)
def test_read_trees_of_inconsistent_file_raises_user_error(
    name: str, value: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    exported(*ESTIMATORS["tree, 3 classes"], path)
    model = onnx.load(path)
    found = attribute(model, name)
    (found.strings if isinstance(value, bytes) else found.ints)[0] = value
    onnx.save(model, path)
    with pytest.raises(UserError, match=message):
        read_trees(path)


@pytest.mark.parametrize(
    "name", ["forest, 3 classes", "forest, 2 classes", "forest, numbers", "tree, 2 classes"]
)
def test_tree_export_with_nan_answers_like_source(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model, x = exported(*ESTIMATORS[name], path)
    rows = x[::3].copy()
    rows[np.arange(len(rows)), np.arange(len(rows)) % x.shape[1]] = np.nan
    expected = SklearnExporter().reference(model, {"x": rows}, "float64") or {}
    found = OnnxRuntime().run(path, Target(name="cpu"), ({"x": rows},))[0]
    score = "variable" if "numbers" in name else "probabilities"
    here: np.ndarray[Any, Any] = found[score]
    there: np.ndarray[Any, Any] = expected[score]
    np.testing.assert_allclose(here, there, rtol=1e-5, atol=1e-6)


TARGET = Target(name="here")


@pytest.fixture(params=["plain", "scaled", "columns"])
def forest(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, dict[str, Any], Path]:
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    draw = np.random.default_rng(0)
    x = (draw.standard_normal((300, 6)) * [1, 5, 0.1, 30, 1, 1] + [0, 9, 2, -40, 0, 1]).astype(
        np.float32
    )
    y = (x[:, 0] + x[:, 1] / 5 + draw.standard_normal(300) > 2).astype(int)
    trees = RandomForestClassifier(n_estimators=5, max_depth=5, random_state=0)
    samples: dict[str, Any] = {"x": x}
    if request.param == "columns":
        # One of the columns contains whole numbers.
        samples = {f"c{place}": x[:, [place]] for place in range(6)}
        samples["c3"] = (100 * samples["c3"]).astype(np.int64)
    model = make_pipeline(StandardScaler(), trees) if request.param == "scaled" else trees
    model.fit(x if "x" in samples else Dataset(inputs=samples).frame(), y)
    path = tmp_path / "forest.onnx"
    section = Export(framework="sklearn", dynamic={name: {0: "batch"} for name in samples})
    SklearnExporter().export(model, ExportRequest(section=section, samples=samples, path=path))
    return model, {name: array[:100] for name, array in samples.items()}, path


def differing(model: Any, probes: Any, path: Path) -> int:
    """Return the number of rows whose probabilities differ from the source's."""
    found = OnnxRuntime().run(path, TARGET, (probes,))[0]["probabilities"]
    expected: Any = SklearnExporter().reference(model, probes, "float64")
    return int((np.abs(found - expected["probabilities"]).max(axis=1) > 1e-5).sum())


def test_build_split_probes_of_correct_export_get_same_answers_as_source(
    forest: tuple[Any, dict[str, Any], Path],
) -> None:
    model, samples, path = forest
    probes = build_split_probes(path, samples)
    assert probes is not None
    estimator = model[-1] if hasattr(model, "steps") else model
    splits = sum(int((tree.tree_.feature >= 0).sum()) for tree in estimator.estimators_)
    assert sum(array.shape[1] for array in probes.values()) == 6
    assert {name: (len(array), array.dtype) for name, array in probes.items()} == {
        name: (2 * splits, array.dtype) for name, array in samples.items()
    }
    assert differing(model, probes, path) == 0


def test_build_split_probes_detect_at_least_ninety_percent_of_moved_thresholds(
    forest: tuple[Any, dict[str, Any], Path], tmp_path: Path
) -> None:
    model, samples, path = forest
    probes = build_split_probes(path, samples)
    places = splits_of(onnx.load(path))
    seen = 0
    for place in places[::4]:
        moved = onnx.load(path)
        values = attribute(moved, "nodes_values").floats
        values[place] += 0.05 * abs(values[place]) + 0.01
        onnx.save(moved, tmp_path / "moved.onnx")
        seen += differing(model, probes, tmp_path / "moved.onnx") > 0
    assert seen >= 0.9 * len(places[::4])


def to_tree_ensemble(path: Path) -> Path:
    """Write the regressor of a file as a `TreeEnsemble` of version 5 of `ai.onnx.ml`."""
    model = onnx.load(path)
    (place,) = (i for i, n in enumerate(model.graph.node) if n.op_type == "TreeEnsembleRegressor")
    old = {a.name: helper.get_attribute_value(a) for a in model.graph.node[place].attribute}
    keys = list(zip(old["nodes_treeids"], old["nodes_nodeids"], strict=True))
    is_leaf = dict(zip(keys, (int(m == b"LEAF") for m in old["nodes_modes"]), strict=True))
    kept = [i for i, key in enumerate(keys) if not is_leaf[key]]
    numbers = {keys[i]: number for number, i in enumerate(kept)}
    leaves = zip(old["target_treeids"], old["target_nodeids"], strict=True)
    numbers |= {leaf: number for number, leaf in enumerate(leaves)}
    branches = {
        side: [(keys[i][0], old[f"nodes_{side}nodeids"][i]) for i in kept]
        for side in ("true", "false")
    }
    links: dict[str, Any] = {
        f"nodes_{side}nodeids": [numbers[key] for key in nodes] for side, nodes in branches.items()
    } | {f"nodes_{side}leafs": [is_leaf[key] for key in nodes] for side, nodes in branches.items()}
    values = np.array([old["nodes_values"][i] for i in kept], np.float32)
    weights = np.array(old["target_weights"], np.float32)
    node = helper.make_node(
        "TreeEnsemble",
        model.graph.node[place].input,
        model.graph.node[place].output,
        domain="ai.onnx.ml",
        n_targets=1,
        tree_roots=[numbers[tree, 0] for tree in sorted(set(old["nodes_treeids"]))],
        nodes_modes=numpy_helper.from_array(np.zeros(len(kept), np.uint8)),
        nodes_featureids=[old["nodes_featureids"][i] for i in kept],
        nodes_splits=numpy_helper.from_array(values),
        leaf_targetids=old["target_ids"],
        leaf_weights=numpy_helper.from_array(weights),
        **links,
    )
    model.graph.node[place].CopyFrom(node)
    next(entry for entry in model.opset_import if entry.domain == "ai.onnx.ml").version = 5
    onnx.save(model, path.with_name("version5.onnx"))
    return path.with_name("version5.onnx")


def test_build_split_probes_of_tree_ensemble_of_version_5_equal_those_of_regressor(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.onnx"
    _, x = exported(*ESTIMATORS["forest, numbers"], path)
    newer = to_tree_ensemble(path)
    answers: list[Any] = [
        OnnxRuntime().run(file, TARGET, ({"x": x},))[0]["variable"] for file in (path, newer)
    ]
    np.testing.assert_allclose(answers[1], answers[0], rtol=1e-6)
    assert has_trees(newer)
    expected, found = build_split_probes(path, {"x": x}), build_split_probes(newer, {"x": x})
    assert expected is not None
    assert found is not None
    assert {tuple(row) for row in found["x"].tolist()} == {
        tuple(row) for row in expected["x"].tolist()
    }


def test_read_trees_of_tree_ensemble_of_version_5_raises_user_error(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    exported(*ESTIMATORS["tree, numbers"], path)
    with pytest.raises(UserError, match="operator TreeEnsemble cannot be read"):
        read_trees(to_tree_ensemble(path))


def test_build_split_probes_of_model_without_trees_returns_none(perceptron: Path) -> None:
    assert build_split_probes(perceptron, rows(4)) is None


def test_build_split_probes_of_trees_behind_unsupported_operator_returns_none(
    forest: tuple[Any, dict[str, Any], Path],
) -> None:
    _, samples, path = forest
    model = onnx.load(path)
    place, first = next(
        (i, n) for i, n in enumerate(model.graph.node) if n.op_type not in ("Cast", "Concat")
    )
    model.graph.node.insert(place, helper.make_node("Sin", [first.input[0]], ["turned"]))
    first.input[0] = "turned"
    onnx.save(model, path)
    assert build_split_probes(path, samples) is None


def test_build_split_probes_with_cycle_returns_probes_and_with_unknown_feature_none(
    forest: tuple[Any, dict[str, Any], Path],
) -> None:
    _, samples, path = forest
    for name, value in (("nodes_truenodeids", 0), ("nodes_featureids", 99)):
        model = onnx.load(path)
        attribute(model, name).ints[1] = value
        onnx.save(model, path.with_name("odd.onnx"))
        probes = build_split_probes(path.with_name("odd.onnx"), samples)
        assert (probes is None) == (name == "nodes_featureids")
