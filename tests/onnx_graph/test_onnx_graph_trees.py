"""Probes at the splits of a tree ensemble: they tell a moved split, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.target import Target
from onnx_ops.onnx_graph.tree_ensembles import build_split_probes
from onnx_ops.ports import Dataset, ExportRequest
from onnx_ops.testing.models import rows, write_perceptron

TARGET = Target(name="here")


@pytest.fixture(params=["plain", "scaled", "columns"])
def forest(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, dict[str, Any], Path]:
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    draw = np.random.default_rng(0)
    x = (draw.standard_normal((300, 6)) * [1, 5, 0.1, 30, 1, 1] + [0, 9, 2, -40, 0, 1]).astype(np.float32)
    y = (x[:, 0] + x[:, 1] / 5 + draw.standard_normal(300) > 2).astype(int)
    trees = RandomForestClassifier(n_estimators=5, max_depth=5, random_state=0)
    samples: dict[str, Any] = {"x": x}
    if request.param == "columns":  # one of them of whole numbers
        samples = {f"c{place}": x[:, [place]] for place in range(6)}
        samples["c3"] = (100 * samples["c3"]).astype(np.int64)
    model = make_pipeline(StandardScaler(), trees) if request.param == "scaled" else trees
    model.fit(x if "x" in samples else Dataset(inputs=samples).frame(), y)
    path = tmp_path / "forest.onnx"
    section = Export(framework="sklearn", dynamic={name: {0: "batch"} for name in samples})
    SklearnExporter().export(model, ExportRequest(section=section, samples=samples, path=path))
    return model, {name: array[:100] for name, array in samples.items()}, path


def differing(model: Any, probes: Any, path: Path) -> int:
    """Rows whose probabilities are not the source's."""
    found = OnnxRuntime().run(path, TARGET, (probes,))[0]["probabilities"]
    expected: Any = SklearnExporter().reference(model, probes, "float64")
    return int((np.abs(found - expected["probabilities"]).max(axis=1) > 1e-5).sum())


def test_a_good_export_answers_every_probe_like_its_source(forest: tuple[Any, dict[str, Any], Path]) -> None:
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


def test_nearly_every_moved_threshold_is_seen(forest: tuple[Any, dict[str, Any], Path], tmp_path: Path) -> None:
    model, samples, path = forest
    probes = build_split_probes(path, samples)
    correct = onnx.load(path)
    places = [
        place
        for node in correct.graph.node
        for attribute in node.attribute
        if attribute.name == "nodes_modes"
        for place, mode in enumerate(attribute.strings)
        if mode != b"LEAF"
    ]
    seen = 0
    for place in places[::4]:
        moved = onnx.load(path)
        values = next(a for n in moved.graph.node for a in n.attribute if a.name == "nodes_values")
        values.floats[place] += 0.05 * abs(values.floats[place]) + 0.01
        onnx.save(moved, tmp_path / "moved.onnx")
        seen += differing(model, probes, tmp_path / "moved.onnx") > 0
    assert seen >= 0.9 * len(places[::4])


def test_other_models_have_no_splits(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_perceptron(path)
    assert build_split_probes(path, rows(4)) is None


def test_an_ensemble_behind_something_else_is_left_alone(forest: tuple[Any, dict[str, Any], Path]) -> None:
    _, samples, path = forest
    model = onnx.load(path)
    place, first = next((i, n) for i, n in enumerate(model.graph.node) if n.op_type not in ("Cast", "Concat"))
    model.graph.node.insert(place, helper.make_node("Sin", [first.input[0]], ["turned"]))
    first.input[0] = "turned"
    onnx.save(model, path)
    assert build_split_probes(path, samples) is None


def test_a_circle_and_a_feature_out_of_range_are_borne(forest: tuple[Any, dict[str, Any], Path]) -> None:
    _, samples, path = forest
    for name, value in (("nodes_truenodeids", 0), ("nodes_featureids", 99)):
        model = onnx.load(path)
        attribute = next(a for n in model.graph.node for a in n.attribute if a.name == name)
        attribute.ints[1] = value
        onnx.save(model, path.with_name("odd.onnx"))
        probes = build_split_probes(path.with_name("odd.onnx"), samples)
        assert (probes is None) == (name == "nodes_featureids")
