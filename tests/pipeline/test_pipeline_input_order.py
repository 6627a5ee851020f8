"""Order of inputs and columns in every stage.

It is kept from the pipeline file through plan and store to training, export and scoring.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops import codec
from onnx_ops.adapters.data.file import FileSource
from onnx_ops.domain.artifact import Manifest, ModelInfo, digest_bytes
from onnx_ops.domain.pipeline import DataSection, FileData, Pipeline, PluginData
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.errors import UserError
from onnx_ops.measure.files import FEATURES, arrange_features, get_dataset, put_dataset
from onnx_ops.pipeline.planning import plan
from onnx_ops.pipeline.stages.data import execute
from onnx_ops.ports import Context, Dataset
from onnx_ops.testing.fakes import FakeWorld
from tests.pipeline.plan_parts import PIPELINE, TARGETS, TableProbe

INCOME, AGE = (np.full((3, 1), value, np.float32) for value in (7, 8))


def context(root: Path) -> Context:
    return replace(FakeWorld().context(root=root), source=lambda name: FileSource())


def planned(*sections: DataSection) -> dict[str, Stage]:
    data = dict(zip(("test", "train"), sections, strict=False))
    pipeline: Pipeline = replace(PIPELINE, data=data, quantize=())
    return {stage.id: stage for stage in plan(pipeline, TARGETS, TableProbe()).stages}


def load(root: Path, section: FileData) -> tuple[Manifest, Dataset]:
    """Return the data set as a stage stores it.

    Its settings are canonical JSON from another process, in which keys are sorted.
    """
    world = context(root)
    stage = planned(section)["data/test"]
    settings = {
        **json.loads(codec.dumps(stage.settings)),
        "fingerprint": FileSource().fingerprint(section, root),
    }
    manifest = execute(replace(stage, settings=settings), digest_bytes(b"key"), {}, world)
    return manifest, get_dataset(world.store, manifest)


def test_data_inputs_in_other_order_change_key_and_content(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=INCOME, z=AGE)
    user_first = FileData(file="a.npz", inputs={"user": "a", "item": "z"})
    item_first = FileData(file="a.npz", inputs={"item": "z", "user": "a"})
    keys, contents, orders = set(), set(), []
    for section in (user_first, item_first):
        manifest, dataset = load(tmp_path, section)
        keys.add(planned(section)["data/test"].key({}))
        contents.add(manifest.digest())
        orders.append(list(dataset.inputs))
        np.testing.assert_array_equal(dataset.inputs["user"], INCOME)
    assert orders == [["user", "item"], ["item", "user"]]
    assert (len(keys), len(contents)) == (2, 2)


def test_load_of_table_keeps_column_order(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("income,age,label\n1.5,2.5,0\n3.5,4.5,1\n")
    for columns, expected in ((None, ["income", "age"]), (("age", "income"), ["age", "income"])):
        _, dataset = load(tmp_path, FileData(file="t.csv", label="label", columns=columns))
        assert list(dataset.inputs) == expected
        assert list(dataset.frame().columns) == expected


@pytest.mark.parametrize(
    ("sections", "declared"),
    [
        ([FileData(file="t.csv")], False),
        ([FileData(file="t.csv", columns=("b", "a"))], True),
        ([FileData(file="t.npz", inputs={"b": "x", "a": "y"})], True),
        ([PluginData(source="lake", columns=("b", "a"))], True),
        (
            [
                FileData(file="t.csv", columns=("b", "a")),
                FileData(file="u.csv", columns=("b", "a")),
            ],
            True,
        ),
        (
            [
                FileData(file="t.csv", columns=("b", "a")),
                FileData(file="u.npz", inputs={"b": "x", "a": "y"}),
            ],
            True,
        ),
        (
            [
                FileData(file="t.csv", columns=("b", "a")),
                FileData(file="u.csv", columns=("a", "b")),
            ],
            False,
        ),
        ([FileData(file="t.csv", columns=("b", "a")), FileData(file="u.csv")], False),
    ],
)
def test_export_is_ordered_only_if_all_data_sets_list_same_order(
    sections: list[DataSection], declared: bool
) -> None:
    assert planned(*sections)["export"].settings["ordered"] is declared


def test_arrange_features_restores_column_order_of_training_and_rejects_other_columns(
    tmp_path: Path,
) -> None:
    """Two tables with different column orders give the same matrix."""
    (tmp_path / "train.csv").write_text("income,age,label\n1.5,2.5,0\n")
    (tmp_path / "test.csv").write_text("label,age,income\n0,2.5,1.5\n")
    matrices = {}
    for name in ("train", "test"):
        _, dataset = load(tmp_path, FileData(file=f"{name}.csv", label="label", inputs={"x": "*"}))
        matrices[name] = dataset
    assert matrices["test"].features == {"x": ("age", "income")}
    arranged = arrange_features(matrices["test"], matrices["train"].features)
    np.testing.assert_array_equal(arranged.inputs["x"], matrices["train"].inputs["x"])
    assert arranged.features == matrices["train"].features
    with pytest.raises(UserError, match="it also has 'age'; it lacks 'city'"):
        arrange_features(matrices["test"], {"x": ("city", "income")})


def test_get_dataset_for_export_returns_columns_in_its_order(tmp_path: Path) -> None:
    store = context(tmp_path).store
    rows: dict[str, Any] = {"x": np.array([[1, 2]], np.float32)}
    manifest = put_dataset(store, Dataset(inputs=rows, features={"x": ("age", "income")}))
    info = codec.dumps(
        ModelInfo(ir_version=10, opsets={}, inputs=(), outputs=(), nodes=0, size_bytes=0)
    )
    export = Manifest(
        files={
            "info.json": store.put_bytes(info),
            FEATURES: store.put_bytes(codec.dumps({"x": ("income", "age")})),
        }
    )
    np.testing.assert_array_equal(get_dataset(store, manifest, export).inputs["x"], [[2, 1]])
    np.testing.assert_array_equal(get_dataset(store, manifest).inputs["x"], [[1, 2]])


def test_train_with_differently_ordered_tables_receives_one_order(tmp_path: Path) -> None:
    from onnx_ops.adapters.exporters.sklearn import SklearnExporter
    from onnx_ops.pipeline.stages.train import execute as train

    world = replace(context(tmp_path), exporter=lambda *_: SklearnExporter())
    (tmp_path / "trainer_of_two.py").write_text(
        "def train(data):\n"
        "    assert [rows.inputs['x'].tolist() for rows in data.values()] == [[[1.0, "
        "2.0]]] * 2, data\n"
        "    return 'a model'\n"
    )
    sets = {
        f"data/{name}": put_dataset(
            world.store,
            Dataset(inputs={"x": np.array([values], np.float32)}, features={"x": columns}),
        )
        for name, values, columns in (
            ("a", (1, 2), ("income", "age")),
            ("b", (2, 1), ("age", "income")),
        )
    }
    stage = Stage(
        id="train",
        kind=StageKind.TRAIN,
        settings={"run": "trainer_of_two:train", "with_": {}, "framework": "sklearn"},
    )
    result = train(stage, digest_bytes(b"key"), sets, world)
    assert json.loads(world.store.read(result[FEATURES])) == {"x": ["income", "age"]}
