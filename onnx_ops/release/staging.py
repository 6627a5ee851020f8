"""Rollouts over several endpoints, one after the other: what an endpoint waits for before it begins."""

from __future__ import annotations

from onnx_ops.domain.ledger import ReleaseState
from onnx_ops.domain.release import VersionRecord
from onnx_ops.release.journal import Journal


def waits_for(journal: Journal, wanted: VersionRecord) -> str:
    """Why this endpoint does not begin with a version yet; empty if it may, or has begun.

    It waits until the endpoints that its policy names serve the version's release with all of their traffic, and have
    done so for as long as the policy says.
    """
    roles, policy = journal.state.roles, journal.state.policy
    if wanted.manifest in [d.manifest for d in (roles.candidate, roles.stable) if d is not None]:
        return ""
    ledger, now = journal.ports.ledger, journal.ports.clock.now()
    for name in policy.after:
        if why := _not_yet(ledger.state(name), wanted, policy.soak, now):
            return f"v{wanted.version} waits for endpoint {name}: {why}"
    return ""


def _not_yet(state: ReleaseState, wanted: VersionRecord, soak_s: float, now: float) -> str:
    roles = state.roles
    if state.config is None:
        return "no pipeline has bound it"
    if (why := state.why_rejected(wanted)) is not None:
        return f"it rolled this release back ({why})"
    if roles.candidate is not None and roles.candidate.release == wanted.release:
        return "its own rollout is in progress"
    if roles.stable is None or roles.stable.release != wanted.release:
        return "it does not serve this release"
    # Zero once the previous version is gone, which the check of the pipeline file puts after the soak.
    left = roles.finished_at + soak_s - now
    return f"it has served this release for less than {soak_s:g} s" if roles.finished_at and left > 0 else ""
