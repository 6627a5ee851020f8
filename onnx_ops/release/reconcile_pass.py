"""Passes over many endpoints that decide from one read of ledgers and registry."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.ledger import EntryBody, LedgerEntry, ReleaseState
from onnx_ops.errors import CorruptStateError, OnnxOpsError, ServiceUnavailableError
from onnx_ops.ports import Context, Ledger, Registry
from onnx_ops.release.journal import Journal
from onnx_ops.release.reconcile import StepReport, find_step, reconcile_until_stable


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySnapshot:
    """Aliases of the registry; `aliases` has the version by model and by alias.

    `down` is the reason why the registry could not be read; it is empty if the registry was read.
    """

    aliases: Mapping[str, Mapping[str, str]]
    down: str = ""


def read_registry(context: Context, models: Collection[str] | None = None) -> RegistrySnapshot:
    """Read the aliases of all models, or of the given models.

    The aliases of all models are read in one request, or one for each page of models. If the
    registry is down, the result has the reason.
    """
    try:
        registry = context.registry()
        if models is None:
            return RegistrySnapshot(aliases=registry.all_aliases())
        return RegistrySnapshot(
            aliases={model: registry.aliases(model) for model in sorted(models)}
        )
    except OnnxOpsError as error:
        return RegistrySnapshot(aliases={}, down=str(error))


class ReconcilePass:
    """One pass over endpoints.

    The pass reads each ledger and the registry at most once to decide whether a change is due. A
    due change reads its data again.

    Args:
        read_snapshot: function that reads the registry. It is called at most once. If the registry
            is down, the pass sends no other request to it.
    """

    def __init__(self, context: Context, read_snapshot: Callable[[], RegistrySnapshot]) -> None:
        self._read_snapshot = functools.cache(read_snapshot)
        self._context = replace(context, registry=lambda: self._open_registry(context))
        ledger = _CachedLedger(context.ledger)
        self._cached = replace(self._context, open_ledger=lambda: ledger)

    def state(self, endpoint: str) -> ReleaseState:
        """Return the state of an endpoint in this pass.

        Raises:
            CorruptStateError: the endpoint's ledger is damaged.
        """
        return self._cached.ledger.state(endpoint)

    def reconcile(
        self,
        endpoint: str,
        *,
        actor: str = "",
        on_step: Callable[[StepReport], None] = lambda _: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> list[StepReport]:
        """Reconcile an endpoint if a change is due according to this pass's data.

        `reconcile_until_stable` makes the changes.

        Raises:
            OnnxOpsError: the errors of `reconcile_step`.
        """
        report = self._find_wait(endpoint, actor)
        if report is None:
            return reconcile_until_stable(
                self._context, endpoint, actor=actor, on_step=on_step, is_stopped=is_stopped
            )
        on_step(report)
        return [report]

    def _find_wait(self, endpoint: str, actor: str) -> StepReport | None:
        """Return the report of an endpoint that waits; None if a change is due.

        The caller decides a due change again from fresh data.
        """
        try:
            step = find_step(Journal.open(self._cached, endpoint, actor=actor), self._read_aliases)
        except CorruptStateError:
            # The endpoint possibly applied entries that are newer than the cached state. Only a
            # fresh read shows whether the ledger lost entries.
            return None
        return step if isinstance(step, StepReport) else None

    def _read_aliases(self, model: str) -> Mapping[str, str]:
        self._require_registry()
        return self._read_snapshot().aliases.get(model, {})

    def _open_registry(self, context: Context) -> Registry:
        self._require_registry()
        return context.registry()

    def _require_registry(self) -> None:
        if why := self._read_snapshot().down:
            raise ServiceUnavailableError(why)


class _CachedLedger(Ledger):
    """A ledger that caches each state after the first read.

    Appending an entry for an endpoint drops its state from the cache.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._states: dict[str, ReleaseState] = {}

    @property
    def place(self) -> str:
        return self._ledger.place

    @property
    def release_keys(self) -> Mapping[Digest, str]:
        return self._ledger.release_keys

    def endpoints(self) -> tuple[str, ...]:
        return self._ledger.endpoints()

    def state(self, endpoint: str) -> ReleaseState:
        if endpoint not in self._states:
            self._states[endpoint] = self._ledger.state(endpoint)
        return self._states[endpoint]

    def read(self, endpoint: str, *, after: int = 0) -> tuple[LedgerEntry, ...]:
        return self._ledger.read(endpoint, after=after)

    def read_intact(self, endpoint: str, *, signed: bool = True) -> tuple[LedgerEntry, ...]:
        return self._ledger.read_intact(endpoint, signed=signed)

    def count(self, endpoint: str) -> int:
        return self._ledger.count(endpoint)

    def require_signer(self, state: ReleaseState, body: EntryBody) -> None:
        self._ledger.require_signer(state, body)

    def append(self, entry: LedgerEntry) -> None:
        self._states.pop(entry.endpoint, None)
        self._ledger.append(entry)
