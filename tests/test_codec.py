"""Domain values to JSON and back, without loss or guesses.

Each value has one byte string.
"""

from __future__ import annotations

import json
from typing import Any, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, Manifest, ModelInfo, TensorSpec
from onnx_ops.domain.attestation import Attested, Envelope, SignedOverride
from onnx_ops.domain.decision import Decision, DecisionRecord, GateResult, SignedDecision, Verdict
from onnx_ops.domain.endpoint import Deployment, EndpointConfig, EndpointState, TrafficSplit
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.gate import Gate, LatencyGate, MetricGate, ParityGate, SizeGate, TargetGate
from onnx_ops.domain.ledger import EntryBody, LedgerEntry, ReleaseState
from onnx_ops.domain.plan import Stage, StageKind, StageOutcome
from onnx_ops.domain.release import Choice, Lineage, Registration, VersionRecord
from onnx_ops.domain.rollout import Action, Roles
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.domain.target import Target
from onnx_ops.errors import CorruptStateError

text = st.text(max_size=6)
digests = st.integers(0, 2**64).map(lambda n: Digest(f"sha256:{n:064x}"))
numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | numbers | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=3,
)
splits = st.integers(0, 100).map(lambda n: TrafficSplit(weights={"a": n, "b": 100 - n}))
deployments = st.builds(
    Deployment,
    name=text,
    model=text,
    version=text,
    variant=text,
    release=digests,
    manifest=digests,
    location=text,
)


@st.composite
def states(draw: st.DrawFn) -> EndpointState:
    pair = [draw(deployments) for _ in "ab"]
    return EndpointState(
        deployments=tuple(
            Deployment(
                **{f: getattr(d, f) for f in Deployment.__dataclass_fields__} | {"name": name}
            )
            for d, name in zip(pair, "ab", strict=True)
        ),
        split=draw(splits),
        generation=draw(st.integers(0, 1000)),
    )


def attested(kind: Any) -> st.SearchStrategy[Any]:
    (record,) = get_args(kind)
    return st.builds(Attested, record=st.from_type(record), envelope=st.from_type(Envelope))


st.register_type_strategy(Attested, attested)
for kind, strategy in (
    (Deployment, deployments),
    (TrafficSplit, splits),
    (EndpointState, states()),
    (
        EndpointConfig,
        st.builds(EndpointConfig, options=st.dictionaries(text, json_values, max_size=2)),
    ),
    (TargetGate, st.sampled_from(list(TargetGate.members().values())).flatmap(st.from_type)),
    (float, numbers),
    (str, text),
):
    st.register_type_strategy(kind, strategy)

TYPES = (
    Manifest,
    TensorSpec,
    ModelInfo,
    EndpointState,
    EndpointConfig,
    Target,
    Evidence,
    GateResult,
    Decision,
    DecisionRecord,
    SignedDecision,
    SignedOverride,
    RolloutPolicy,
    Roles,
    Action,
    *get_args(EntryBody),
    LedgerEntry,
    ReleaseState,
    StageOutcome,
    Lineage,
    VersionRecord,
    Choice,
    Registration,
)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    return st.deferred(lambda: st.from_type(kind))


@pytest.mark.filterwarnings("ignore:Ignoring unsupported Unit")
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_codec_round_trip_returns_equal_value(kind: type[Any], data: st.DataObject) -> None:
    value = data.draw(values_of(kind))
    written = codec.dumps(value)
    read = codec.loads(written, kind)
    assert read == value
    assert type(read) is (get_origin(kind) or kind)
    assert codec.dumps(read) == written
    assert codec.from_json(codec.to_json(value), kind) == value


@settings(max_examples=30, deadline=None)
@given(settings_=st.dictionaries(text, json_values, max_size=3))
def test_codec_of_stage_keeps_settings_of_any_json(settings_: dict[str, Any]) -> None:
    stage = Stage(id="train", kind=StageKind.TRAIN, settings=settings_)
    read = codec.loads(codec.dumps(stage), Stage)
    assert read.settings == settings_
    assert read.key({}) == codec.loads(codec.dumps(read), Stage).key({})


GATES = (
    ParityGate(noise_factor=5.0),
    MetricGate(max_drop=0.01),
    LatencyGate(p99=0.005, max_regression=None),
    SizeGate(max=2_000_000),
)


def test_codec_of_gates_distinguishes_them_by_kind() -> None:
    written = codec.dumps(GATES)
    assert codec.loads(written, tuple[Gate, ...]) == GATES
    assert [document["kind"] for document in json.loads(written)] == [
        "parity",
        "metric",
        "latency",
        "size",
    ]


def test_codec_dumps_returns_canonical_bytes() -> None:
    manifest = Manifest(files={"b": Digest("sha256:2"), "a": Digest("sha256:1")})
    assert codec.dumps(manifest) == b'{"files":{"a":"sha256:1","b":"sha256:2"}}'
    assert codec.dumps(frozenset({"b", "a"})) == b'["a","b"]'
    assert codec.dumps({"verdict": Verdict.PASS, "drop": 0.01}) == b'{"drop":0.01,"verdict":"pass"}'


RESULT = {"gate": "size", "metric": "m", "limit": "l", "verdict": "pass", "reason": "r"}


def test_codec_from_json_of_valid_result_document_succeeds() -> None:
    assert codec.from_json(RESULT, GateResult).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"gate": 3}, "$.gate"),
        ({"gate": None}, "$.gate"),
        ({"estimate": "1.0"}, "$.estimate"),
        ({"estimate": True}, "$.estimate"),
        ({"n": 1.5}, "$.n"),
        ({"n": True}, "$.n"),
        ({"n": None}, "$.n"),
        ({"advisory": 1}, "$.advisory"),
        ({"verdict": "passed"}, "$.verdict"),
        ({"unknown": 1}, "unknown"),
    ],
    ids=str,
)
def test_codec_from_json_of_wrong_member_raises_corrupt_state_error_with_path(
    change: dict[str, Any], path: str
) -> None:
    with pytest.raises(CorruptStateError) as caught:
        codec.from_json({**RESULT, **change}, GateResult, where="the file")
    assert path in caught.value.why
    assert caught.value.where == "the file"


@pytest.mark.parametrize("missing", RESULT)
def test_codec_from_json_without_key_raises_corrupt_state_error_naming_it(missing: str) -> None:
    with pytest.raises(CorruptStateError) as caught:
        codec.from_json({key: value for key, value in RESULT.items() if key != missing}, GateResult)
    assert missing in caught.value.why


def test_codec_from_json_of_nested_error_gives_full_path() -> None:
    document = {"variant": "v", "target": "t", "results": [RESULT, {**RESULT, "reason": []}]}
    with pytest.raises(CorruptStateError) as caught:
        codec.from_json(document, Decision)
    assert "$.results[1].reason" in caught.value.why


@pytest.mark.parametrize(
    "document", [None, [], "size", 3, {"kind": "speed"}, {"max": 3}, {"kind": ["size"], "max": 3}]
)
def test_codec_from_json_of_invalid_gate_raises_corrupt_state_error(document: Any) -> None:
    with pytest.raises(CorruptStateError):
        codec.from_json([document], tuple[Gate, ...])


def test_codec_loads_of_invalid_traffic_split_raises_corrupt_state_error() -> None:
    with pytest.raises(CorruptStateError) as caught:
        codec.loads(b'{"weights":{"a":99}}', TrafficSplit)
    assert "sum to 100" in caught.value.why


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_codec_dumps_of_nonfinite_number_raises_value_error(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        codec.dumps(
            GateResult(
                gate="g", metric="m", limit="l", verdict=Verdict.PASS, reason="r", estimate=value
            )
        )


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_codec_loads_of_nonfinite_number_raises_corrupt_state_error(number: str) -> None:
    document = json.dumps(RESULT)[:-1] + f', "estimate": {number}}}'
    with pytest.raises(CorruptStateError):
        codec.loads(document.encode(), GateResult)
    with pytest.raises(CorruptStateError):
        codec.loads(f'{{"kind":"parity","noise_factor":{number}}}'.encode(), ParityGate)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":1}x', b"9" * 10_000]
)
def test_codec_loads_of_invalid_json_raises_corrupt_state_error(data: bytes) -> None:
    with pytest.raises(CorruptStateError):
        codec.loads(data, Manifest, where="somewhere")


@pytest.mark.parametrize(
    "data", [b"[]", b'"stable"', b"1", b"null", b'{"stable": 5}', b'{"stable": null, "extra": 1}']
)
def test_codec_loads_of_json_without_valid_roles_raises_corrupt_state_error(data: bytes) -> None:
    with pytest.raises(CorruptStateError):
        codec.loads(data, Roles)
