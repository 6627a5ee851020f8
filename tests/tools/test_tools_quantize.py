"""Time estimates of quantized files, and remedies of a search without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.quantization import Budget, FrontierSlot, Role, SearchRecord, Trial
from onnx_ops.errors import MeasurementError
from onnx_ops.measure.variants.search import SearchResult
from onnx_ops.tools.compare import REFERENCE
from onnx_ops.tools.quantize import _replace_closest, _suggest_options, estimate_speedup
from onnx_ops.tools.sample_rows import SampleRows
from tests.support.graphs import write_graph

TRIAL = Trial(recipe="static", size_bytes=1)


class FeedRecorder(OnnxRuntime):
    """A runtime that records the inputs of a benchmark in place of its times."""

    feed: Any = None

    def benchmark(self, models: Any, target: Any, feed: Any, schedule: Any) -> Any:
        self.feed = feed
        raise MeasurementError("no times were measured")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model that rejects every generated value of `parts`."""
    text = (
        "(float[n,4] x, int64 parts) => (float[n,m] y) { shape = Mul(parts, five) "
        "y = Reshape(x, shape) }"
    )
    return write_graph(tmp_path / "m.onnx", text, five=[0, 7])


def test_estimate_speedup_with_rejected_generated_rows_names_judge(model: Path) -> None:
    estimate = estimate_speedup(OnnxRuntime(), REFERENCE, model, model)
    assert "refuses the generated inputs" in estimate.why
    assert "onnx-ops judge A B --only latency" in estimate.why
    assert "--fix" not in estimate.why


def test_estimate_speedup_with_supplied_rows_times_first_row(model: Path) -> None:
    runtime = FeedRecorder()
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    supplied = SampleRows(rows={"x": x}, fixed={"parts": np.array(3)}, batch=0)
    estimate = estimate_speedup(runtime, REFERENCE, model, model, supplied)
    assert estimate.why == "no times were measured"
    np.testing.assert_array_equal(runtime.feed["x"], x[:1])
    assert runtime.feed["parts"] == 3


def make_record(**values: Any) -> SearchRecord:
    return SearchRecord(
        name="best",
        metric="accuracy",
        rows=1,
        export_bytes=1,
        targets=("cpu",),
        budget=Budget(),
        **values,
    )


@pytest.mark.parametrize("has_closest", [False, True])
def test_replace_closest_removes_model_and_weights_of_earlier_search(
    tmp_path: Path, model: Path, has_closest: bool
) -> None:
    path = tmp_path / "best.closest.onnx"
    for earlier in (path, tmp_path / "best.closest.onnx.data"):
        earlier.write_bytes(b"earlier")
    closest = (model, TRIAL) if has_closest else None
    text = _replace_closest(SearchResult(record=make_record(), models={}, closest=closest), path)
    assert bool(text) is has_closest
    assert [one.name for one in tmp_path.glob("best*")] == [path.name] * has_closest
    assert not has_closest or path.read_bytes() == model.read_bytes()


@pytest.mark.parametrize(
    ("role", "trials", "front", "closest", "timed_out", "option"),
    [
        ("fast", (TRIAL,), (0,), TRIAL, True, "--budget max_minutes=…"),
        ("fast", (), (), None, False, "--target NAME"),
        ("fast", (TRIAL,), (), None, False, "Remove this cause"),
        ("fast", (TRIAL,), (0,), TRIAL, False, "--select small"),
        ("small", (TRIAL,), (0,), TRIAL, False, "--budget NAME=…"),
        ("fast", (TRIAL,), (), TRIAL, False, "--budget NAME=…"),
    ],
)
def test_suggest_options_of_search_without_model_returns_remedy_of_its_cause(
    role: Role,
    trials: tuple[Trial, ...],
    front: tuple[int, ...],
    closest: Trial | None,
    timed_out: bool,
    option: str,
) -> None:
    record = make_record(
        trials=trials,
        pareto_front=front,
        slots=(FrontierSlot(role=role, reason="none"),),
        timed_out=timed_out,
    )
    place = None if closest is None else (Path("m.onnx"), closest)
    assert option in _suggest_options(SearchResult(record=record, models={}, closest=place))
