"""Retention: which versions, model folders, stored contents and things at providers nobody needs any more, and their
removal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from onnx_ops.domain.artifact import Digest, Stored
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.ledger import ReleaseState
from onnx_ops.domain.release import ListedVersion
from onnx_ops.errors import RefusedError
from onnx_ops.ports import Ports
from onnx_ops.release.collect import collect, unneeded
from onnx_ops.release.journal import bound_endpoints
from onnx_ops.release.orphans import Survey, discard, needed, survey

KEEP_RELEASES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A version that stays, and why."""

    model: str
    version: ListedVersion
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What would go. `remove` maps a model to its versions, oldest first; `folders` are model folders of this machine,
    `orphans` stand at providers, and `contents` are in the store."""

    remove: Mapping[str, tuple[ListedVersion, ...]]
    kept: tuple[Kept, ...]
    folders: tuple[Stored, ...]
    orphans: Survey
    contents: tuple[Stored, ...] = ()


def plan_pruning(ports: Ports, models: Sequence[str], *, keep: int = KEEP_RELEASES, older_than_s: float) -> PrunePlan:
    """What is not needed now. Nothing is changed.

    A version stays while an alias points at it, an endpoint serves it, may go back to it or is about to serve it, it is
    one of the newest releases, or it is young. Of an endpoint that does not answer, every version that it ever served
    stays.

    Args:
        ports: the outside world.
        models: registered models.
        keep: newest releases of each model that stay, with all of their variants.
        older_than_s: age in seconds below which a version or content stays.

    Raises:
        ServiceUnavailableError: the registry or the store does not answer.
        CorruptStateError: a ledger is damaged, so that nobody knows what its endpoint needs.
    """
    states = [ports.ledger.state(name) for name in bound_endpoints(ports)]
    in_use = [(state, deployment) for state in states for deployment in needed(ports, state)]
    now = ports.clock.now()
    remove: dict[str, tuple[ListedVersion, ...]] = {}
    kept: list[Kept] = []
    for model in models:
        reasons = _reasons(ports, model, in_use, states)
        listed = ports.registry().versions(model)
        newest = _newest_releases(listed, keep)
        leaving: list[ListedVersion] = []
        for entry in listed:
            why = reasons.get(entry.version) or _recent(entry, newest, keep, now - older_than_s)
            if why:
                kept.append(Kept(model=model, version=entry, why=why))
            else:
                leaving.append(entry)
        remove[model] = tuple(leaving)
    wanted = {deployment.manifest for _, deployment in in_use} | {entry.version.manifest for entry in kept}
    endpoints = [s.endpoint for s in states if s.config is not None and s.config.model in models]
    return PrunePlan(
        remove=remove,
        kept=tuple(kept),
        folders=_idle_folders(ports, wanted, remove, now - older_than_s),
        orphans=survey(ports, endpoints),
        contents=unneeded(ports, older_than_s=older_than_s),
    )


def prune(ports: Ports, plan: PrunePlan) -> PrunePlan:
    """Remove what the plan says and is still not needed; returns what was removed.

    Raises:
        ServiceUnavailableError: the registry does not answer; what was removed until then stays removed.
    """
    removed: dict[str, tuple[ListedVersion, ...]] = {}
    for model, versions in plan.remove.items():
        gone: list[ListedVersion] = []
        for entry in versions:
            # Somebody may have promoted it since the plan was made.
            if entry.version in _served(ports, model):
                continue
            try:
                ports.registry().delete_version(model, entry.version)
            except RefusedError:
                continue
            gone.append(entry)
        removed[model] = tuple(gone)
    left = {e.manifest for m, vs in plan.remove.items() for e in vs if e not in removed[m]}
    states = (ports.ledger.state(name) for name in bound_endpoints(ports))
    left |= {deployment.manifest for state in states for deployment in needed(ports, state)}
    folders = tuple(folder for folder in plan.folders if folder.digest not in left)
    for folder in folders:
        if folder.digest is not None:
            ports.files.forget(folder.digest)
    cleared = discard(ports, plan.orphans.orphans)
    return PrunePlan(
        remove=removed,
        kept=plan.kept,
        folders=folders,
        orphans=replace(plan.orphans, orphans=cleared),
        contents=collect(ports, plan.contents),
    )


def _reasons(
    ports: Ports, model: str, in_use: Iterable[tuple[ReleaseState, Deployment]], states: Iterable[ReleaseState]
) -> dict[str, str]:
    """Version to why it must stay."""
    reasons: dict[str, str] = {}
    for state in states:
        if state.config is not None and state.config.model == model:
            owed = {
                version: f"alias {name} is owed to it" for name, version in state.pending_aliases.items() if version
            }
            reasons |= owed
    for state, deployment in in_use:
        if deployment.model == model:
            reasons[deployment.version] = f"endpoint {state.endpoint} needs it"
    return reasons | {version: f"alias {name}" for name, version in ports.registry().aliases(model).items()}


def _served(ports: Ports, model: str) -> frozenset[str]:
    states = (ports.ledger.state(name) for name in bound_endpoints(ports))
    mine = (state for state in states if state.config is not None and state.config.model == model)
    return frozenset(deployment.version for state in mine for deployment in needed(ports, state))


def _newest_releases(listed: Sequence[ListedVersion], keep: int) -> frozenset[Digest]:
    by_age = sorted(listed, key=lambda entry: (entry.created_at, int(entry.version)), reverse=True)
    return frozenset(list(dict.fromkeys(entry.release for entry in by_age))[:keep])


def _recent(entry: ListedVersion, newest: frozenset[Digest], keep: int, born_before: float) -> str:
    if entry.release in newest:
        return f"one of the {keep} newest releases"
    return "too young" if entry.created_at > born_before else ""


def _idle_folders(
    ports: Ports, wanted: set[Digest], remove: Mapping[str, Sequence[ListedVersion]], before: float
) -> tuple[Stored, ...]:
    """Folders of versions that leave; and old ones, whose version may have left in a pruning that was cut short. What
    another model needs one day is fetched again."""
    leaving = {entry.manifest for versions in remove.values() for entry in versions}
    return tuple(
        folder
        for folder in ports.files.kept()
        if folder.digest not in wanted and (folder.digest in leaving or folder.at < before)
    )
