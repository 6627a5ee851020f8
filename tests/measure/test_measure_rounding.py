"""Parity by column with rounding floors from the graph.

The source runs in two precisions, or two files are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.target import Target
from onnx_ops.measure.parity import measure_parity
from onnx_ops.measure.reference_outputs import ReferenceGroup
from onnx_ops.measure.rounding import measure_roundings
from onnx_ops.ports import Tensors
from onnx_ops.tools.compare import compare
from onnx_ops.tools.model_inputs import shared_inputs
from onnx_ops.tools.supplied_rows import check_samples
from tests.support.graphs import write_graph

Array = npt.NDArray[Any]
TARGET = Target(name="cpu")
LIMIT = ParityGate().noise_factor

ROWS = np.random.default_rng(0).normal(size=(128, 12)).astype(np.float32)
WEIGHT = (np.random.default_rng(1).normal(size=(12, 3)) * [1e3, 1.5, 0.0125]).astype(np.float32)
BIAS = np.array([2e4, 15, 0.3], dtype=np.float32)
HEADS = "(float[N,12] x) => (float[N,3] y) { z = Gemm(x, w, b) y = Mul(z, factors) }"
"""Three heads of 2e4 ± 4e3, 15 ± 6 and .3 ± .05."""


def write_heads(path: Path, head: int = 0, share: float = 0.0) -> Path:
    """Write the three heads; one of them is wrong by `share` of its value."""
    factors = np.ones(3, dtype=np.float32)
    factors[head] += np.float32(share)
    return write_graph(path, HEADS, w=WEIGHT, b=BIAS, factors=factors)


def reference(rows: Array = ROWS, name: str = "real") -> ReferenceGroup:
    exact = rows.astype(np.float64) @ WEIGHT.astype(np.float64) + BIAS
    single = rows @ WEIGHT + BIAS
    return ReferenceGroup(name=name, inputs={"x": rows}, single={"y": single}, double={"y": exact})


GROUPS = [reference(), *(reference(ROWS[:size], f"batches:{size}") for size in (1, 2, 3, 17))]


def test_measure_parity_of_correct_heads_of_different_scale_passes(tmp_path: Path) -> None:
    measured = measure_parity(OnnxRuntime(), write_heads(tmp_path / "m.onnx"), TARGET, GROUPS)
    assert max(m.ratio for m in measured) < LIMIT / 2


@pytest.mark.parametrize("head", range(3))
@pytest.mark.parametrize("share", [0.01, 0.05, 1e-4])
def test_measure_parity_of_wrong_head_exceeds_limit_at_its_scale(
    tmp_path: Path, head: int, share: float
) -> None:
    (measured, *_) = measure_parity(
        OnnxRuntime(), write_heads(tmp_path / "m.onnx", head, share), TARGET, GROUPS
    )
    assert measured.ratio > LIMIT
    assert measured.column == f"column {head}"
    assert [column.column for column in measured.columns] == ["column 0", "column 1", "column 2"]


@pytest.mark.parametrize("head", range(3))
@pytest.mark.parametrize(
    ("share", "verdict"), [(0.05, Verdict.FAIL), (0.01, Verdict.FAIL), (1e-5, Verdict.PASS)]
)
def test_compare_of_two_files_on_supplied_rows_judges_each_head(
    tmp_path: Path, head: int, share: float, verdict: Verdict
) -> None:
    a, b = write_heads(tmp_path / "a.onnx"), write_heads(tmp_path / "b.onnx", head, share)
    samples = check_samples(shared_inputs(a, b), {"x": ROWS}, where="rows", limit=128)
    result = compare(OnnxRuntime(), TARGET, a, b, samples)
    assert result.verdict is verdict
    assert verdict is Verdict.PASS or f"column {head}" in result.reason


RARE = "(float[N,12] x) => (float[N,3] y) { z = Gemm(x, w, b) p = Sigmoid(z) y = Add(p, off) }"


@pytest.mark.parametrize("logit", [-3.0, -7.0, -14.0])
@pytest.mark.parametrize(("error", "is_seen"), [(0.0, False), (8.3e-7, True)])
def test_measure_parity_of_sigmoid_with_rare_events_exceeds_limit_only_with_error(
    tmp_path: Path, logit: float, error: float, *, is_seen: bool
) -> None:
    weight, bias = WEIGHT / np.abs(WEIGHT).max() / 4, np.full(3, logit, dtype=np.float32)
    off = np.array([0, error, 0], dtype=np.float32)
    path = write_graph(tmp_path / "m.onnx", RARE, w=weight, b=bias, off=off)
    exact, single = (
        1 / (1 + np.exp(-(ROWS.astype(t) @ weight.astype(t) + bias.astype(t))))
        for t in (float, "f4")
    )
    group = ReferenceGroup(
        name="real", inputs={"x": ROWS}, single={"y": single}, double={"y": exact}
    )
    (measured,) = measure_parity(OnnxRuntime(), path, TARGET, [group])
    assert (measured.ratio > LIMIT) is is_seen


TOP = "(float[N,12] x) => (float[N,K] v, int64[N,K] i) { v, i = TopK(x, k) }"


@pytest.mark.parametrize(("gap", "is_seen"), [(0.0, False), (1e-3, True)])
def test_measure_parity_of_exchanged_index_fails_unless_scores_tie(
    tmp_path: Path, gap: float, *, is_seen: bool
) -> None:
    rows = ROWS.copy()
    order = np.argsort(-rows, axis=1)
    rows[5, order[5, 1]] = rows[5, order[5, 0]] - np.float32(gap)
    indices = np.argsort(-rows, axis=1, kind="stable")[:, :3]
    # The source has another order of the first two indices.
    indices[5, :2] = indices[5, 1::-1]
    path = write_graph(tmp_path / "m.onnx", TOP, k=np.array([3]))
    group = ReferenceGroup(
        name="real", inputs={"x": rows}, single={"i": indices}, double={"i": indices}
    )
    (measured,) = measure_parity(OnnxRuntime(), path, TARGET, [group])
    assert (measured.ratio > LIMIT) is is_seen


def feeds(rows: Array = ROWS) -> dict[str, tuple[Tensors, ...]]:
    return {"real": ({"x": rows[:64]}, {"x": rows[64:]})}


def test_measure_roundings_of_several_runs_joins_floors(tmp_path: Path) -> None:
    rounding = measure_roundings(OnnxRuntime(), write_heads(tmp_path / "m.onnx"), feeds())["real"][
        "y"
    ]
    assert rounding.floor is not None
    assert rounding.floor.shape == (128, 3)
    assert rounding.floor.max(axis=0) == pytest.approx(np.array([2e4, 15, 0.3]) * 2.0**-23, rel=1)


def test_measure_roundings_of_unsupported_graph_or_rows_returns_nothing(tmp_path: Path) -> None:
    path = write_heads(tmp_path / "m.onnx")
    model = onnx.load(path)
    model.graph.node[0].domain = "own"
    onnx.save(model, path)
    assert measure_roundings(OnnxRuntime(), path, feeds()) == {}
    assert (
        measure_roundings(
            OnnxRuntime(), write_heads(tmp_path / "m.onnx"), {"real": ({"x": ROWS[:, :3]},)}
        )
        == {}
    )


def test_measure_roundings_leaves_model_and_folder_unchanged(tmp_path: Path) -> None:
    path = write_heads(tmp_path / "m.onnx")
    before = path.read_bytes()
    measure_roundings(OnnxRuntime(), path, feeds())
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]
    assert path.read_bytes() == before
