"""Which variant a target gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.analysis.choice import choose
from onnx_ops.domain.gate import Decision, GateResult, Verdict


def decision(
    variant: str, verdict: Verdict, *, faster: bool | None = None, ratio: float | None = None, target: str = "cpu"
) -> Decision:
    result = GateResult(gate="size", metric="", limit="≤ 1 MB", verdict=verdict, reason=f"{variant} is 3 MB")
    return Decision(variant=variant, target=target, results=(result,), faster_than_export=faster, latency_ratio=ratio)


FP32 = decision("fp32", Verdict.PASS)


def test_the_export_stands_unless_a_variant_is_faster_with_confidence() -> None:
    slower = decision("int8", Verdict.PASS, faster=False, ratio=0.9)
    unknown = decision("fp16", Verdict.PASS)
    assert choose([FP32, slower, unknown]).variant == "fp32"
    faster = decision("int4", Verdict.PASS, faster=True, ratio=0.95)
    assert choose([FP32, slower, faster, unknown]).variant == "int4"


def test_the_fastest_wins_and_the_first_of_equals() -> None:
    variants = [
        decision(name, Verdict.PASS, faster=True, ratio=ratio) for name, ratio in [("a", 0.8), ("b", 0.6), ("c", 0.6)]
    ]
    found = choose([FP32, *variants])
    assert (found.variant, found.verdict) == ("b", Verdict.PASS)
    assert "0.6x" in found.reason


def test_a_failing_variant_is_not_chosen_however_fast() -> None:
    assert choose([FP32, decision("int8", Verdict.FAIL, faster=True, ratio=0.1)]).variant == "fp32"


def test_without_a_passing_export_the_fastest_passing_variant_serves() -> None:
    failed = decision("fp32", Verdict.FAIL)
    variants = [decision("a", Verdict.PASS), decision("b", Verdict.PASS, faster=False, ratio=1.1)]
    found = choose([failed, *variants])
    assert found.variant == "b"
    assert "fp32 does not pass" in found.reason


def test_nothing_passes() -> None:
    found = choose([decision("int8", Verdict.FAIL), decision("fp32", Verdict.INCONCLUSIVE)])
    assert (found.variant, found.verdict) == (None, Verdict.FAIL)
    assert found.reason == "fp32 inconclusive: size: fp32 is 3 MB; int8 fail: size: int8 is 3 MB"


@pytest.mark.parametrize("decisions", [[], [FP32, decision("fp32", Verdict.PASS, target="gpu")]])
def test_a_choice_is_about_one_target(decisions: list[Decision]) -> None:
    with pytest.raises(ValueError, match="one target"):
        choose(decisions)


decisions = st.lists(
    st.builds(
        decision,
        st.sampled_from(["fp32", "a", "b"]),
        st.sampled_from(list(Verdict)),
        faster=st.sampled_from([None, True, False]),
        ratio=st.sampled_from([None, 0.5, 1.0, 2.0]),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda d: d.variant,
)


@given(decisions)
def test_only_what_passes_is_chosen_and_silence_never_is(judged: list[Decision]) -> None:
    found = choose(judged)
    passing = {d.variant for d in judged if d.verdict is Verdict.PASS}
    assert (found.variant in passing) if passing else (found.variant is None)
    assert (found.verdict is Verdict.PASS) == bool(passing)
    assert found.reason


@given(decisions)
def test_without_a_pass_the_worst_verdict_is_told(judged: list[Decision]) -> None:
    failed = [d for d in judged if d.verdict is not Verdict.PASS]
    if failed:
        assert choose(failed).verdict.rank == max(d.verdict.rank for d in failed)
