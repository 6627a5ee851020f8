"""Tables, from their file to an export, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops import codec
from onnx_ops.adapters.data.file import FileSource
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.artifact import Manifest, ModelInfo, digest_bytes
from onnx_ops.domain.pipeline import Export, FileData
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.errors import ConflictError, UserError
from onnx_ops.measure.files import get_dataset
from onnx_ops.pipeline.stages import data, export, train
from onnx_ops.ports import Context, Dataset
from onnx_ops.testing.fakes import FakeWorld

pytest.importorskip("pyarrow")

TABLE = "customer,age,visits,city,y\nc,40.5,3,Oslo,1\na,,4,,0\nc,20,5,Rome,1\n"
KEY = digest_bytes(b"key")
CODE = """
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

def train(data):
    columns = ColumnTransformer([("numbers", SimpleImputer(), ["visits"])])
    return make_pipeline(columns, LogisticRegression()).fit(data["train"].frame(), data["train"].label)
"""  # noqa: E501


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return replace(
        FakeWorld().context(root=tmp_path),
        source=lambda _: FileSource(),
        exporter=lambda *_: SklearnExporter(),
        runtime=lambda _: OnnxRuntime(),
    )


def load(context: Context, text: str, *, later: str | None = None, **section: Any) -> Manifest:
    """Load a table that was planned as `text`.

    If `later` is given, it is the table's text when it is loaded.
    """
    (context.root / "rows.csv").write_text(text, encoding="utf-8")
    rows = FileData(file="rows.csv", label="y", **section)
    settings: dict[str, Any] = {
        "section": codec.to_json(rows),
        "inputs": list(rows.inputs),
        "fingerprint": FileSource().fingerprint(rows, context.root),
    }
    if later is not None:
        (context.root / "rows.csv").write_text(later, encoding="utf-8")
    return data.execute(
        Stage(id="data/train", kind=StageKind.DATA, settings=settings), KEY, {}, context
    )


def test_load_table_that_changed_after_plan_raises_conflict_error(context: Context) -> None:
    with pytest.raises(ConflictError, match="changed after the run was planned"):
        load(context, TABLE, later=TABLE + "\n")


def test_load_table_makes_one_input_per_column_except_label_and_group(context: Context) -> None:
    rows = get_dataset(context.store, load(context, TABLE, group="customer"))

    assert list(rows.frame().columns) == ["age", "visits", "city"]
    assert rows.inputs["city"].tolist() == [["Oslo"], [""], ["Rome"]]
    assert rows.label is not None
    assert rows.label.tolist() == [1, 0, 1]
    assert rows.group is not None
    assert rows.group[0] == rows.group[2] != rows.group[1]


def test_load_table_with_columns_returns_only_those_columns(context: Context) -> None:
    rows = get_dataset(context.store, load(context, TABLE, columns=("visits",)))

    assert set(rows.inputs) == {"visits"}


def test_load_table_with_star_joins_columns(context: Context) -> None:
    rows = get_dataset(
        context.store, load(context, TABLE, columns=("age", "visits"), inputs={"x": "*"})
    )

    np.testing.assert_array_equal(
        rows.inputs["x"], np.array([[40.5, 3], [np.nan, 4], [20, 5]], np.float32)
    )


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"inputs": {"x": "*"}}, "column 'customer' does not fit into a matrix of numbers"),
        ({"columns": ("agee",)}, "Did you mean 'age'?"),
        ({"group": "age"}, "none of them missing"),
    ],
)
def test_load_table_with_unfit_or_unknown_column_raises_user_error(
    context: Context, section: Mapping[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        load(context, TABLE, **section)

    assert words in str(caught.value)


def test_dataset_frame_of_matrix_raises_user_error() -> None:
    with pytest.raises(UserError, match=r"input 'x' is not a column: it is of shape \(2, 3\)"):
        Dataset(inputs={"x": np.zeros((2, 3), np.float32)}).frame()


@pytest.fixture
def exported(context: Context) -> Callable[[str, str], Manifest]:
    """Return a function that trains on one table and exports with the rows of another."""

    def make(trained: str, tested: str) -> Manifest:
        (context.root / "user_table.py").write_text(CODE, encoding="utf-8")
        settings: dict[str, Any] = {"run": "user_table:train", "with_": {}, "framework": "sklearn"}
        stage = Stage(id="train", kind=StageKind.TRAIN, settings=settings)
        model = train.execute(stage, KEY, {"data/train": load(context, trained)}, context)
        settings = {
            "section": codec.to_json(Export(framework="sklearn")),
            "limit": 10,
            "data": "test",
            "inputs": {},
            "source_time": 5.0,
            "ordered": False,
            "pipeline": "p",
        }
        stage = Stage(id="export", kind=StageKind.EXPORT, settings=settings)
        return export.execute(
            stage, KEY, {"train": model, "data/test": load(context, tested)}, context
        )

    return make


WHOLE, HOLED = "visits,y\n3,1\n4,0\n5,1\n", "visits,y\n3,1\n,0\n5,1\n"


@pytest.mark.parametrize(
    ("trained", "tested", "dtype"),
    [(WHOLE, WHOLE, "int64"), (HOLED, WHOLE, "float32"), (WHOLE, HOLED, "float32")],
)
def test_export_of_table_expects_float32_only_with_missing_cells(
    context: Context,
    exported: Callable[[str, str], Manifest],
    trained: str,
    tested: str,
    dtype: str,
) -> None:
    manifest = exported(trained, tested)

    (taken,) = codec.loads(context.store.read(manifest["info.json"]), ModelInfo).inputs
    assert (taken.name, taken.dtype) == ("visits", dtype)
    rows = get_dataset(context.store, load(context, tested), manifest)
    assert rows.inputs["visits"].dtype == dtype


def test_get_dataset_with_missing_cells_for_int64_model_raises_user_error(
    context: Context, exported: Callable[[str, str], Manifest]
) -> None:
    manifest = exported(WHOLE, WHOLE)

    with pytest.raises(
        UserError,
        match="column 'visits' has floats, but the model expects int64",
    ):
        get_dataset(context.store, load(context, HOLED), manifest)
