"""The fold of the entries of an analyzed rollout."""

from __future__ import annotations

import pytest

from onnx_ops.domain.rollout_analysis import (
    MAX_INTERVALS,
    AnalysisEntry,
    AnalysisPolicy,
    AnalysisStarted,
    AnalysisVerdict,
    CountsRecorded,
    EntryBody,
    RolloutForgotten,
    RolloutKey,
    VerdictKind,
    fold_entries,
)

KEY = RolloutKey(analysis="web", rollout="shop")
STARTED = AnalysisStarted(stable="a", canary="b", policy=AnalysisPolicy())


def make_counts(kind: VerdictKind) -> CountsRecorded:
    return CountsRecorded(step=0, verdict=AnalysisVerdict(verdict=kind, reason=kind))


def fold_bodies(*bodies: EntryBody) -> VerdictKind | None:
    entries = [
        AnalysisEntry(key=KEY, sequence=sequence, at=100.0 * sequence, body=body)
        for sequence, body in enumerate(bodies, start=1)
    ]
    verdict = fold_entries(KEY, entries).verdict
    return None if verdict is None else verdict.verdict


def test_failed_verdict_is_final_within_attempt() -> None:
    fail, passed = make_counts("fail"), make_counts("pass")
    assert fold_bodies(STARTED, passed, fail) == "fail"
    assert fold_bodies(STARTED, fail, passed) == "fail"
    assert fold_bodies(STARTED, fail, RolloutForgotten()) is None
    assert fold_bodies(STARTED, fail, RolloutForgotten(), STARTED, passed) == "pass"


@pytest.mark.parametrize("name", ["shop", "../../etc", "a/b", "n" * 10_000])
def test_folder_of_rollout_with_any_name_contains_analysis_and_hexadecimal_digest(
    name: str,
) -> None:
    folder = RolloutKey(analysis="web", rollout=name).folder
    room, _, digest = folder.partition("/")
    assert (room, len(digest), set(digest) <= set("0123456789abcdef")) == ("web", 32, True)


def test_analysis_policy_of_long_rollout_keeps_number_of_intervals_within_limit() -> None:
    policy = AnalysisPolicy(interval=1.0, max_duration=100_000.0)
    assert policy.max_duration / policy.recording_s <= MAX_INTERVALS
