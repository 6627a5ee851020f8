"""Runs of a system's own code and of the deployed steps on raw inputs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_ops
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.errors import NotFoundError, UserError
from onnx_ops.measure.step_copies import copy_value
from onnx_ops.measure.system_inputs import RawInput, list_raw_inputs
from onnx_ops.measure.system_judgement import SystemJudgement, SystemRequest, judge_system
from onnx_ops.measure.system_parity import System, SystemStep
from onnx_ops.step_recorder import recording_steps
from onnx_ops.tools.compare import REFERENCE

MODEL = '<ir_version: 9, opset_import: ["" : 18]> g (float[N,4] x) => (float[N,4] y) { y = Neg(x) }'


def features(row: Any) -> Any:
    return np.array([[float(part) for part in row["x"]]], np.float32)


def choose(y: Any) -> int:
    return int(np.argmax(y))


def predict(row: Any) -> Any:
    x = onnx_ops.record_step("features", features(row))
    y = onnx_ops.record_step("output", -x)
    return onnx_ops.record_step("choice", choose(y))


def judge(
    folder: Path,
    *,
    count: int = 24,
    source: Callable[..., Any] = predict,
    before: Callable[..., Any] | None = features,
    after: Callable[..., Any] | None = choose,
) -> SystemJudgement:
    model = folder / "model.onnx"
    onnx.save(onnx.parser.parse_model(MODEL), model)
    random = np.random.default_rng(0)
    inputs = [
        RawInput(name=f"rows:{i}", value={"x": random.normal(size=4).tolist()}, form="same")
        for i in range(count)
    ]
    steps = [
        () if function is None else (SystemStep(name=name, reference=name, function=function),)
        for name, function in (("features", before), ("choice", after))
    ]
    runtime = OnnxRuntime()
    system = System(
        predict=source, reference="p:predict", candidate=model, before=steps[0], after=steps[1]
    )
    return judge_system(
        SystemRequest(
            system=system,
            inputs=inputs,
            total=count,
            targets=[REFERENCE],
            runtime=lambda _: runtime,
        )
    )


def results(judgement: SystemJudgement) -> dict[str, GateResult]:
    return {result.metric: result for result in judgement.decisions[0].results}


def test_judge_system_of_equal_systems_passes(tmp_path: Path) -> None:
    judgement = judge(tmp_path)
    assert judgement.verdict is Verdict.PASS
    assert list(results(judgement)) == ["features", "output", "choice", "answer"]


def test_judge_system_with_different_first_step_names_it(tmp_path: Path) -> None:
    judgement = judge(tmp_path, before=lambda row: features(row)[:, ::-1])
    assert (judgement.verdict, judgement.step) == (Verdict.FAIL, "features")
    found = results(judgement)
    # The later steps get the source's value, and agree.
    assert (found["output"].verdict, found["choice"].verdict) == (Verdict.PASS, Verdict.PASS)
    assert judgement.worst is not None


def test_judge_system_with_different_step_after_model_names_it(tmp_path: Path) -> None:
    judgement = judge(tmp_path, after=lambda y: (choose(y) + 1) % 4)
    assert (judgement.verdict, judgement.step) == (Verdict.FAIL, "choice")


def test_judge_system_with_exception_after_difference_fails_at_differing_step(
    tmp_path: Path,
) -> None:
    judgement = judge(tmp_path, before=lambda row: features(row)[:, :3])
    assert (judgement.verdict, judgement.step) == (Verdict.FAIL, "features")
    assert results(judgement)["output"].verdict is Verdict.INCONCLUSIVE


def test_judge_system_of_few_inputs_is_inconclusive(tmp_path: Path) -> None:
    assert judge(tmp_path, count=5).verdict is Verdict.INCONCLUSIVE


def test_judge_system_of_source_with_one_answer_to_all_inputs_is_inconclusive(
    tmp_path: Path,
) -> None:
    def predict_nothing(row: Any) -> Any:
        onnx_ops.record_step("output", -onnx_ops.record_step("features", features(row)))
        return onnx_ops.record_step("choice", [])

    judgement = judge(tmp_path, source=predict_nothing, after=lambda y: [])
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "the same answer to all 24 inputs" in results(judgement)["answer"].reason


def test_judge_system_with_unrecorded_step_is_inconclusive_for_it(tmp_path: Path) -> None:
    def source(row: Any) -> Any:
        return choose(onnx_ops.record_step("output", -features(row)))

    found = results(judge(tmp_path, source=source))
    assert found["features"].verdict is Verdict.INCONCLUSIVE
    assert "record_step('features'" in found["features"].reason
    assert found["choice"].verdict is Verdict.PASS


@pytest.mark.parametrize("which", ["source", "before", "after"])
def test_judge_system_with_error_of_user_code_names_input_and_place(
    tmp_path: Path, which: str
) -> None:
    def fail(value: Any) -> Any:
        raise ValueError("cannot identify the file")

    judgement = judge(tmp_path, **{which: fail})  # type: ignore[arg-type]
    assert judgement.verdict is Verdict.ERROR
    (result,) = judgement.decisions[0].results
    assert "rows:0" in result.reason
    assert "test_measure_system_parity.py:" in result.reason


def test_judge_system_of_random_source_returns_error(tmp_path: Path) -> None:
    random = np.random.default_rng()

    def source(row: Any) -> Any:
        predict(row)
        return float(random.normal())

    found = results(judge(tmp_path, source=source, after=None))
    assert found["source"].verdict is Verdict.ERROR


def test_judge_system_without_declared_steps_uses_recorded_input(tmp_path: Path) -> None:
    def source(row: Any) -> Any:
        return -onnx_ops.record_step("input", features(row))

    assert judge(tmp_path, source=source, before=None, after=None).verdict is Verdict.PASS
    without = results(judge(tmp_path, before=None, after=None))
    assert "recorded no step 'input'" in without["system"].reason


def test_record_step_keeps_copy_in_its_thread_only() -> None:
    value = np.zeros(3)
    assert onnx_ops.record_step("outside", value) is value
    with recording_steps(copy_value) as recording:
        assert onnx_ops.record_step("a", value) is value
        value += 1
        onnx_ops.record_step("a", value)
        other = threading.Thread(target=onnx_ops.record_step, args=("b", value))
        other.start()
        other.join()
    assert list(recording.values) == ["a"]
    assert recording.values["a"].tolist() == [0, 0, 0]
    assert list(recording.repeated) == ["a"]


def test_list_raw_inputs_returns_rows_of_tables_and_files_of_folder(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n', encoding="utf-8")
    (tmp_path / "rows.csv").write_text("a,b\n1,x\n2,y\n", encoding="utf-8")
    (tmp_path / "rows.txt").write_text("one\ntwo\n", encoding="utf-8")
    rows, total = list_raw_inputs(tmp_path / "rows.jsonl", 10)
    assert ([raw.value["a"] for raw in rows], total) == ([1, 2], 2)
    assert rows[1].name.endswith("rows.jsonl:3")
    assert list_raw_inputs(tmp_path / "rows.csv", 1)[0][0].value == {"a": "1", "b": "x"}
    assert [raw.value for raw in list_raw_inputs(tmp_path / "rows.txt", 9)[0]] == ["one", "two"]
    assert len(list_raw_inputs(tmp_path, 9)[0]) == 3


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.png", b"", "the file is empty"),
        ("a.png", b"GIF89a....", "not a png file"),
        ("a.wav", b"RIFF\x00\x00", "cut off"),
    ],
)
def test_list_raw_inputs_of_broken_file_raises_user_error_with_its_path(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        list_raw_inputs(tmp_path, 5)
    assert caught.value.where == str(tmp_path / name)


def test_list_raw_inputs_of_missing_or_malformed_inputs_raises_not_found_or_user_error(
    tmp_path: Path,
) -> None:
    with pytest.raises(NotFoundError):
        list_raw_inputs(tmp_path / "nowhere", 5)
    with pytest.raises(UserError, match="there are no inputs"):
        list_raw_inputs(tmp_path, 5)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"a": 1}) + "\n{oops\n", encoding="utf-8")
    with pytest.raises(UserError, match="not JSON") as caught:
        list_raw_inputs(rows, 5)
    assert caught.value.where.startswith(f"{rows}:2:")
