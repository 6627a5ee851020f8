"""Endpoints in memory, and what they count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.endpoint import EndpointConfig, EndpointState, OrphanedResource, build_rollback_state
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.rollout_observations import (
    LatencyThresholds,
    MetricsReading,
    RequestCounts,
    ShadowCounts,
    UnitSums,
)
from onnx_ops.domain.target import Target
from onnx_ops.errors import ConflictError, ServiceUnavailableError, UserError
from onnx_ops.testing.fakes.process import FakeClock


class FakeProvider:
    """Endpoints that exist in memory and take effects in the order of their generations.

    While `down`, `apply` cannot reach them and `observe` sees nothing. `applied` lists every change of every endpoint.
    `left` are leftovers of endpoints, each named by the manifest that it is a part of.
    """

    def __init__(self) -> None:
        self.down = False
        self.applied: list[tuple[str, EndpointState]] = []
        self.counted = FakeMetrics()
        self.left: dict[str, list[OrphanedResource]] = {}
        self._states: dict[str, EndpointState] = {}
        self._generations: dict[str, int] = {}
        self._settings: dict[str, Mapping[str, Json]] = {}

    def capabilities(self, settings: Mapping[str, Json] | None = None) -> frozenset[str]:
        return frozenset({"split"})

    def check(self, settings: Mapping[str, Json]) -> None:
        """Endpoints in memory have no settings of their own, and take any."""

    def unservable(self, target: Target) -> str:
        """They run nothing, and so as any target does."""
        del target
        return ""

    def place(self, config: EndpointConfig) -> str:
        """Their setting `region` says where they stand."""
        return f"{config.endpoint} in {config.settings.get('region', 'memory')}"

    def check_change(self, before: EndpointConfig, after: EndpointConfig) -> None:
        """Everything can be changed but `auth`."""
        if before.settings.get("auth") != after.settings.get("auth"):
            raise UserError("auth cannot be changed", where=after.endpoint)

    def observe(self, config: EndpointConfig) -> EndpointState | None:
        state = None if self.down else self._states.get(config.endpoint)
        made = self._settings.get(config.endpoint, {})
        if state is None or made == config.settings:
            return state
        names = sorted({*made, *config.settings})
        differs = [
            f"{n}: {made.get(n)}, not {config.settings.get(n)}" for n in names if made.get(n) != config.settings.get(n)
        ]
        return replace(state, drift=tuple(differs))

    def apply(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        if self.down:
            raise ServiceUnavailableError("the endpoint cannot be reached", where=config.endpoint)
        name, state = config.endpoint, replace(state, generation=generation)
        last = self._generations.get(name, -1)
        current = self._states.get(name)
        if generation < last or (generation == last and current is not None and current != state):
            raise ConflictError(f"generation {last} was applied already", where=name)
        if current is None or not current.is_equivalent(state) or self._settings[name] != config.settings:
            self.applied.append((name, state))
        self._states[name], self._generations[name], self._settings[name] = state, generation, config.settings

    def roll_back(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        held, made = self._states.get(config.endpoint), self._settings.get(config.endpoint, config.settings)
        target = state if held is None else build_rollback_state(held, state)
        self.apply(replace(config, settings=made), target, generation=generation)

    def address(self, config: EndpointConfig) -> str | None:
        return f"memory:{config.endpoint}" if config.endpoint in self._states else None

    def metrics(self) -> FakeMetrics:
        return self.counted

    def remove(self, config: EndpointConfig) -> None:
        if self.down:
            raise ServiceUnavailableError("the endpoint cannot be reached", where=config.endpoint)
        self._states.pop(config.endpoint, None)
        self._generations.pop(config.endpoint, None)

    def leftovers(self, config: EndpointConfig, needed: frozenset[Digest]) -> Sequence[OrphanedResource]:
        if self.down:
            raise ServiceUnavailableError("the endpoint cannot be reached", where=config.endpoint)
        return [one for one in self.left.get(config.endpoint, ()) if one.name not in needed]

    def discard(self, config: EndpointConfig, leftover: OrphanedResource) -> None:
        if self.down:
            raise ServiceUnavailableError("the endpoint cannot be reached", where=config.endpoint)
        self.left[config.endpoint] = [one for one in self.left.get(config.endpoint, ()) if one != leftover]

    def interfere(self, endpoint: str, state: EndpointState | None) -> None:
        """The endpoint becomes this, or is lost, and nobody told the ledger. Its generation stays."""
        self._states.pop(endpoint, None)
        if state is not None:
            self._states[endpoint] = state


class FakeMetrics:
    """Counts that a test writes. While `down`, they cannot be read; `clock` says when they were."""

    def __init__(self) -> None:
        self.down = False
        self.clock = FakeClock()
        self.origin = "first"
        self.tallies: dict[str, RequestCounts] = {}
        self.shadow = ShadowCounts()
        self.histogram: tuple[tuple[float, ...], tuple[int, ...]] | None = ((0.001, 0.002), (500, 490, 10))

    def capabilities(self) -> frozenset[str]:
        return frozenset({"exceedances", "shadow", "outcomes"})

    def latencies(self, config: EndpointConfig, deployment: str) -> tuple[Sequence[float], Sequence[int]] | None:
        del deployment
        self._answer(config)
        return self.histogram

    def read(self, config: EndpointConfig, deployments: Mapping[str, LatencyThresholds | None]) -> MetricsReading:
        self._answer(config)
        ours = {name: self.tallies[name] for name in deployments if name in self.tallies}
        counts = {"errors": ("requests", "errors"), "outcomes": ("outcomes", "successes")}
        counts |= {f"latency_{name}": ("measured", f"over_{name}") for name in ("p50", "p99")}
        units = {
            name: UnitSums.single(*(sum(getattr(one, field) or 0 for one in ours.values()) for field in fields))
            for name, fields in counts.items()
        }
        return MetricsReading(origin=self.origin, at=self.clock.now(), tallies=ours, shadow=self.shadow, units=units)

    def count(self, deployment: str, **more: int) -> None:
        """So many more requests of a deployment, and of them so many errors, and so on."""
        before = self.tallies.get(deployment, RequestCounts(over_p50=0, over_p99=0))
        added: dict[str, Any] = {name: (getattr(before, name) or 0) + number for name, number in more.items()}
        self.tallies[deployment] = replace(before, **added)

    def _answer(self, config: EndpointConfig) -> None:
        if self.down:
            raise ServiceUnavailableError("the metrics do not answer", where=config.endpoint)
