"""Audit signed decisions, and the versions that depend on a signing key.

Decisions are re-evaluated from stored evidence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onnx_ops import codec
from onnx_ops.attestation import verify_envelope
from onnx_ops.domain.artifact import Digest, digest_bytes
from onnx_ops.domain.decision import Decision, DecisionRecord, SignedDecision
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.gate import Gate
from onnx_ops.domain.quantities import OMIT_DEFAULT
from onnx_ops.domain.release import VersionRecord
from onnx_ops.domain.rollout import format_alias
from onnx_ops.errors import (
    CorruptStateError,
    DigestMismatchError,
    InvalidSignatureError,
    NotFoundError,
)
from onnx_ops.ports import Context
from onnx_ops.release.decision_policy import is_signed_by
from onnx_ops.release.journal import list_bound_endpoints, parse_stream_name
from onnx_ops.statistics.judge import judge


@dataclass(frozen=True, slots=True, kw_only=True)
class ReevaluatedDecision:
    """A re-evaluated decision about one target.

    `reproduced` is true if all verdicts equal the signed verdicts. `signature` is `valid`, or the
    reason why the signature is not valid.
    """

    target: str
    decision: Decision
    evidence: Evidence
    signed: SignedDecision
    reproduced: bool
    signature: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependent:
    """A version that depends on a signing key, and what refers to the version.

    This is an alias, or an endpoint that serves the version or can roll back to it.
    """

    model: str
    version: str
    alias: str = field(default="", metadata=OMIT_DEFAULT)
    endpoint: str = field(default="", metadata=OMIT_DEFAULT)


def reevaluate(
    context: Context, model: str, version: str, target: str | None = None
) -> tuple[ReevaluatedDecision, ...]:
    """Re-evaluate the decisions of a version, for one target or for all targets.

    Raises:
        NotFoundError: the version or its decision for the target does not exist.
        DigestMismatchError: the stored evidence differs from the signed evidence.
        UserError: the file of a trusted key cannot be read, or contains another kind of key.
    """
    record = context.registry().version(model, version)
    targets = [target] if target is not None else sorted(record.decisions)
    missing = [name for name in targets if name not in record.decisions]
    if missing or not targets:
        known = ", ".join(sorted(record.decisions)) or "none"
        raise NotFoundError(
            f"there is no decision for target {missing[0]}"
            if missing
            else "the version has no signed decision",
            where=f"{model}/{version}",
            remedy=f"Targets with a decision: {known}.",
        )
    reevaluated: list[ReevaluatedDecision] = []
    for name in targets:
        signed = record.decisions[name]
        evidence, gates = _load_documents(context, record, name)
        decision = judge(gates, evidence)
        try:
            verify_envelope(signed.envelope, DecisionRecord, context.verifier())
            signature = "valid"
        except InvalidSignatureError as error:
            signature = f"not valid: {error}"
        reevaluated.append(
            ReevaluatedDecision(
                target=name,
                decision=decision,
                evidence=evidence,
                signed=signed,
                reproduced=(decision.verdict, decision.verdicts)
                == (signed.record.verdict, signed.record.verdicts),
                signature=signature,
            )
        )
    return tuple(reevaluated)


def reevaluate_release(
    context: Context, model: str, version: str
) -> dict[str, tuple[ReevaluatedDecision, ...]]:
    """Re-evaluate all variants of the release that a version belongs to.

    For each variant, the newest version with decisions is re-evaluated.

    Returns:
        The re-evaluated decisions by variant.

    Raises:
        NotFoundError: the version does not exist, or all variants lack a decision.
        DigestMismatchError: the stored evidence differs from the signed evidence.
    """
    registry = context.registry()
    release = registry.version(model, version).release
    newest: dict[str, str] = {}
    for listed in sorted(registry.versions(model), key=lambda listed: int(listed.version)):
        if listed.release == release and registry.version(model, listed.version).decisions:
            newest[listed.variant] = listed.version
    if not newest:
        raise NotFoundError(
            "no variant of the release has a signed decision",
            where=f"{model}/{version}",
            why="no benchmark of this release was judged",
            remedy="Remove the errors of its benchmark stages, and run its pipeline again.",
        )
    return {variant: reevaluate(context, model, number) for variant, number in newest.items()}


def load_decision_basis(
    context: Context, record: VersionRecord, target: str
) -> tuple[Evidence, tuple[Gate, ...]]:
    """Return the evidence and gates of a version's decision.

    The decision must be validly signed, and be about the version's files.

    Raises:
        NotFoundError: there is no decision for the target.
        InvalidSignatureError: no trusted key has signed the decision.
        UserError: the file of a trusted key cannot be read, or contains another kind of key.
        DigestMismatchError: the decision is about other files, or the stored evidence differs from
            the signed evidence.
    """
    where = f"{record.model}/{record.version}"
    signed = record.decisions.get(target)
    if signed is None:
        remedy = (
            "Run its pipeline for this target. An override permits a version without measurements."
        )
        raise NotFoundError(f"there is no decision for target {target}", where=where, remedy=remedy)
    verify_envelope(signed.envelope, DecisionRecord, context.verifier(), where=where)
    if signed.record.manifest != record.manifest:
        remedy = "Promote a version whose decision names its files."
        raise DigestMismatchError("the decision is about other files", where=where, remedy=remedy)
    return _load_documents(context, record, target)


def list_dependents(context: Context, key: Digest) -> tuple[Dependent, ...]:
    """Return the versions that depend on a signing key, of models in the ledger.

    A version depends on the key if the key signed its decision or override for a target. In
    addition, an alias of this target (champion, challenger or previous) must point to the version.

    Raises:
        CorruptStateError: the ledger of an endpoint is damaged.
        ServiceUnavailableError, MissingPackageError: the registry does not answer, or its client
            package is missing.
    """
    configs = [context.ledger.state(name).config for name in list_bound_endpoints(context)]
    pairs = {(config.model, config.target) for config in configs if config is not None}
    pairs |= {
        pair for name in context.ledger.endpoints() if (pair := parse_stream_name(name)) is not None
    }
    dependents: list[Dependent] = []
    for model, target in sorted(pairs):
        registry, verifier = context.registry(), context.verifier()
        aliases = registry.aliases(model)
        for name in (format_alias(role, target) for role in ("champion", "challenger", "previous")):
            try:
                if name in aliases and is_signed_by(
                    registry.version(model, aliases[name]), target, key, verifier
                ):
                    dependents.append(Dependent(model=model, version=aliases[name], alias=name))
            except NotFoundError:
                # Only versions that onnx-ops registered have decisions.
                continue
    return tuple(dependents)


def list_deployed_dependents(context: Context, key: Digest) -> tuple[Dependent, ...]:
    """Return the versions of endpoints whose decision or override the key signed.

    These are the stable, previous and candidate versions. The ledger contains the signature with
    which a version was deployed. A restarted server loads the version only if it trusts that key.

    Raises:
        CorruptStateError: the ledger of an endpoint is damaged.
    """
    dependents = []
    for name in list_bound_endpoints(context):
        state = context.ledger.state(name)
        roles = (state.roles.stable, state.roles.previous, state.roles.candidate)
        dependents += [
            Dependent(model=state.config.model, version=one.version, endpoint=name)
            for one in roles
            if state.config is not None
            and one is not None
            and one.authority is not None
            and any(signature.keyid == key for signature in one.authority.signatures)
        ]
    return tuple(dict.fromkeys(dependents))


def _load_documents(
    context: Context, record: VersionRecord, target: str
) -> tuple[Evidence, tuple[Gate, ...]]:
    signed = record.decisions[target].record
    evidence = _load_document(context, record, f"evidence/{target}.json", signed.evidence)
    gates = _load_document(context, record, f"evidence/{target}.gates.json", signed.gates_digest)
    where = f"evidence of {record.model}/{record.version}"
    return codec.loads(evidence, Evidence, where=where), codec.loads(gates, tuple[Gate, ...])


def _load_document(context: Context, record: VersionRecord, name: str, digest: Digest) -> bytes:
    """Return a version's document from the local store, or else from the registry.

    The digest of the document must equal the signed digest.
    """
    try:
        return context.store.read(digest)
    except CorruptStateError:
        data = context.registry().document(record, name)
    if digest_bytes(data) != digest:
        raise DigestMismatchError(
            f"{name} differs from the signed document",
            where=f"{record.model}/{record.version}",
            remedy="Run the pipeline again, since the evidence was changed after the decision.",
        )
    return data
