"""The first value that departs, and what the parity gate says of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.evidence import Divergence, Evidence, ParityMeasurement
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.target import HardwareFingerprint
from onnx_ops.statistics.parity import (
    DIVERGENCE_FACTOR,
    LARGEST,
    find_first_divergence,
    find_worst_row,
    is_divergent,
    pick_evenly,
    select_rows,
)
from onnx_ops.statistics.rules.parity import judge_parity
from tests.support.golden import Golden

NAMES = ["a", "b", "c", "d"]
DOUBLE = {name: np.random.default_rng(i).standard_normal((32, 6)) for i, name in enumerate(NAMES)}
SINGLE = {name: array.astype(np.float32) for name, array in DOUBLE.items()}


def test_an_export_that_only_rounds_departs_nowhere() -> None:
    rounded = {name: np.nextafter(array, np.float32(9)) for name, array in SINGLE.items()}
    assert find_first_divergence(NAMES, rounded, SINGLE, DOUBLE) is None
    assert find_first_divergence(NAMES, SINGLE, SINGLE) is None


@pytest.mark.parametrize("double", [DOUBLE, None])
@given(first=st.integers(0, 3))
def test_the_first_in_the_order_given_is_named(double: dict[str, object] | None, first: int) -> None:
    wrong = {name: array + np.float32(0.5 * (i >= first)) for i, (name, array) in enumerate(SINGLE.items())}
    found = find_first_divergence(NAMES, wrong, SINGLE, double)  # type: ignore[arg-type]
    assert found is not None
    assert found.value == NAMES[first]
    assert found.ratio > DIVERGENCE_FACTOR


def test_a_shape_or_a_nan_is_as_far_as_can_be() -> None:
    for wrong in (SINGLE["b"].T, np.full((32, 6), np.nan, dtype=np.float32)):
        found = find_first_divergence(NAMES, SINGLE | {"b": wrong}, SINGLE, DOUBLE)
        assert found is not None
        assert (found.value, found.ratio) == ("b", LARGEST)


def test_ties_and_values_of_one_side_are_passed_over() -> None:
    flags = {"a": SINGLE["a"] > 0}
    assert find_first_divergence(["a", "e"], {"a": ~flags["a"], "e": SINGLE["a"]}, flags) is None


def test_what_is_no_number_has_departed() -> None:
    measured = ParityMeasurement(output="y", group="real", rows=1, error=0.0, noise=0.0, ratio=float("nan"))
    assert is_divergent(measured)


@given(count=st.integers(0, 300), limit=st.integers(1, 64))
def test_names_are_spread_in_order_and_end_with_the_last(count: int, limit: int) -> None:
    names = [str(index) for index in range(count)]
    chosen = pick_evenly(names, limit)
    assert chosen == sorted(set(chosen), key=int)
    assert len(chosen) == min(count, limit)
    assert chosen[-1:] == names[-1:]


@given(count=st.integers(1, 300), worst=st.integers(0, 299))
def test_the_worst_row_is_among_the_few_that_are_looked_at(count: int, worst: int) -> None:
    reference = np.zeros((count, 3), dtype=np.float32)
    onnx = reference.copy()
    onnx[worst % count, 1] = 7.0
    chosen = select_rows(onnx, reference)
    assert worst % count in chosen
    assert len(chosen) <= 32
    assert set(chosen) <= set(range(count))


def test_rows_of_another_shape_are_taken_evenly() -> None:
    assert len(select_rows(np.zeros((3, 4)), np.zeros((100, 4)))) == 31


def reason(divergence: Divergence | None, ratio: float = 5000.0, quantized: bool = False) -> str:
    digest = Digest("sha256:" + "0" * 64)
    measured = ParityMeasurement(output="y", group="real", rows=128, error=ratio * 1e-6, noise=1e-6, ratio=ratio)
    evidence = Evidence(
        pipeline="p",
        variant="v",
        target="cpu",
        quantized=quantized,
        release=digest,
        manifest=digest,
        target_digest=digest,
        dedicated=False,
        size_bytes=1,
        hardware=HardwareFingerprint(
            machine="m", cpu_model="c", cpu_flags=(), cores=1, memory_bytes=1, runtime="r", runtime_version="1"
        ),
        parity=(measured,),
        export_parity=(measured,),
        divergence=divergence,
    )
    result = next(judge_parity(ParityGate(), evidence))
    assert result.verdict is (Verdict.PASS if ratio <= 10 else Verdict.FAIL)
    return result.reason


@pytest.mark.parametrize("quantized", [False, True])
def test_the_reason_ends_with_the_node_and_its_module(quantized: bool) -> None:
    place = Divergence(node="node_conv2d_1", op_type="Conv", scope="features.2", ratio=5e5)
    ending = "; first diverging node: node_conv2d_1 (Conv) in module features.2"
    assert reason(place, quantized=quantized).endswith(ending)
    assert reason(Divergence(node="n", op_type="Gemm", ratio=1e3)).endswith("; first diverging node: n (Gemm)")


def test_the_reason_says_why_no_node_is_named(golden: Golden) -> None:
    golden("reasons", reason(Divergence(note="the source shows\nno intermediate values")))


def test_an_export_that_passes_and_one_never_looked_at_name_no_node() -> None:
    assert "diverging" not in reason(Divergence(node="n", op_type="Conv", ratio=99.0), ratio=3.0)
    assert "diverging" not in reason(None)


def test_the_worst_row_is_the_farthest_and_nan_on_one_side_comes_first() -> None:
    reference = np.array([[1.0, 2.0], [3.0, np.nan], [5.0, np.inf]])
    assert find_worst_row(np.array([[1.0, 2.5], [3.0, np.nan], [5.1, np.inf]]), reference) == 0
    assert find_worst_row(np.array([[1.0, 9.0], [3.0, 1.0], [5.0, np.inf]]), reference) == 1
    assert find_worst_row(np.array(["a", "b"]), np.array(["a", "c"])) == 1
