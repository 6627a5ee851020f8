"""Endpoints, the deployments behind them, and how traffic is split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnx_ops.domain.artifact import Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One model version that can run behind an endpoint. `location` is where its verified files stand."""

    name: str
    model: str
    version: str
    variant: str
    release: Digest
    manifest: Digest
    location: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSplit:
    """Whole percentages by deployment name. They sum to 100."""

    weights: Mapping[str, int]

    def __post_init__(self) -> None:
        if any(weight < 0 for weight in self.weights.values()) or sum(self.weights.values()) != 100:
            raise ValueError(f"traffic must be non-negative and sum to 100: {dict(self.weights)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointState:
    """What an endpoint is doing: the deployments it holds and the traffic each receives."""

    deployments: tuple[Deployment, ...]
    split: TrafficSplit
    generation: int = 0

    def __post_init__(self) -> None:
        names = [d.name for d in self.deployments]
        if len(set(names)) != len(names):
            raise ValueError(f"deployment names repeat: {names}")
        if missing := set(self.split.weights) - set(names):
            raise ValueError(f"traffic goes to deployments that do not exist: {sorted(missing)}")

    def same_as(self, other: EndpointState) -> bool:
        """Equal but for the generation."""
        mine = {d.name: (d.manifest, self.split.weights.get(d.name, 0)) for d in self.deployments}
        theirs = {d.name: (d.manifest, other.split.weights.get(d.name, 0)) for d in other.deployments}
        return mine == theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """What an endpoint is bound to, as the pipeline file that owns it says."""

    endpoint: str
    provider: str
    model: str
    target: str
    target_digest: Digest
    pipeline: str
    settings: Mapping[str, str | int | float | bool] = field(default_factory=dict)
