"""Run operations on releases without changes, and list what they would change.

A dry run executes the same code as the operation. Its ports read from the real ones and record
every change. Later reads of the same dry run show the recorded changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.ledger import Intent
from onnx_ops.domain.rollout_observations import MetricsReading
from onnx_ops.errors import OnnxOpsError
from onnx_ops.ports import Context, EndpointProvider, MetricsSource, ModelFiles, Registry
from onnx_ops.release.changes import Change, ChangeLog
from onnx_ops.release.effects import LEASE_S
from onnx_ops.release.endpoint_overlay import EndpointOverlay, MetricsOverlay
from onnx_ops.release.journal import Journal
from onnx_ops.release.record_overlay import (
    LedgerOverlay,
    ModelFilesOverlay,
    RegistryOverlay,
    StoreOverlay,
)
from onnx_ops.release.rollback import find_rollback_goal


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRollback:
    """What `onnx-ops rollback` would do with an endpoint after the operation.

    `to` is the deployment that would get all traffic. It is empty if there is none, for the reason
    `why`.
    """

    endpoint: str
    to: str
    why: str = ""


class DryRun:
    """The ports of one dry run, and the changes that were recorded through them.

    Args:
        context: the real ports. Opening and reading them must not write anything.
        temporary: temporary place in which the dry run stores the model files that it downloads.
    """

    def __init__(self, context: Context, temporary: ModelFiles) -> None:
        self._log = ChangeLog()
        self._ledger = functools.cache(lambda: LedgerOverlay(context.ledger, self._log))
        self._readings: dict[str, MetricsReading] = {}

        @functools.cache
        def open_registry() -> Registry:
            return RegistryOverlay(context.registry(), self._log)

        @functools.cache
        def open_provider(name: str) -> EndpointOverlay:
            return EndpointOverlay(context.provider(name), self._log)

        store = functools.cache(lambda: StoreOverlay(context.store, self._log))
        provider: Callable[[str], EndpointProvider] = open_provider
        self._open_provider = open_provider
        self._inner = context
        self.context = replace(
            context,
            open_ledger=self._ledger,
            open_store=store,
            files=ModelFilesOverlay(context.files, temporary, self._log),
            registry=open_registry,
            provider=provider,
            metrics=self._open_metrics,
            notifiers=dict,
        )

    @property
    def changes(self) -> tuple[Change, ...]:
        """The recorded changes, in order."""
        return self._log.changes

    def list_needs(self) -> tuple[str, ...]:
        """Return the rights, keys and leases that the recorded changes need, each once."""
        needs = [need for change in self.changes for need in change.needs]
        needs += [
            f"the lease of {name}, for at most {LEASE_S:g} s at a time"
            for name in self._ledger().list_changed()
            if any(isinstance(entry.body, Intent) for entry in self._ledger().list_new(name))
        ]
        return tuple(dict.fromkeys(needs))

    def list_rollbacks(self) -> tuple[NextRollback, ...]:
        """Return what a later rollback of each changed endpoint would do."""
        names = [name for name in self._ledger().list_changed() if "@" not in name]
        return tuple(
            _find_next_rollback(self.context, name)
            for name in names
            if Journal.open(self.context, name).state.config is not None
        )

    def _open_metrics(self, config: EndpointConfig) -> MetricsSource:
        return MetricsOverlay(
            self._inner.metrics(config),
            self._open_provider(config.provider).has_changed,
            self._readings,
            self._inner.clock,
        )


def format_rollbacks(rollbacks: tuple[NextRollback, ...]) -> Mapping[str, str]:
    """Return a sentence about the next rollback of each endpoint."""
    return {
        one.endpoint: f"Afterwards, `onnx-ops rollback {one.endpoint}` gives {one.to} all traffic."
        if one.to
        else f"Afterwards, `onnx-ops rollback {one.endpoint}` is not possible: {one.why}."
        for one in rollbacks
    }


def _find_next_rollback(context: Context, endpoint: str) -> NextRollback:
    try:
        return NextRollback(endpoint=endpoint, to=find_rollback_goal(context, endpoint).name)
    except OnnxOpsError as error:
        return NextRollback(endpoint=endpoint, to="", why=error.what)
