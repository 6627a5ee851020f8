"""The stage that finds the slices of the scored rows, and its place in the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnx_ops import codec
from onnx_ops.adapters.data.file import FileSource
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.gate import SlicesGate
from onnx_ops.domain.pipeline import FileData, Slices
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.errors import ConflictError, UserError
from onnx_ops.measure.slices import get_slicings
from onnx_ops.pipeline.planning import plan
from onnx_ops.pipeline.stages import tags
from onnx_ops.ports import Context
from onnx_ops.testing.fakes import FakeWorld
from tests.pipeline.plan_parts import PIPELINE, TARGETS, TableProbe

KEY = digest_bytes(b"key")
TABLE = "age,country,y\n1,DE,0\n2,AT,1\n3,,0\n"
CODE = """\
def lengths(arrays):
    return {"old": [age > 1 for age in arrays["age"][:, 0]], "none": [None, "x", "y"]}

def short(arrays):
    return {"old": [1]}

def failing(arrays):
    raise ValueError("no such plan")

def listing(arrays):
    return [1, 2, 3]

def ragged(arrays):
    return {"old": [[1], [1, 2], [3]]}

def scalar(arrays):
    return {"old": "yes"}
"""


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    (tmp_path / "rows.csv").write_text(TABLE, encoding="utf-8")
    (tmp_path / "tags.csv").write_text("device\nphone\ntablet\nphone\n", encoding="utf-8")
    (tmp_path / "short.csv").write_text("device\nphone\n", encoding="utf-8")
    (tmp_path / "slice_code.py").write_text(CODE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return replace(FakeWorld().context(root=tmp_path), source=lambda _: FileSource())


def run(context: Context, *by: str, tags_file: str = "", use: str = "", data: str = "") -> Any:
    section = FileData(file="rows.csv", label="y", columns=("age",))
    source = FileSource()
    settings: dict[str, Any] = {
        "section": codec.to_json(section),
        "inputs": [],
        "fingerprint": data or source.fingerprint(section, context.root),
        "by": list(by),
        "tags": tags_file,
        "tags_fingerprint": tags_file
        and source.fingerprint(FileData(file=tags_file), context.root),
        "use": use,
    }
    stage = Stage(id="tags/test", kind=StageKind.TAGS, settings=settings)
    return get_slicings(context.store, tags.execute(stage, KEY, {}, context), 100)


def test_tags_of_column_name_each_value(context: Context) -> None:
    (slicing,) = run(context, "country")
    assert slicing.names == ("country=(missing)", "country=AT", "country=DE")
    assert slicing.numbers.tolist() == [2, 1, 0]


def test_tags_of_file_and_function_join_columns(context: Context) -> None:
    slicings = run(
        context, "device", "old", "none", "country*device", tags_file="tags.csv",
        use="slice_code:lengths",
    )  # fmt: skip
    assert [slicing.names for slicing in slicings] == [
        ("device=phone", "device=tablet"),
        ("old=false", "old=true"),
        ("none=(missing)", "none=x", "none=y"),
        (
            "country=(missing), device=phone",
            "country=AT, device=tablet",
            "country=DE, device=phone",
        ),
    ]


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("short", "has 1 value, and the scored data set has 3 rows"),
        ("failing", "slice_code:failing failed"),
        ("listing", "a mapping whose keys are strings is required"),
        ("ragged", "a column 'old' whose values differ in their shapes"),
        ("scalar", "must have one value per row"),
    ],
)
def test_tags_of_wrong_function_raise_user_error(
    context: Context, function: str, what: str
) -> None:
    with pytest.raises(UserError, match=what):
        run(context, "old", use=f"slice_code:{function}")


def test_tags_of_file_with_other_number_of_rows_raise_user_error(context: Context) -> None:
    with pytest.raises(UserError, match="has 1 value, and the scored data set has 3 rows"):
        run(context, "device", tags_file="short.csv")


def test_tags_of_data_that_changed_after_plan_raise_conflict_error(context: Context) -> None:
    with pytest.raises(ConflictError):
        run(context, "country", data="other")


SLICED = replace(
    PIPELINE,
    slices=Slices(by=("country",), min_rows=80, use="code:find"),
    gates=(*PIPELINE.gates, SlicesGate(name="accuracy", max_drop=0.05)),
)


def test_plan_with_slices_adds_one_stage_that_only_benchmarks_need() -> None:
    before, after = (
        plan(pipeline, TARGETS, TableProbe()).stages for pipeline in (PIPELINE, SLICED)
    )
    assert {one.id for one in after} - {one.id for one in before} == {"tags/test"}
    needing = {stage.kind for stage in after if "tags/test" in stage.needs}
    assert needing == {StageKind.BENCHMARK}
    unchanged = (StageKind.EXPORT, StageKind.TRAIN, StageKind.QUANTIZE)
    assert [one for one in before if one.kind in unchanged] == [
        one for one in after if one.kind in unchanged
    ]


def test_plan_with_slices_writes_min_rows_into_gate() -> None:
    stages = plan(SLICED, TARGETS, TableProbe()).stages
    gates: Any = next(stage for stage in stages if stage.kind is StageKind.GATE).settings["gates"]
    assert [gate["min_rows"] for gate in gates if gate["kind"] == "slices"] == [80]
