"""Find and remove objects that are no longer needed.

The objects are versions, model folders, stored objects and provider resources.

A stored object is needed if its digest occurs in a recorded result, in the ledger, or in a decision
about a version with an alias. It is also needed if another needed document names it. A run records
a result only after it has stored the files. Young objects are therefore kept, because a run can be
about to record them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, StoredObject
from onnx_ops.domain.endpoint import Deployment, EndpointConfig, OrphanedResource
from onnx_ops.domain.ledger import ReleaseState
from onnx_ops.domain.release import ListedVersion
from onnx_ops.domain.rollout_policy import DAY
from onnx_ops.errors import (
    ConflictError,
    CorruptStateError,
    NotFoundError,
    RefusedError,
    ServiceUnavailableError,
)
from onnx_ops.ports import Context
from onnx_ops.release.journal import list_bound_endpoints

YOUNGEST_S = DAY
"""Age in seconds below which stored objects are always kept.

A stage is assumed to need less time between its first stored file and its recorded result.
"""
_LARGEST_DOCUMENT = 1 << 22
"""Size from which objects are not searched for digests, in bytes.

Documents with digests of other objects are far smaller than weights and samples.
"""
_DIGEST = re.compile(rb"sha256:[0-9a-f]{64}")


def find_unreferenced(context: Context, *, older_than_s: float) -> tuple[StoredObject, ...]:
    """Return the stored objects that are not needed; delete nothing.

    Only objects older than the limit and older than a day are returned.

    Raises:
        ServiceUnavailableError: the store, the ledger or the registry does not answer.
        CorruptStateError: a ledger is damaged, so the objects that it needs are unknown.
    """
    before = context.clock.now() - max(older_than_s, YOUNGEST_S)
    # The objects are listed before the results are read. A result that is recorded later
    # needs an old object only if this object was stored again, and the object is then young.
    stored = context.store.contents()
    sizes = {one.digest: one.size_bytes for one in stored if one.digest is not None}

    def names(digest: Digest) -> Iterable[Digest]:
        if sizes.get(digest, _LARGEST_DOCUMENT) >= _LARGEST_DOCUMENT:
            return ()
        try:
            return find_digests(context.store.read(digest))
        except CorruptStateError:
            return ()

    needed = find_reachable(_find_roots(context), names)
    return tuple(
        one
        for one in stored
        if one.at < before and (one.digest is None or one.digest not in needed)
    )


def find_reachable(
    roots: Iterable[Digest], names: Callable[[Digest], Iterable[Digest]]
) -> frozenset[Digest]:
    """Return the roots and all digests that they name, directly or indirectly."""
    reachable: set[Digest] = set()
    queue = list(roots)
    while queue:
        digest = queue.pop()
        if digest not in reachable:
            reachable.add(digest)
            queue += names(digest)
    return frozenset(reachable)


def find_digests(data: bytes) -> frozenset[Digest]:
    """Return every digest that occurs in the bytes.

    A false positive does no harm, since an object is only kept longer.
    """
    return frozenset(Digest(text.decode("ascii")) for text in _DIGEST.findall(data))


def _find_roots(context: Context) -> set[Digest]:
    roots = {digest for manifest in context.store.results() for digest in manifest.files.values()}
    for endpoint in context.ledger.endpoints():
        for entry in context.ledger.read(endpoint):
            roots |= find_digests(codec.dumps(entry))
    registry = context.registry()
    for model, aliases in registry.all_aliases().items():
        for version in set(aliases.values()):
            try:
                decisions = registry.version(model, version).decisions
            except NotFoundError:  # onnx-ops did not register this version, or it was deleted.
                continue
            for signed in decisions.values():
                roots |= find_digests(codec.dumps(signed))
    return roots


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """An orphaned resource of a bound endpoint."""

    endpoint: str
    provider: str
    leftover: OrphanedResource


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanSurvey:
    """Orphaned resources, and endpoints whose resources could not be listed.

    `silent` are the endpoints whose provider did not answer.
    """

    orphans: tuple[Orphan, ...] = ()
    silent: tuple[str, ...] = ()


def list_needed_deployments(context: Context, state: ReleaseState) -> tuple[Deployment, ...]:
    """Return the deployments that an endpoint needs now or next.

    These are the deployments that the endpoint serves, can roll back to immediately, or will serve
    next. If the endpoint does not answer, every version that it ever served is included.
    """
    roles = state.roles
    deployments = [d for d in (roles.stable, roles.previous, roles.candidate) if d is not None]
    if state.open_intent is not None:
        deployments += state.open_intent.action.state.deployments
    if state.pending_rollback is not None:
        deployments += state.pending_rollback.action.state.deployments
    if state.config is not None:
        actual = context.provider(state.config.provider).observe(state.config)
        deployments += state.known.values() if actual is None else actual.deployments
    return tuple(deployments)


def find_orphans(context: Context, endpoints: Sequence[str]) -> OrphanSurvey:
    """Return resources of these endpoints that no endpoint needs; delete nothing."""
    states = [context.ledger.state(name) for name in context.ledger.endpoints()]
    manifests = frozenset(
        deployment.manifest
        for state in states
        for deployment in list_needed_deployments(context, state)
    )
    orphans, silent = [], []
    for config in _configs(states, endpoints):
        try:
            left = context.provider(config.provider).list_orphans(config, manifests)
        except ServiceUnavailableError:
            silent.append(config.endpoint)
        else:
            orphans += [
                Orphan(endpoint=config.endpoint, provider=config.provider, leftover=one)
                for one in left
            ]
    return OrphanSurvey(orphans=tuple(orphans), silent=tuple(silent))


def delete_orphans(context: Context, orphans: Sequence[Orphan]) -> tuple[Orphan, ...]:
    """Delete orphans, and return those that were deleted.

    An orphan that is in use again is not deleted.

    Raises:
        ServiceUnavailableError: a provider does not answer; earlier deletions are not reverted.
    """
    states = [context.ledger.state(name) for name in {one.endpoint for one in orphans}]
    configs = {
        config.endpoint: config for config in _configs(states, [state.endpoint for state in states])
    }
    gone = []
    for one in orphans:
        config = configs.get(one.endpoint)
        if config is None:  # The endpoint was deleted or abandoned after the survey.
            continue
        try:
            context.provider(one.provider).delete_orphan(config, one.leftover)
        except ConflictError:
            continue
        gone.append(one)
    return tuple(gone)


def _configs(states: Sequence[ReleaseState], endpoints: Sequence[str]) -> list[EndpointConfig]:
    return [
        state.config for state in states if state.config is not None and state.endpoint in endpoints
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedVersion:
    """A version that is kept, and the reason."""

    model: str
    version: ListedVersion
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """The objects to remove, and the versions that are kept.

    `remove` has the versions by model, the oldest first. `folders` are local model folders,
    `orphans` are provider resources, and `contents` are stored objects.
    """

    remove: Mapping[str, tuple[ListedVersion, ...]]
    retained: tuple[RetainedVersion, ...]
    folders: tuple[StoredObject, ...]
    orphans: OrphanSurvey
    contents: tuple[StoredObject, ...] = ()


def plan_pruning(
    context: Context, models: Sequence[str], *, keep: int, older_than_s: float
) -> PrunePlan:
    """Return the objects that are not needed now; remove nothing.

    A version is kept for any of these reasons:

    - An alias points to the version, or will be set to it.
    - An endpoint serves the version, can roll back to it without loading it, or will serve it next.
    - The version belongs to one of the newest releases, or is young.

    If an endpoint does not answer, every version that it ever served is kept.

    Args:
        keep: number of the newest releases of each model that are kept, with all variants.
        older_than_s: age in seconds below which versions and stored objects are kept.

    Raises:
        ServiceUnavailableError: the ledger, the registry, the store or a provider does not answer.
        CorruptStateError: a ledger is damaged, so the versions that its endpoint needs are unknown.
    """
    states = [context.ledger.state(name) for name in list_bound_endpoints(context)]
    in_use = [
        (state, deployment)
        for state in states
        for deployment in list_needed_deployments(context, state)
    ]
    before = context.clock.now() - older_than_s
    remove: dict[str, tuple[ListedVersion, ...]] = {}
    retained: list[RetainedVersion] = []
    for model in models:
        needed = _find_reasons(context, model, in_use, states)
        listed = context.registry().versions(model)
        # If a version is in use or has an alias, that reason takes precedence over its age.
        reasons = _list_recent(listed, keep, before) | needed
        retained += [
            RetainedVersion(model=model, version=entry, why=reasons[entry.version])
            for entry in listed
            if entry.version in reasons
        ]
        remove[model] = tuple(entry for entry in listed if entry.version not in reasons)

    wanted = {deployment.manifest for _, deployment in in_use} | {
        entry.version.manifest for entry in retained
    }
    leaving = {entry.manifest for versions in remove.values() for entry in versions}
    return PrunePlan(
        remove=remove,
        retained=tuple(retained),
        folders=tuple(_find_folders(context, wanted, leaving, before)),
        orphans=find_orphans(context, [state.endpoint for state in _select_states(states, models)]),
        contents=find_unreferenced(context, older_than_s=older_than_s),
    )


def prune(context: Context, plan: PrunePlan) -> PrunePlan:
    """Remove the plan's objects that are still not needed, and return them.

    Raises:
        ServiceUnavailableError: the ledger, the registry, the store or a provider does not answer;
            earlier removals are not reverted.
        CorruptStateError: a ledger is damaged; earlier removals are not reverted.
    """
    removed: dict[str, tuple[ListedVersion, ...]] = {}
    left: set[Digest] = set()
    for model, versions in plan.remove.items():
        removed[model] = tuple(
            entry for entry in versions if _delete_unneeded(context, model, entry.version)
        )
        left |= {entry.manifest for entry in versions if entry not in removed[model]}
    # Folders are removed after the versions. If the process is killed in between, a folder remains.
    # The next pruning finds this folder by its age.
    folders = _forget_folders(context, plan.folders, left)
    cleared = delete_orphans(context, plan.orphans.orphans)
    return PrunePlan(
        remove=removed,
        retained=plan.retained,
        folders=folders,
        orphans=replace(plan.orphans, orphans=cleared),
        # `forget` keeps an object that was stored again meanwhile.
        contents=tuple(one for one in plan.contents if context.store.forget(one)),
    )


def _select_states(
    states: Iterable[ReleaseState], models: Collection[str]
) -> Iterator[ReleaseState]:
    """Yield the states of the endpoints that are bound to one of the models."""
    return (state for state in states if state.config is not None and state.config.model in models)


def _find_folders(
    context: Context, wanted: Collection[Digest], leaving: Collection[Digest], before: float
) -> Iterator[StoredObject]:
    """Yield the model folders that are no longer needed.

    A folder whose digest is in `wanted` is needed. Any other folder is no longer needed if its
    digest is in `leaving`, or if the folder is old. `leaving` contains the manifests of the
    versions that the plan removes. A folder is old if it was stored before `before`, in seconds
    since the epoch.
    """
    for folder in context.files.list_folders():
        # An earlier pruning that was killed possibly removed the version of an old folder, but not
        # the folder. If another model needs the files later, they are downloaded again.
        if folder.digest not in wanted and (folder.digest in leaving or folder.at < before):
            yield folder


def _delete_unneeded(context: Context, model: str, version: str) -> bool:
    """Delete a version of a model.

    Returns:
        False if an endpoint needs the version, or the registry refuses.
    """
    # Another process possibly promoted the version after the plan was made.
    states = (context.ledger.state(name) for name in list_bound_endpoints(context))
    of_model = _select_states(states, [model])
    if version in {
        d.version for state in of_model for d in list_needed_deployments(context, state)
    }:
        return False
    try:
        context.registry().delete_version(model, version)
    except RefusedError:
        return False
    return True


def _forget_folders(
    context: Context, folders: Iterable[StoredObject], left: Collection[Digest]
) -> tuple[StoredObject, ...]:
    """Remove model folders that are not needed, and return them.

    A folder is needed if its version was not removed (`left` contains its manifest), or if an
    endpoint needs it.
    """
    states = (context.ledger.state(name) for name in list_bound_endpoints(context))
    in_use = {
        deployment.manifest
        for state in states
        for deployment in list_needed_deployments(context, state)
    }
    needed = in_use.union(left)
    unneeded = tuple(folder for folder in folders if folder.digest not in needed)
    for folder in unneeded:
        if folder.digest is not None:
            context.files.forget(folder.digest)
    return unneeded


def _list_recent(listed: Sequence[ListedVersion], keep: int, since: float) -> dict[str, str]:
    """Return, for each recent version, why it is kept.

    A version is recent if it belongs to one of the `keep` newest releases, or was created after
    `since`.
    """
    by_age = sorted(listed, key=lambda entry: (entry.created_at, int(entry.version)), reverse=True)
    newest = list(dict.fromkeys(entry.release for entry in by_age))[:keep]
    return {
        **{entry.version: "too young" for entry in listed if entry.created_at > since},
        **{
            entry.version: f"one of the {keep} newest releases"
            for entry in listed
            if entry.release in newest
        },
    }


def _find_reasons(
    context: Context,
    model: str,
    in_use: Iterable[tuple[ReleaseState, Deployment]],
    states: Iterable[ReleaseState],
) -> dict[str, str]:
    """Return why each version in use, or with a present or pending alias, is kept."""
    of_model = _select_states(states, [model])
    pending = [
        (name, version)
        for state in of_model
        for name, version in state.pending_aliases.items()
        if version
    ]
    return {
        **{version: f"alias {name} is pending for it" for name, version in pending},
        **{
            one.version: f"endpoint {state.endpoint} needs it"
            for state, one in in_use
            if one.model == model
        },
        **{version: f"alias {name}" for name, version in context.registry().aliases(model).items()},
    }
