"""Is there anything to do? Answered for all endpoints from one look at the registry, without touching anything.

The decision is `reconcile.step`'s own: it is made over ports that can only look, from what one question to the
registry has told. Where it wants more than that, there is something to do, and it is made again over the real ports.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

from onnx_ops.domain.ledger import LedgerEntry, ReleaseState
from onnx_ops.errors import OnnxOpsError, ServiceUnavailableError
from onnx_ops.ports import EndpointProvider, Ledger, MetricsSource, ModelFiles, Ports, Registry
from onnx_ops.release.reconcile import StepReport, settle


class _SomethingToDo(Exception):
    """Looking is not enough. No handler of the errors that onnx-ops raises on purpose sees it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the registry said when it was asked: version by alias, by model. `down` says why it did not answer."""

    aliases: Mapping[str, Mapping[str, str]]
    down: str = ""


class Glance:
    """One pass over endpoints: the ledgers as they are read first, and what the registry says when it is first needed.

    Args:
        ports: the outside world.
        seen: asks the registry; called once, if at all. While it is down, it is not asked for anything else either.
    """

    def __init__(self, ports: Ports, seen: Callable[[], Seen]) -> None:
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
            reports = settle(self._looking, endpoint, actor=actor)
        except _SomethingToDo:
            return settle(self._ports, endpoint, actor=actor, told=told, stopped=stopped)
        if told is not None:
            told(reports[-1])
        return reports

    def _unless_down(self, registry: Callable[[], Registry]) -> Registry:
        if why := self._seen().down:
            raise ServiceUnavailableError(why)
        return registry()


def ask(ports: Ports, models: Collection[str] | None = None) -> Seen:
    """Ask the registry once for the aliases of all models, or of these. It may be down; that is an answer too."""
    try:
        registry = ports.registry()
        if models is None:
            return Seen(aliases=registry.all_aliases())
        return Seen(aliases={model: registry.aliases(model) for model in sorted(models)})
    except OnnxOpsError as error:
        return Seen(aliases={}, down=str(error))


class _Aliases:
    """A registry of which only the aliases are known."""

    def __init__(self, seen: Seen) -> None:
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
        self._states: dict[str, ReleaseState] = {}
        self.place = ledger.place

    def endpoints(self) -> tuple[str, ...]:
        return self._ledger.endpoints()

    def state(self, endpoint: str) -> ReleaseState:
        if endpoint not in self._states:
            self._states[endpoint] = self._ledger.state(endpoint)
        return self._states[endpoint]

    def read(self, endpoint: str, *, after: int = 0) -> tuple[LedgerEntry, ...]:
        return self._ledger.read(endpoint, after=after)

    def sound(self, endpoint: str) -> tuple[LedgerEntry, ...]:
        return self._ledger.sound(endpoint)

    def append(self, entry: LedgerEntry) -> NoReturn:
        raise _SomethingToDo(f"entry {entry.sequence} of {entry.endpoint}")
