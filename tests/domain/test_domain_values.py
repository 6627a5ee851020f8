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
from onnx_ops.domain.gate import LatencyGate, MetricGate, SizeGate, select_gates
from onnx_ops.domain.release import is_among
from onnx_ops.domain.target import HardwareFingerprint, Target
from tests.support.endpoints import fileless_deployment

verdicts = st.sampled_from(Verdict)
ORDER = (Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.ERROR, Verdict.FAIL)


def result(verdict: Verdict, *, gate: str = "size", advisory: bool = False) -> GateResult:
    return GateResult(
        gate=gate,
        metric="m",
        limit="l",
        verdict=verdict,
        reason=f"{gate} said so",
        advisory=advisory,
    )


def test_verdicts_sort_from_pass_to_fail() -> None:
    shuffled = [Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS, Verdict.ERROR]
    assert sorted(shuffled) == list(ORDER)
    for (i, left), (j, right) in product(enumerate(ORDER), repeat=2):
        assert (left < right) is (i < j)


@pytest.mark.parametrize("verdict", Verdict)
def test_verdict_as_boolean_raises_type_error(verdict: Verdict) -> None:
    with pytest.raises(TypeError, match="compare it"):
        bool(verdict)


def test_verdict_exit_codes_are_0_3_4_and_1() -> None:
    assert [v.exit_code for v in ORDER] == [0, 3, 4, 1]


def test_combine_verdicts_of_empty_list_is_inconclusive() -> None:
    assert combine_verdicts([]) is Verdict.INCONCLUSIVE


@given(st.lists(verdicts, min_size=1), verdicts)
def test_combine_verdicts_returns_worst_in_any_order(some: list[Verdict], another: Verdict) -> None:
    worst = combine_verdicts(some)
    assert worst in some
    assert not any(worst < verdict for verdict in some)
    assert not combine_verdicts([*some, another]) < worst
    assert combine_verdicts(reversed(some)) is worst


@given(st.lists(verdicts, min_size=1), verdicts)
def test_decision_verdict_ignores_advisory_results(
    binding: list[Verdict], advisory: Verdict
) -> None:
    results = (*(result(v) for v in binding), result(advisory, gate="latency", advisory=True))
    decision = Decision(variant="fp32", target="cpu", results=results)
    assert decision.verdict is combine_verdicts(binding)
    assert "latency" not in decision.reason


def test_decision_reason_names_worst_gate() -> None:
    decision = Decision(
        variant="fp32",
        target="cpu",
        results=(result(Verdict.ERROR), result(Verdict.FAIL, gate="parity")),
    )
    assert decision.reason == "parity: parity said so"


def test_decision_without_binding_results_is_inconclusive() -> None:
    decision = Decision(
        variant="fp32", target="cpu", results=(result(Verdict.PASS, advisory=True),)
    )
    assert decision.verdict is Verdict.INCONCLUSIVE
    assert "no binding gate applied" in decision.reason


@pytest.mark.parametrize(
    "weights", [{}, {"a": 99}, {"a": 101}, {"a": 110, "b": -10}, {"a": 50, "b": 51}]
)
def test_traffic_split_with_negative_weight_or_sum_other_than_100_raises_value_error(
    weights: dict[str, int],
) -> None:
    with pytest.raises(ValueError, match="sum to 100"):
        TrafficSplit(weights=weights)


def test_select_gates_with_target_gate_replaces_gates_of_same_kind() -> None:
    size, latency, own = SizeGate(max=9), LatencyGate(p50=1.0), SizeGate(max=1)
    assert select_gates([size, latency], [own]) == (latency, own)
    assert select_gates([size, latency], []) == (size, latency)


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("f1", "average", (None, "micro", "weighted")),
        ("f1", "positive", (None, 0, 1)),
        ("accuracy", "output", (None, "a", "b")),
        ("accuracy", "decode", ("", "m:a", "m:b")),
        ("iou", "ignore", (None, 0, 1)),
        ("top_k", "k", (None, 1, 2)),
        ("ece", "bins", (None, 5, 10)),
        ("ece", "logits", (False, True)),
        ("quantile_loss", "q", (None, 0.1, 0.9)),
        ("map", "iou", (None, 0.5, 0.75)),
        ("map", "max_detections", (None, 1, 10)),
        ("keypoints_ap", "sigmas", (None, (0.05, 0.1), (0.1, 0.05))),
    ],
)
def test_metric_definition_label_differs_for_each_value_of_option(
    name: Any, option: str, values: tuple[Any, ...]
) -> None:
    gates = [MetricGate(name=name, **{option: value}) for value in values]
    assert len({gate.definition().label for gate in gates}) == len(values)


@pytest.mark.parametrize(
    ("user", "users", "expected"),
    [
        ("ann", ("ann",), True),
        ("ann", ("bob",), False),
        ("", ("ann",), False),
        ("", ("",), False),
        ("", ("*",), True),
    ],
)
def test_is_among_accepts_listed_user_but_empty_name_only_with_wildcard(
    user: str, users: tuple[str, ...], expected: bool
) -> None:
    assert is_among(user, users) is expected


def test_endpoint_state_with_repeated_or_missing_deployment_raises_value_error() -> None:
    whole = TrafficSplit(weights={"v1": 100})
    with pytest.raises(ValueError, match="repeat"):
        EndpointState(
            deployments=(fileless_deployment("v1"), fileless_deployment("v1")), split=whole
        )
    with pytest.raises(ValueError, match="missing deployments"):
        EndpointState(deployments=(fileless_deployment("v2"),), split=whole)


def test_endpoint_state_is_equivalent_ignores_only_generation_order_and_zero_weights() -> None:
    one, two = fileless_deployment("v1"), fileless_deployment("v2")
    left = EndpointState(
        deployments=(one, two), split=TrafficSplit(weights={"v1": 100}), generation=3
    )
    right = EndpointState(
        deployments=(two, one), split=TrafficSplit(weights={"v1": 100, "v2": 0}), generation=4
    )
    assert left.is_equivalent(right)
    assert not left.is_equivalent(
        EndpointState(deployments=(one,), split=TrafficSplit(weights={"v1": 100}))
    )
    assert not left.is_equivalent(
        EndpointState(
            deployments=(one, two), split=TrafficSplit(weights={"v1": 90, "v2": 10}), generation=3
        )
    )
    ten, five = (
        EndpointState(
            deployments=(one, two), split=TrafficSplit(weights={"v1": 100}, shadow={"v2": percent})
        )
        for percent in (10, 5)
    )
    assert not left.is_equivalent(ten)
    assert not ten.is_equivalent(five)


@given(st.binary(max_size=200))
def test_digest_bytes_returns_prefixed_sha256(data: bytes) -> None:
    digest = digest_bytes(data)
    assert is_digest(digest)
    assert hex_digits(digest) == hashlib.sha256(data).hexdigest()
    assert hex_digits(digest).startswith(short_digest(digest))


@pytest.mark.parametrize(
    "text", ["", "sha256:", "sha256:" + "g" * 64, "sha256:" + "A" * 64, "a" * 64, "md5:" + "a" * 64]
)
def test_is_digest_of_malformed_text_returns_false(text: str) -> None:
    assert not is_digest(text)


def test_digest_file_matches_digest_of_content(tmp_path: Path) -> None:
    # The content is larger than one block.
    content = bytes(range(256)) * 8192
    (tmp_path / "file").write_bytes(content)
    assert digest_file(tmp_path / "file") == digest_bytes(content)


def test_canonical_json_ignores_order_of_keys() -> None:
    assert (
        canonical_json({"b": 1, "a": "ü"})
        == canonical_json({"a": "ü", "b": 1})
        == '{"a":"ü","b":1}'.encode()
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_canonical_json_of_nonfinite_number_raises_value_error(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": [value]})


A, B = digest_bytes(b"a"), digest_bytes(b"b")
MANIFEST = Manifest(files={"onnx/model.onnx": A, "onnx/weights.bin": B, "lineage.json": B})


def test_manifest_subset_returns_files_below_prefix() -> None:
    assert MANIFEST.subset("onnx/").files == {"model.onnx": A, "weights.bin": B}


def test_manifest_is_mapping_with_sorted_names() -> None:
    assert list(MANIFEST) == ["lineage.json", "onnx/model.onnx", "onnx/weights.bin"]
    assert "lineage.json" in MANIFEST
    assert MANIFEST["lineage.json"] == B


def test_manifest_digest_depends_on_files_but_not_on_their_order() -> None:
    assert (
        MANIFEST.digest() == Manifest(files=dict(reversed(list(MANIFEST.files.items())))).digest()
    )
    assert MANIFEST.digest() != MANIFEST.subset("onnx/").digest()


def test_target_digest_ignores_description_but_not_session_or_dedicated() -> None:
    plain = Target(name="cpu")
    assert Target(name="cpu", description="the old one").digest() == plain.digest()
    assert (
        Target(name="cpu", session=SessionSettings(intra_op_threads=2)).digest() != plain.digest()
    )
    assert Target(name="cpu", dedicated=True).digest() != plain.digest()


def test_target_digest_changes_with_each_session_setting() -> None:
    changes: dict[str, Any] = {
        "intra_op_threads": 2,
        "inter_op_threads": 2,
        "spinning": True,
        "graph_level": "basic",
        "config": {"session.set_denormal_as_zero": "1"},
    }
    assert list(changes) == [field.name for field in fields(SessionSettings)]
    settings = [
        SessionSettings(),
        *(SessionSettings(**{name: value}) for name, value in changes.items()),
    ]
    assert len({Target(name="cpu", session=session).digest() for session in settings}) == len(
        settings
    )


def test_hardware_fingerprint_digest_ignores_order_of_flags_but_not_cores() -> None:
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


@given(
    st.dictionaries(
        st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=5
    )
)
def test_digest_json_of_equal_documents_is_equal(document: dict[str, object]) -> None:
    assert digest_json(document) == digest_json(dict(sorted(document.items(), reverse=True)))
