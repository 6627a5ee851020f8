"""Conformance suite for endpoint providers, and real model folders to run it with."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.domain.artifact import Manifest, digest_bytes, digest_file
from onnx_ops.domain.endpoint import Deployment, EndpointConfig, EndpointState, TrafficSplit, gives_all_to
from onnx_ops.errors import Conflict
from onnx_ops.ports.release import EndpointProvider


def scaling_deployment(folder: Path, *, name: str, version: str, scale: float, model: str = "scale") -> Deployment:
    """A real model that computes y = scale * x on float32 of shape (batch, 2), written into `folder`."""
    from onnx import TensorProto, helper, save_model

    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "scale"], ["y"])],
        model,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor("scale", TensorProto.FLOAT, [1], [scale])],
    )
    folder.mkdir(parents=True)
    save_model(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), folder / "model.onnx"
    )
    return Deployment(
        name=name,
        model=model,
        version=version,
        variant="fp32",
        release=digest_bytes(version.encode()),
        manifest=Manifest(files={"model.onnx": digest_file(folder / "model.onnx")}).digest(),
        location=str(folder),
    )


def state_of(*deployments: Deployment, **weights: int) -> EndpointState:
    """A state with these deployments and the percentage of traffic of each by name."""
    return EndpointState(deployments=deployments, split=TrafficSplit(weights=weights))


class EndpointProviderSuite:
    """What every provider must do. Subclass it, and give the fixtures `provider` and `config`.

    A provider whose address speaks another protocol overrides `scale`, one that loads models from elsewhere
    `deployments`.
    """

    @pytest.fixture
    def deployments(self, tmp_path: Path) -> tuple[Deployment, Deployment]:
        """Two real models of one registered model: `blue` doubles, `green` triples."""
        blue = scaling_deployment(tmp_path / "models" / "blue", name="blue", version="1", scale=2.0)
        green = scaling_deployment(tmp_path / "models" / "green", name="green", version="2", scale=3.0)
        return blue, green

    def scale(self, address: str, *, user: str | None = None) -> float:
        """Which model answers a request: the factor that it computes."""
        headers = {"content-type": "application/json"}
        if user is not None:
            headers["x-user-key"] = user
        body = json.dumps({"inputs": {"x": [[1.0, 1.0]]}}).encode()
        request = urllib.request.Request(f"{address}/invocations", body, headers)  # noqa: S310 (the provider's address)
        with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310
            return float(json.load(response)["predictions"]["y"][0][0])

    def test_nothing_is_observed_before_the_first_apply(
        self, provider: EndpointProvider, config: EndpointConfig
    ) -> None:
        assert provider.observe(config) is None
        assert provider.address(config) is None
        assert provider.observe(config) is None

    def test_what_was_applied_is_observed_and_answers(
        self, provider: EndpointProvider, config: EndpointConfig, deployments: tuple[Deployment, Deployment]
    ) -> None:
        blue, green = deployments
        applied = state_of(blue, green, blue=90, green=10)
        provider.apply(config, applied, generation=4)
        observed = provider.observe(config)
        assert observed is not None
        assert observed.same_as(applied)
        assert observed.generation == 4
        assert sum(observed.split.weights.values()) == 100
        address = provider.address(config)
        assert address is not None
        assert self.scale(address) in (2.0, 3.0)

    def test_applying_twice_changes_nothing(
        self, provider: EndpointProvider, config: EndpointConfig, deployments: tuple[Deployment, Deployment]
    ) -> None:
        state = state_of(deployments[0], blue=100)
        provider.apply(config, state, generation=1)
        first, address = provider.observe(config), provider.address(config)
        provider.apply(config, state, generation=1)
        assert provider.observe(config) == first
        assert provider.address(config) == address

    def test_an_older_generation_is_refused_and_changes_nothing(
        self, provider: EndpointProvider, config: EndpointConfig, deployments: tuple[Deployment, Deployment]
    ) -> None:
        blue, green = deployments
        provider.apply(config, state_of(blue, green, blue=50, green=50), generation=7)
        before = provider.observe(config)
        with pytest.raises(Conflict):
            provider.apply(config, state_of(blue, blue=100), generation=6)
        assert provider.observe(config) == before

    def test_each_step_answers_by_the_deployment_that_has_the_traffic(
        self, provider: EndpointProvider, config: EndpointConfig, deployments: tuple[Deployment, Deployment]
    ) -> None:
        """First deployment, shift, clean-up, and the way back to a deployment that was dropped."""
        blue, green = deployments
        steps = (
            (state_of(blue, blue=100), 2.0),
            (state_of(blue, green, blue=100, green=0), 2.0),
            (state_of(blue, green, blue=0, green=100), 3.0),
            (state_of(blue, green, blue=100, green=0), 2.0),
            (state_of(green, green=100), 3.0),
            (state_of(blue, blue=100), 2.0),
        )
        for generation, (state, scale) in enumerate(steps, start=1):
            provider.apply(config, state, generation=generation)
            observed, address = provider.observe(config), provider.address(config)
            assert observed is not None
            assert observed.same_as(state)
            assert address is not None
            assert self.scale(address) == scale

    def test_a_rollback_needs_no_files_and_loads_nothing(
        self, provider: EndpointProvider, config: EndpointConfig, deployments: tuple[Deployment, Deployment]
    ) -> None:
        """What has the traffic already, or stands beside it, gets all of it by a change of weights."""
        blue, green = deployments
        if "split" not in provider.capabilities(config.settings):
            return
        provider.apply(config, state_of(blue, green, blue=90, green=10), generation=1)
        lost = [replace(one, location=f"{one.location}-lost") for one in (blue, green)]
        for generation in (2, 2, 3):
            provider.roll_back(config, state_of(*lost, blue=100, green=0), generation=generation)
        observed, address = provider.observe(config), provider.address(config)
        assert observed is not None
        assert gives_all_to(observed, blue)
        assert observed.held(green) is not None
        assert address is not None
        assert self.scale(address) == 2.0
        with pytest.raises(Conflict):
            provider.roll_back(config, state_of(*lost, blue=0, green=100), generation=2)

    def test_a_rollback_to_what_was_let_go_brings_it_back(
        self, provider: EndpointProvider, config: EndpointConfig, deployments: tuple[Deployment, Deployment]
    ) -> None:
        blue, green = deployments
        provider.apply(config, state_of(green, green=100), generation=1)
        provider.roll_back(config, state_of(blue, green, blue=100, green=0), generation=2)
        observed, address = provider.observe(config), provider.address(config)
        assert observed is not None
        assert gives_all_to(observed, blue)
        assert address is not None
        assert self.scale(address) == 2.0

    def test_users_stay_where_they_are(
        self, provider: EndpointProvider, config: EndpointConfig, deployments: tuple[Deployment, Deployment]
    ) -> None:
        if "sticky" not in provider.capabilities():
            return
        blue, green = deployments
        provider.apply(config, state_of(blue, blue=100), generation=1)
        provider.apply(config, state_of(blue, green, blue=50, green=50), generation=2)
        address = provider.address(config)
        assert address is not None
        users = [f"user-{number}" for number in range(20)]
        first = [self.scale(address, user=user) for user in users]
        assert [self.scale(address, user=user) for user in users] == first
        assert set(first) == {2.0, 3.0}

    def test_removing_ends_it_and_a_new_one_starts_afresh(
        self, provider: EndpointProvider, config: EndpointConfig, deployments: tuple[Deployment, Deployment]
    ) -> None:
        blue, green = deployments
        provider.remove(config)
        provider.apply(config, state_of(blue, blue=100), generation=7)
        address = provider.address(config)
        provider.remove(config)
        provider.remove(config)
        assert provider.observe(config) is None
        assert address is not None
        with pytest.raises(urllib.error.URLError):
            self.scale(address)
        provider.apply(config, state_of(green, green=100), generation=8)
        again = provider.address(config)
        assert again is not None
        assert self.scale(again) == 3.0

    def test_what_no_release_needs_is_told_and_removed_and_what_serves_stays(
        self, provider: EndpointProvider, config: EndpointConfig, deployments: tuple[Deployment, Deployment]
    ) -> None:
        blue, green = deployments
        provider.apply(config, state_of(blue, green, blue=100, green=0), generation=1)
        provider.apply(config, state_of(blue, blue=100), generation=2)
        assert not provider.leftovers(config, frozenset({blue.manifest, green.manifest}))
        for leftover in provider.leftovers(config, frozenset({blue.manifest})):
            provider.discard(config, leftover)
            provider.discard(config, leftover)
        assert not provider.leftovers(config, frozenset())
        address = provider.address(config)
        assert address is not None
        assert self.scale(address) == 2.0
        provider.apply(config, state_of(green, green=100), generation=3)
        assert self.scale(address) == 3.0
