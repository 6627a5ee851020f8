"""An endpoint provider and two models, as the tests of every provider use them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from onnx_ops.domain.endpoint import Deployment, EndpointConfig, EndpointState
from onnx_ops.domain.quantities import Json
from onnx_ops.ports.release import EndpointProvider
from onnx_ops.testing.endpoints import scaling_deployment, state_of
from tests.support.endpoints import endpoint_config


@dataclass(kw_only=True)
class EndpointSite:
    """An endpoint provider with two models: `blue` doubles, `green` triples.

    `config` is used where a test passes no other.
    """

    blue: Deployment
    green: Deployment
    provider: EndpointProvider = field(init=False)
    config: EndpointConfig = field(init=False)

    def state(self, **weights: int) -> EndpointState:
        return state_of(*(getattr(self, name) for name in weights), **weights)

    def apply(self, generation: int, config: EndpointConfig | None = None, **weights: int) -> None:
        self.provider.apply(config or self.config, self.state(**weights), generation=generation)

    def observed(self, config: EndpointConfig | None = None) -> EndpointState:
        observed = self.provider.observe(config or self.config)
        assert observed is not None
        return observed

    def drift(self, config: EndpointConfig | None = None) -> list[str]:
        return list(self.observed(config).drift)


def make_models(folder: Path) -> tuple[Deployment, Deployment]:
    """Write the models of a site; return the deployments blue and green."""
    blue = scaling_deployment(folder / "blue", name="blue", version="1", scale=2.0)
    return blue, scaling_deployment(folder / "green", name="green", version="2", scale=3.0)


def make_config(endpoint: str, provider: str = "local", **options: Json) -> EndpointConfig:
    return endpoint_config(endpoint, provider=provider, model="scale", options=options)
