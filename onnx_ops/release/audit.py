"""Judges a version again from the evidence that is stored, and says whether that is what was signed.

What would lose its approval if a key were trusted no longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onnx_ops import codec
from onnx_ops.attestation import verify_envelope
from onnx_ops.domain.artifact import Digest, digest_bytes
from onnx_ops.domain.decision import Decision, DecisionRecord, SignedDecision
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.gate import Gate
from onnx_ops.domain.release import VersionRecord
from onnx_ops.domain.rollout import format_alias
from onnx_ops.errors import CorruptStateError, DigestMismatchError, InvalidSignatureError, NotFoundError
from onnx_ops.ports import Ports
from onnx_ops.release.decision_policy import is_signed_by
from onnx_ops.release.journal import Journal, list_bound_endpoints, parse_stream_name
from onnx_ops.statistics.judge import judge


@dataclass(frozen=True, slots=True, kw_only=True)
class ReevaluatedDecision:
    """One target's decision, judged again.

    `reproduced` says that the verdicts, of the whole and of each gate, are the signed ones.
    """

    target: str
    decision: Decision
    evidence: Evidence
    signed: SignedDecision
    reproduced: bool
    signature: str


def reevaluate(ports: Ports, model: str, version: str, target: str | None = None) -> tuple[ReevaluatedDecision, ...]:
    """Judge every target of a version again, or one of them.

    Raises:
        NotFoundError: no such version, or no decision for the target.
        DigestMismatchError: the stored evidence is not what was signed.
    """
    record = ports.registry().version(model, version)
    targets = [target] if target is not None else sorted(record.decisions)
    missing = [name for name in targets if name not in record.decisions]
    if missing or not targets:
        known = ", ".join(sorted(record.decisions)) or "none"
        raise NotFoundError(
            f"no decision for target {missing[0] if missing else '(any)'}",
            where=f"{model}/{version}",
            remedy=f"Targets with one: {known}.",
        )
    return tuple(_explain(ports, record, name) for name in targets)


def reevaluate_release(ports: Ports, model: str, version: str) -> dict[str, tuple[ReevaluatedDecision, ...]]:
    """Every judged variant of the release that a version belongs to, by name; the newest version of each counts.

    Raises:
        NotFoundError: no such version, or no decision for any.
        DigestMismatchError: the stored evidence is not what was signed.
    """
    registry = ports.registry()
    release = registry.version(model, version).release
    newest: dict[str, str] = {}
    for one in sorted(registry.versions(model), key=lambda one: int(one.version)):
        if one.release == release and registry.version(model, one.version).decisions:
            newest[one.variant] = one.version
    if not newest:
        raise NotFoundError(
            "no variant of the release has a signed decision",
            where=f"{model}/{version}",
            remedy="Decisions are signed where the settings say `signing = 'auto'` or 'required'.",
        )
    return {variant: reevaluate(ports, model, number) for variant, number in newest.items()}


def _explain(ports: Ports, record: VersionRecord, target: str) -> ReevaluatedDecision:
    signed = record.decisions[target]
    evidence, gates = _basis(ports, record, target)
    decision = judge(gates, evidence)
    return ReevaluatedDecision(
        target=target,
        decision=decision,
        evidence=evidence,
        signed=signed,
        reproduced=(decision.verdict, decision.verdicts) == (signed.record.verdict, signed.record.verdicts),
        signature=_signature(ports, signed),
    )


def load_decision_basis(ports: Ports, record: VersionRecord, target: str) -> tuple[Evidence, tuple[Gate, ...]]:
    """What a version was decided upon and by which gates, if the decision is validly signed and is about its files.

    Raises:
        NotFoundError: there is no decision for the target.
        InvalidSignatureError: nobody who is trusted has signed it.
        DigestMismatchError: it is about other files, or the stored evidence is not what was signed.
    """
    where = f"{record.model}/{record.version}"
    signed = record.decisions.get(target)
    if signed is None:
        remedy = "It serves by an override, which rests on no measurement; run its pipeline for this target."
        raise NotFoundError(f"no decision for target {target}", where=where, remedy=remedy)
    verify_envelope(signed.envelope, DecisionRecord, ports.verifier(), where=where)
    if signed.record.manifest != record.manifest:
        raise DigestMismatchError(
            "the decision is about other files", where=where, remedy="Promote a version that was decided as it is."
        )
    return _basis(ports, record, target)


def _basis(ports: Ports, record: VersionRecord, target: str) -> tuple[Evidence, tuple[Gate, ...]]:
    """The documents behind a signed decision, by the digests that it holds."""
    signed = record.decisions[target].record
    evidence = _document(ports, record, f"evidence/{target}.json", signed.evidence)
    gates = _document(ports, record, f"evidence/{target}.gates.json", signed.gates_digest)
    where = f"evidence of {record.model}/{record.version}"
    return codec.loads(evidence, Evidence, where=where), codec.loads(gates, tuple[Gate, ...])


def _signature(ports: Ports, signed: SignedDecision) -> str:
    try:
        verify_envelope(signed.envelope, DecisionRecord, ports.verifier())
    except InvalidSignatureError as error:
        return f"not valid: {error}"
    return "valid"


def _document(ports: Ports, record: VersionRecord, name: str, digest: Digest) -> bytes:
    """From the store of this machine, else from the registry; either way with the digest that was signed."""
    try:
        return ports.store.read(digest)
    except CorruptStateError:
        data = ports.registry().document(record, name)
    if digest_bytes(data) != digest:
        raise DigestMismatchError(
            f"{name} is not what was signed",
            where=f"{record.model}/{record.version}",
            remedy="The evidence was changed after the decision; run the pipeline again.",
        )
    return data


_ROLES = ("champion", "challenger", "previous")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependent:
    """A version under an alias of a target."""

    model: str
    version: str
    alias: str


def list_dependents(ports: Ports, key: Digest) -> tuple[Dependent, ...]:
    """Versions under guarded aliases whose decision or override this key signed, of every model in the ledger.

    Raises:
        ServiceUnavailableError: the registry does not answer.
    """
    return tuple(one for model, target in sorted(_promoted(ports)) for one in _of(ports, model, target, key))


def _promoted(ports: Ports) -> set[tuple[str, str]]:
    """Every model and target that an endpoint is bound to, or that was promoted without one."""
    configs = [Journal.open(ports, name).config for name in list_bound_endpoints(ports)]
    streams = (parse_stream_name(name) for name in ports.ledger.endpoints())
    return {(config.model, config.target) for config in configs} | {pair for pair in streams if pair is not None}


def _of(ports: Ports, model: str, target: str, key: Digest) -> Iterator[Dependent]:
    aliases = ports.registry().aliases(model)
    for name in (format_alias(role, target) for role in _ROLES):
        if name in aliases and _rests(ports, model, aliases[name], target, key):
            yield Dependent(model=model, version=aliases[name], alias=name)


def _rests(ports: Ports, model: str, version: str, target: str, key: Digest) -> bool:
    try:
        return is_signed_by(ports.registry().version(model, version), target, key, ports.verifier())
    except NotFoundError:  # onnx-ops did not register it, so it has no decision to lose
        return False
