"""May this version serve this target? Asked before every alias move and before every deploy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from onnx_ops.domain.artifact import CUSTOM_OPS, Digest, digest_file, short
from onnx_ops.domain.attestation import SignedOverride
from onnx_ops.domain.decision import DecisionRecord, SignedDecision
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.release import VersionRecord
from onnx_ops.errors import DigestMismatchError, RefusedError
from onnx_ops.ports import Ports
from onnx_ops.release.decided import passing_decision
from onnx_ops.scratch import Scratch


def approve(ports: Ports, record: VersionRecord, target: str, target_digest: Digest | None) -> SignedDecision:
    """The version's signed decision for the target.

    Refuses a version whose decision is missing, forged, about something else, or not a pass.

    Args:
        record: the version as the registry tells it.
        target: the target it should serve.
        target_digest: the target's definition now; None skips the comparison where it is not known.

    Raises:
        RefusedError: with the reason.
    """
    signed = passing_decision(record, target, ports.verifier())
    if target_digest is not None and signed.record.target_digest != target_digest:
        raise RefusedError(
            f"target {target} was defined otherwise when this version was judged",
            where=f"{record.model}/{record.version}",
            remedy="Run the pipeline again, so that the evidence is about the target as it is now.",
        )
    return signed


def materialise(ports: Ports, record: VersionRecord, authority: SignedDecision | SignedOverride) -> Deployment:
    """The version's files, verified against its manifest, where an endpoint can load them.

    Args:
        record: the version.
        authority: what lets it serve.

    Raises:
        DigestMismatchError: what the registry holds is not what was registered.
        ServiceUnavailableError: the registry does not answer.
    """
    location = ports.files.location(record.manifest) or _download(ports, record)
    about = authority.record
    decision = about if isinstance(about, DecisionRecord) else None
    return Deployment(
        name=f"v{record.version}",
        model=record.model,
        version=record.version,
        variant=record.variant,
        release=record.release,
        manifest=record.manifest,
        location=location,
        batchable=decision is not None and decision.batchable,
        evidence=None if decision is None else decision.evidence,
        custom_ops=_libraries(Path(location), about.target, about.custom_ops),
        execution=about.execution,
        authority=authority.envelope,
    )


def fetch(ports: Ports, deployment: Deployment) -> None:
    """Bring the files of a deployment back where an endpoint loads them, if they are lost or damaged.

    Raises:
        DigestMismatchError: what the registry holds is not what was deployed.
        NotFoundError, ServiceUnavailableError: the registry does not have it, or does not answer.
    """
    if ports.files.location(deployment.manifest) is None:
        record = ports.registry().version(deployment.model, deployment.version)
        _download(ports, replace(record, manifest=deployment.manifest))


def _download(ports: Ports, record: VersionRecord) -> str:
    """Fetch the version's files, verify them against its manifest, and return where they stand."""
    with Scratch() as folder:
        manifest = ports.registry().fetch(record, folder)
        if manifest.digest() != record.manifest:
            raise DigestMismatchError(
                f"the registry holds {short(manifest.digest())}, but {short(record.manifest)} was registered",
                where=f"{record.model}/{record.version}",
                remedy="Its artifact was changed after it was judged; run the pipeline again.",
            )
        return ports.files.admit(Path(folder), manifest)


def _libraries(folder: Path, target: str, declared: tuple[Digest, ...]) -> tuple[str, ...]:
    """Those of a version's files that are libraries of operators which the target declares."""
    found = [path for path in (folder / CUSTOM_OPS / target).glob("*") if path.is_file()]
    return tuple(sorted(path.relative_to(folder).as_posix() for path in found if digest_file(path) in declared))
