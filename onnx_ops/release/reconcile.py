"""Moves an endpoint toward what the registry wants, one judged effect at a time, and writes every move down.

`reconcile_step` is level-triggered and idempotent: it reads desired and observed state, does at most one thing, and can
be killed anywhere. The next call continues or undoes.

Is there anything to do? Answered for all endpoints from one look at the registry, without touching anything.

The decision is `reconcile.step`'s own: it is made over ports that can only look, from what one question to the
registry has told. Where it wants more than that, there is something to do, and it is made again over the real ports.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

from onnx_ops.domain.ledger import LedgerEntry, ReleaseState, VersionRefused
from onnx_ops.domain.rollout import Action, ActionKind, plan_reversal
from onnx_ops.errors import (
    AlarmRollbackError,
    InfrastructureError,
    MissingPackageError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
)
from onnx_ops.ports import EndpointProvider, Ledger, MetricsSource, ModelFiles, Ports, Registry
from onnx_ops.release.journal import Journal, pin_aliases, read_readable_state
from onnx_ops.release.promote import finish_deletion
from onnx_ops.release.registry_sync import (
    DesiredState,
    conclude_refusal,
    publish_entries,
    publish_rejections,
    read_desired_state,
    record_alias,
    revert_alias,
    write_pending_aliases,
)
from onnx_ops.release.retry import MAX_PAUSE_S, retry_on_conflict
from onnx_ops.release.rollback import carry_out_pending, request_and_carry_out
from onnx_ops.release.rollout_metrics import choose_action, read_metrics, record_metrics, record_pause

MAX_STEPS = 20
"""A rollout has a few steps; more than this in one go means that two parties undo each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did and why. `settled` says that a further step would do nothing now."""

    endpoint: str
    did: str
    why: str
    settled: bool
    refused: bool = False
    registry_down: str = ""


def reconcile_until_stable(
    ports: Ports,
    endpoint: str,
    *,
    actor: str = "",
    told: Callable[[StepReport], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[StepReport]:
    """Steps until nothing is left to do now; the last report says why. Between two steps it may be `stopped`.

    A step that somebody else has overtaken is decided anew: a rollback's own background job is at work, for example.

    Raises:
        OnnxOpsError: as `reconcile_step` does.
    """
    reports: list[StepReport] = []
    while len(reports) < MAX_STEPS:
        report = retry_on_conflict(lambda: reconcile_step(ports, endpoint, actor=actor))
        reports.append(report)
        if told is not None:
            told(report)
        if report.settled or stopped():
            break
    return reports


def reconcile_each(
    ports: Ports, endpoints: Sequence[str], *, actor: str = ""
) -> tuple[dict[str, list[StepReport]], dict[str, OnnxOpsError]]:
    """Call `reconcile_until_stable` for several endpoints; return reports and errors by endpoint."""
    reports: dict[str, list[StepReport]] = {}
    errors: dict[str, OnnxOpsError] = {}
    for name in endpoints:
        try:
            reports[name] = reconcile_until_stable(ports, name, actor=actor)
        except OnnxOpsError as error:
            errors[name] = error
    return reports, errors


def reconcile_with_retries(
    ports: Ports, endpoints: Sequence[str], *, actor: str = "", for_s: float
) -> tuple[dict[str, list[StepReport]], dict[str, OnnxOpsError]]:
    """`reconcile_each`, again and again with growing pauses, until nothing fails and no rollback is owed, or `for_s`
    seconds are over. What fails for want of a package is not tried again."""
    deadline, pause = time.monotonic() + for_s, 1.0
    while True:
        reports, errors = reconcile_each(ports, endpoints, actor=actor)
        if not errors and not any(read_readable_state(ports, name).pending_rollback for name in endpoints):
            return reports, errors
        if errors and all(isinstance(error, MissingPackageError) for error in errors.values()):
            return reports, errors
        if time.monotonic() + pause > deadline:
            return reports, errors
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_S)


def write_aliases(ports: Ports, endpoint: str, *, actor: str = "") -> str:
    """Write the aliases that a rollback owes; why not, if that fails.

    Traffic has moved already, so nothing is raised: the reconciler tries again.
    """
    try:
        return reconcile_until_stable(ports, endpoint, actor=actor)[-1].registry_down
    except OnnxOpsError as error:
        return str(error)


def reconcile_step(ports: Ports, endpoint: str, *, actor: str = "") -> StepReport:
    """Do the one thing that is due.

    Raises:
        NotFoundError: no such endpoint.
        LedgerConflictError: somebody else acted meanwhile; call again.
        ConflictError: somebody else is changing the endpoint, past the ledger.
        ServiceUnavailableError: the endpoint could not be reached.
        RefusedError: the registry does not let us write an alias; an endpoint that died is restored all the same.
    """
    journal = Journal.open(ports, endpoint, actor=actor)
    config = journal.config
    if journal.state.deleting:
        finish_deletion(journal)
        return StepReport(endpoint=endpoint, did="deleted", why="somebody asked for it", settled=True)
    if (report := _at_work(journal) or _unfinished(journal)) is not None:
        return report
    wish = read_desired_state(journal)
    if (report := _refusal(journal, wish)) is not None:
        return report
    unwritten: OnnxOpsError | None = None
    try:
        if (report := _told_registry(journal, wish)) is not None:
            return report
    except (InfrastructureError, RefusedError) as error:
        unwritten = error
    seen = read_metrics(journal)
    action = choose_action(journal, wish, ports.provider(config.provider).observe(config), seen)
    if unwritten is not None and not (isinstance(action, Action) and action.kind is ActionKind.RESTORE):
        raise unwritten
    record_metrics(journal, seen, action)
    if not isinstance(action, Action):
        record_pause(journal, action)
        return StepReport(endpoint=endpoint, did="", why=action.why, settled=True, registry_down=wish.unreachable)
    if action.is_rollback:
        request_and_carry_out(journal, pin_aliases(ports, config, action))
    else:
        action = _perform(journal, action)
    did = action.kind.value
    return StepReport(endpoint=endpoint, did=did, why=action.why, settled=False, registry_down=wish.unreachable)


def _perform(journal: Journal, action: Action) -> Action:
    """Do it; what an alarm of the provider takes back is rolled back, and so rejected. Return what was done."""
    roles, config = journal.state.roles, journal.config
    try:
        journal.perform(action)
    except AlarmRollbackError as error:
        back = plan_reversal(roles, action, config.target, why=str(error))
        if back is None:
            raise
        request_and_carry_out(journal, pin_aliases(journal.ports, config, back))
        return back
    return action


def _told_registry(journal: Journal, wish: DesiredState) -> StepReport | None:
    """Make the registry say what the ledger says, and the ledger what somebody else has made the registry say."""
    if wish.unreachable:
        return None
    endpoint = journal.state.endpoint
    told = publish_rejections(journal)
    if written := write_pending_aliases(journal):
        return StepReport(endpoint=endpoint, did="wrote aliases", why=written, settled=False)
    if told:
        publish_entries(journal, {})
    if record_alias(journal, wish.champion):
        why = f"the champion in the registry is v{wish.champion}, which serves here"
        return StepReport(endpoint=endpoint, did="took note", why=why, settled=False)
    return None


def _refusal(journal: Journal, wish: DesiredState) -> StepReport | None:
    """Put an alias back that may not stand; or finish what a driver began that died while it did so."""
    begun, refused = journal.state.open_refusal, wish.refused
    if begun is not None and not wish.unreachable and not _same(begun, refused):
        conclude_refusal(journal, begun)
        refused = begun
    elif refused is not None:
        revert_alias(journal, refused)
    else:
        return None
    did = f"refused {refused.alias} on version {refused.version}"
    return StepReport(endpoint=journal.state.endpoint, did=did, why=refused.reason, settled=False, refused=True)


def _same(begun: VersionRefused, refused: VersionRefused | None) -> bool:
    return refused is not None and (begun.alias, begun.version) == (refused.alias, refused.version)


def _at_work(journal: Journal) -> StepReport | None:
    """An open intent is the lease of whoever wrote it, unless that driver died."""
    if (intent := journal.at_work()) is None:
        return None
    why = f"{intent.holder} is at work: {intent.action.why}"
    return StepReport(endpoint=journal.state.endpoint, did="", why=why, settled=True)


def _unfinished(journal: Journal) -> StepReport | None:
    """What is owed, or was begun by a driver that died, is done before anything else."""
    intent, pending = journal.state.open_intent, journal.state.pending_rollback
    if pending is not None:
        carry_out_pending(journal)
        kind, why = pending.action.kind, f"{pending.actor} asked for it: {pending.action.why}"
    elif intent is not None:
        done = _perform(journal, intent.action)
        kind, why = done.kind, f"finished what {intent.holder} began: {done.why}"
    else:
        return None
    return StepReport(endpoint=journal.state.endpoint, did=kind.value, why=why, settled=False)


class _SomethingToDo(Exception):
    """Looking is not enough. No handler of the errors that onnx-ops raises on purpose sees it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySnapshot:
    """What the registry said when it was asked: version by alias, by model. `down` says why it did not answer."""

    aliases: Mapping[str, Mapping[str, str]]
    down: str = ""


class DryRun:
    """One pass over endpoints: the ledgers as they are read first, and what the registry says when it is first needed.

    Args:
        ports: the outside world.
        seen: asks the registry; called once, if at all. While it is down, it is not asked for anything else either.
    """

    def __init__(self, ports: Ports, seen: Callable[[], RegistrySnapshot]) -> None:
        self._seen = functools.cache(seen)
        self._ports = replace(ports, registry=lambda: self._unless_down(ports.registry))
        self._ledger = _ReadOnce(ports.ledger)
        self._looking = replace(
            ports,
            ledger=cast("Ledger", self._ledger),
            files=cast("ModelFiles", _Look(ports.files)),
            registry=lambda: self._unless_down(lambda: cast("Registry", _Aliases(self._seen()))),
            provider=lambda name: cast("EndpointProvider", _Look(ports.provider(name), "observe")),
            metrics=lambda config: cast("MetricsSource", _Look(ports.metrics(config), "read")),
        )

    def state(self, endpoint: str) -> ReleaseState:
        """Raises CorruptStateError if the ledger cannot be read."""
        return self._ledger.state(endpoint)

    def settle(
        self,
        endpoint: str,
        *,
        actor: str = "",
        told: Callable[[StepReport], None] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[StepReport]:
        """As `reconcile.settle`; an endpoint with nothing to do costs the registry no request.

        Raises:
            OnnxOpsError: as `reconcile.step` does.
        """
        try:
            reports = reconcile_until_stable(self._looking, endpoint, actor=actor)
        except _SomethingToDo:
            return reconcile_until_stable(self._ports, endpoint, actor=actor, told=told, stopped=stopped)
        if told is not None:
            told(reports[-1])
        return reports

    def _unless_down(self, registry: Callable[[], Registry]) -> Registry:
        if why := self._seen().down:
            raise ServiceUnavailableError(why)
        return registry()


def read_registry(ports: Ports, models: Collection[str] | None = None) -> RegistrySnapshot:
    """Ask the registry once for the aliases of all models, or of these. It may be down; that is an answer too."""
    try:
        registry = ports.registry()
        if models is None:
            return RegistrySnapshot(aliases=registry.all_aliases())
        return RegistrySnapshot(aliases={model: registry.aliases(model) for model in sorted(models)})
    except OnnxOpsError as error:
        return RegistrySnapshot(aliases={}, down=str(error))


class _Aliases:
    """A registry of which only the aliases are known."""

    def __init__(self, seen: RegistrySnapshot) -> None:
        self._seen = seen

    def aliases(self, model: str) -> Mapping[str, str]:
        return self._seen.aliases.get(model, {})

    def __getattr__(self, name: str) -> NoReturn:
        raise _SomethingToDo(name)


class _Look:
    """A port of which only the methods that look may be called."""

    def __init__(self, inner: object, *allowed: str) -> None:
        self._inner = inner
        self._allowed = allowed

    def __getattr__(self, name: str) -> Any:
        if name not in self._allowed:
            raise _SomethingToDo(name)
        return getattr(self._inner, name)


class _ReadOnce:
    """A ledger that is read once for each endpoint, and not written."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.place = ledger.place
        self._states: dict[str, ReleaseState] = {}

    def endpoints(self) -> tuple[str, ...]:
        return self._ledger.endpoints()

    def state(self, endpoint: str) -> ReleaseState:
        if endpoint not in self._states:
            self._states[endpoint] = self._ledger.state(endpoint)
        return self._states[endpoint]

    def read(self, endpoint: str, *, after: int = 0) -> tuple[LedgerEntry, ...]:
        return self._ledger.read(endpoint, after=after)

    def read_intact(self, endpoint: str) -> tuple[LedgerEntry, ...]:
        return self._ledger.read_intact(endpoint)

    def append(self, entry: LedgerEntry) -> NoReturn:
        raise _SomethingToDo(f"entry {entry.sequence} of {entry.endpoint}")
