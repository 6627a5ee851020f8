"""Verdicts, decisions, artifacts and endpoint states."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.artifact import (
    Manifest,
    canonical_json,
    digest_bytes,
    digest_file,
    digest_json,
    hex_digits,
    is_digest,
    short_digest,
)
from onnx_ops.domain.decision import Decision, GateResult, Verdict, combine_verdicts
from onnx_ops.domain.endpoint import EndpointState, TrafficSplit
from onnx_ops.domain.execution import SessionSettings
from onnx_ops.domain.gate import LatencyGate, SizeGate, select_gates
from onnx_ops.domain.release import is_among
from onnx_ops.domain.target import HardwareFingerprint, Target
from tests.support.endpoints import fileless_deployment

verdicts = st.sampled_from(Verdict)
ORDER = (Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.ERROR, Verdict.FAIL)


def result(verdict: Verdict, *, gate: str = "size", advisory: bool = False) -> GateResult:
    return GateResult(gate=gate, metric="m", limit="l", verdict=verdict, reason=f"{gate} said so", advisory=advisory)


def test_verdicts_are_ordered_from_pass_to_fail() -> None:
    shuffled = [Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS, Verdict.ERROR]
    assert sorted(shuffled) == list(ORDER)
    for (i, left), (j, right) in product(enumerate(ORDER), repeat=2):
        assert (left < right) is (i < j)


@pytest.mark.parametrize("verdict", Verdict)
def test_a_verdict_has_no_truth_value(verdict: Verdict) -> None:
    with pytest.raises(TypeError, match="compare it"):
        bool(verdict)


def test_exit_codes_of_verdicts() -> None:
    assert [v.exit_code for v in ORDER] == [0, 3, 4, 1]


def test_nothing_combines_to_inconclusive() -> None:
    assert combine_verdicts([]) is Verdict.INCONCLUSIVE


@given(st.lists(verdicts, min_size=1), verdicts)
def test_combining_takes_the_worst_and_more_never_improves_it(some: list[Verdict], another: Verdict) -> None:
    worst = combine_verdicts(some)
    assert worst in some
    assert not any(worst < verdict for verdict in some)
    assert not combine_verdicts([*some, another]) < worst
    assert combine_verdicts(reversed(some)) is worst


@given(st.lists(verdicts, min_size=1), verdicts)
def test_advisory_results_never_enter_a_decision(binding: list[Verdict], advisory: Verdict) -> None:
    results = (*(result(v) for v in binding), result(advisory, gate="latency", advisory=True))
    decision = Decision(variant="fp32", target="cpu", results=results)
    assert decision.verdict is combine_verdicts(binding)
    assert "latency" not in decision.reason


def test_a_decision_names_the_gate_that_was_worst() -> None:
    decision = Decision(
        variant="fp32", target="cpu", results=(result(Verdict.ERROR), result(Verdict.FAIL, gate="parity"))
    )
    assert decision.reason == "parity: parity said so"


def test_a_decision_without_binding_results_is_inconclusive_and_says_so() -> None:
    decision = Decision(variant="fp32", target="cpu", results=(result(Verdict.PASS, advisory=True),))
    assert decision.verdict is Verdict.INCONCLUSIVE
    assert "nothing was judged" in decision.reason


@pytest.mark.parametrize("weights", [{}, {"a": 99}, {"a": 101}, {"a": 110, "b": -10}, {"a": 50, "b": 51}])
def test_traffic_that_does_not_sum_to_100_is_refused(weights: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="sum to 100"):
        TrafficSplit(weights=weights)


def test_gates_of_a_target_replace_those_of_the_same_kind() -> None:
    size, latency, own = SizeGate(max=9), LatencyGate(p50=1.0), SizeGate(max=1)
    assert select_gates([size, latency], [own]) == (latency, own)
    assert select_gates([size, latency], []) == (size, latency)


@pytest.mark.parametrize(
    ("user", "users", "expected"),
    [("ann", ("ann",), True), ("ann", ("bob",), False), ("", ("ann",), False), ("", ("",), False), ("", ("*",), True)],
)
def test_a_user_who_is_not_known_is_among_everyone_only(user: str, users: tuple[str, ...], expected: bool) -> None:
    assert is_among(user, users) is expected


def test_endpoint_states_are_consistent() -> None:
    whole = TrafficSplit(weights={"v1": 100})
    with pytest.raises(ValueError, match="repeat"):
        EndpointState(deployments=(fileless_deployment("v1"), fileless_deployment("v1")), split=whole)
    with pytest.raises(ValueError, match="do not exist"):
        EndpointState(deployments=(fileless_deployment("v2"),), split=whole)


def test_states_are_compared_by_content_not_by_generation_or_order() -> None:
    one, two = fileless_deployment("v1"), fileless_deployment("v2")
    left = EndpointState(deployments=(one, two), split=TrafficSplit(weights={"v1": 100}), generation=3)
    right = EndpointState(deployments=(two, one), split=TrafficSplit(weights={"v1": 100, "v2": 0}), generation=4)
    assert left.is_equivalent(right)
    assert not left.is_equivalent(EndpointState(deployments=(one,), split=TrafficSplit(weights={"v1": 100})))
    assert not left.is_equivalent(
        EndpointState(deployments=(one, two), split=TrafficSplit(weights={"v1": 90, "v2": 10}), generation=3)
    )
    ten, five = (
        EndpointState(deployments=(one, two), split=TrafficSplit(weights={"v1": 100}, shadow={"v2": percent}))
        for percent in (10, 5)
    )
    assert not left.is_equivalent(ten)
    assert not ten.is_equivalent(five)


@given(st.binary(max_size=200))
def test_digests_are_sha256_with_a_prefix(data: bytes) -> None:
    digest = digest_bytes(data)
    assert is_digest(digest)
    assert hex_digits(digest) == hashlib.sha256(data).hexdigest()
    assert hex_digits(digest).startswith(short_digest(digest))


@pytest.mark.parametrize(
    "text", ["", "sha256:", "sha256:" + "g" * 64, "sha256:" + "A" * 64, "a" * 64, "md5:" + "a" * 64]
)
def test_what_is_no_digest(text: str) -> None:
    assert not is_digest(text)


def test_a_file_has_the_digest_of_its_content(tmp_path: Path) -> None:
    content = bytes(range(256)) * 8192  # more than one block
    (tmp_path / "file").write_bytes(content)
    assert digest_file(tmp_path / "file") == digest_bytes(content)


def test_canonical_json_does_not_depend_on_the_order_of_keys() -> None:
    assert canonical_json({"b": 1, "a": "ü"}) == canonical_json({"a": "ü", "b": 1}) == '{"a":"ü","b":1}'.encode()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_canonical_json_refuses_what_json_cannot_say(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": [value]})


def test_manifests() -> None:
    a, b = digest_bytes(b"a"), digest_bytes(b"b")
    manifest = Manifest(files={"onnx/model.onnx": a, "onnx/weights.bin": b, "lineage.json": b})
    assert manifest.subset("onnx/").files == {"model.onnx": a, "weights.bin": b}
    assert list(manifest) == ["lineage.json", "onnx/model.onnx", "onnx/weights.bin"]
    assert "lineage.json" in manifest
    assert manifest["lineage.json"] == b
    assert manifest.digest() == Manifest(files=dict(reversed(list(manifest.files.items())))).digest()
    assert manifest.digest() != manifest.subset("onnx/").digest()


def test_the_description_of_a_target_is_no_part_of_its_digest() -> None:
    plain = Target(name="cpu")
    assert Target(name="cpu", description="the old one").digest() == plain.digest()
    assert Target(name="cpu", session=SessionSettings(intra_op_threads=2)).digest() != plain.digest()
    assert Target(name="cpu", dedicated=True).digest() != plain.digest()


def test_every_session_setting_changes_the_digest_of_a_target() -> None:
    changes: dict[str, Any] = {
        "intra_op_threads": 2,
        "inter_op_threads": 2,
        "spinning": True,
        "graph_level": "basic",
        "config": {"session.set_denormal_as_zero": "1"},
    }
    assert list(changes) == [field.name for field in fields(SessionSettings)]
    settings = [SessionSettings(), *(SessionSettings(**{name: value}) for name, value in changes.items())]
    assert len({Target(name="cpu", session=session).digest() for session in settings}) == len(settings)


def test_a_fingerprint_does_not_depend_on_the_order_of_flags() -> None:
    def of(*flags: str, cores: int = 2) -> HardwareFingerprint:
        return HardwareFingerprint(
            machine="x86_64",
            cpu_model="m",
            cpu_flags=flags,
            cores=cores,
            memory_bytes=1 << 30,
            runtime="onnxruntime",
            runtime_version="1",
        )

    assert of("avx2", "avx512f").digest() == of("avx512f", "avx2").digest()
    assert of("avx2").digest() != of("avx2", cores=4).digest()


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=5))
def test_equal_documents_have_equal_digests(document: dict[str, object]) -> None:
    assert digest_json(document) == digest_json(dict(sorted(document.items(), reverse=True)))
