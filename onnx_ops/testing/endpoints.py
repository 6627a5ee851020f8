"""Conformance suite for endpoint providers, and real model folders to run it with."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn
from unittest.mock import patch

import pytest

from onnx_ops.domain.artifact import Manifest, digest_bytes, digest_file
from onnx_ops.domain.endpoint import (
    Deployment,
    EndpointConfig,
    EndpointState,
    TrafficSplit,
    serves_only,
)
from onnx_ops.errors import ConflictError, OnnxOpsError
from onnx_ops.ports.release import EndpointProvider
from onnx_ops.testing.registries import linear_model


def scaling_deployment(
    folder: Path, *, name: str, version: str, scale: float, model: str = "scale"
) -> Deployment:
    """Write a model of y = scale * x to `folder`, and return its deployment.

    Inputs and outputs are float32 of shape (batch, 2).
    """
    folder.mkdir(parents=True)
    linear_model(folder / "model.onnx", slope=scale)
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
    """Return a state with these deployments and weights.

    `weights` has the percentage of traffic of each deployment, by name.
    """
    return EndpointState(deployments=deployments, split=TrafficSplit(weights=weights))


Disturbance = Literal["none", "error", "lost answer", "kill"]


class Killed(BaseException):
    """Simulated kill of the process.

    Like a signal, it is not caught by handlers of ordinary errors.
    """


@contextmanager
def disturbed_http(fault: Disturbance, at: int = 0) -> Iterator[Sized]:
    """Disturb requests of `http.client` from number `at` on.

    `http.client` is the base of urllib, requests, boto3 and azure-core. Numbers begin at 0. The
    context manager yields a list with one entry for each request. With `error`, the service cannot
    be reached. With `none`, nothing is disturbed. Otherwise, the first disturbed request takes
    effect. Then its answer and all later requests are lost (`lost answer`), or the client is killed
    (`kill`).
    """
    client, own, hosts = http.client.HTTPConnection, threading.get_ident(), list[str]()
    send, receive = client.endheaders, client.getresponse

    def fail(*parts: http.client.HTTPConnection | http.client.HTTPResponse) -> NoReturn:
        for part in parts:
            part.close()
        # In another thread, `Killed` would end a thread of the client, so it is raised only in the
        # test's thread.
        dies = fault == "kill" and threading.get_ident() == own
        raise Killed if dies else ConnectionResetError("injected")

    def endheaders(connection: http.client.HTTPConnection, *arguments: Any, **options: Any) -> None:
        hosts.append(connection.host)
        if fault != "none" and len(hosts) - 1 >= at + (fault != "error"):
            fail(connection)
        send(connection, *arguments, **options)

    def getresponse(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        response = receive(connection)
        if fault in ("lost answer", "kill") and len(hosts) - 1 == at:
            fail(connection, response)
        return response

    with (
        patch.object(client, "endheaders", endheaders),
        patch.object(client, "getresponse", getresponse),
    ):
        yield hosts


class EndpointProviderSuite:
    """Conformance of an endpoint provider.

    Subclass it, and define the fixtures `provider` and `config`. Override `scale` for another
    protocol, and `deployments` for models that are not loaded from folders. Override `disturbed`
    for a service that is not reached through `http.client`.
    """

    def disturbed(self, fault: Disturbance, at: int = 0) -> AbstractContextManager[Sized]:
        """Disturb the provider's requests to its service from number `at` on.

        Numbers begin at 0. Yield a collection with one entry for each request.
        """
        return disturbed_http(fault, at)

    @pytest.fixture
    def chosen(self) -> Callable[[Iterable[int]], Sequence[int]]:
        """Return a function that chooses where disturbances of a rollback start.

        The function gets the numbers of the rollback's requests, and by default returns all of
        them. Each repetition of the rollback is disturbed from a different chosen request on.
        """
        return list

    @pytest.fixture
    def deployments(self, tmp_path: Path) -> tuple[Deployment, Deployment]:
        """Return two real versions of one registered model.

        `blue` doubles its input, `green` triples it.
        """
        blue = scaling_deployment(tmp_path / "models" / "blue", name="blue", version="1", scale=2.0)
        green = scaling_deployment(
            tmp_path / "models" / "green", name="green", version="2", scale=3.0
        )
        return blue, green

    def scale(self, address: str, *, user: str | None = None) -> float:
        """Return the factor by which the answering model multiplies its input.

        `user` is the key of the user who sends the request.
        """
        headers = {"content-type": "application/json"}
        if user is not None:
            headers["x-user-key"] = user
        body = json.dumps({"inputs": {"x": [[1.0, 1.0]]}}).encode()
        request = urllib.request.Request(f"{address}/invocations", body, headers)  # noqa: S310 (the provider's address)
        with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310
            return float(json.load(response)["predictions"]["y"][0][0])

    def serves(
        self, provider: EndpointProvider, config: EndpointConfig, one: Deployment, y: float
    ) -> EndpointState:
        """Check that deployment `one` serves, and return the endpoint's state.

        The deployment must have all traffic, and multiply its input by `y`.
        """
        observed, address = provider.observe(config), provider.address(config)
        assert observed is not None
        assert serves_only(observed, one)
        assert address is not None
        assert self.scale(address) == y
        return observed

    def test_observe_before_first_apply_returns_none(
        self, provider: EndpointProvider, config: EndpointConfig
    ) -> None:
        assert provider.observe(config) is None
        assert provider.address(config) is None
        assert provider.observe(config) is None

    def test_apply_is_observed_and_serves_requests(
        self,
        provider: EndpointProvider,
        config: EndpointConfig,
        deployments: tuple[Deployment, Deployment],
    ) -> None:
        blue, green = deployments
        applied = state_of(blue, green, blue=90, green=10)
        provider.apply(config, applied, generation=4)
        observed = provider.observe(config)
        assert observed is not None
        assert observed.is_equivalent(applied)
        assert observed.generation == 4
        assert sum(observed.split.weights.values()) == 100
        address = provider.address(config)
        assert address is not None
        assert self.scale(address) in (2.0, 3.0)
        for memory in provider.list_memory(config):
            assert memory.workers > 0
            assert min(memory.worker_bytes, memory.available_bytes) >= 0

    def test_apply_repeated_changes_nothing(
        self,
        provider: EndpointProvider,
        config: EndpointConfig,
        deployments: tuple[Deployment, Deployment],
    ) -> None:
        state = state_of(deployments[0], blue=100)
        provider.apply(config, state, generation=1)
        first, address = provider.observe(config), provider.address(config)
        provider.apply(config, state, generation=1)
        assert provider.observe(config) == first
        assert provider.address(config) == address

    def test_apply_of_older_or_conflicting_generation_raises_conflict_error_and_changes_nothing(
        self,
        provider: EndpointProvider,
        config: EndpointConfig,
        deployments: tuple[Deployment, Deployment],
    ) -> None:
        blue, green = deployments
        provider.apply(config, state_of(blue, green, blue=50, green=50), generation=7)
        before = provider.observe(config)
        for generation in (6, 7):
            with pytest.raises(ConflictError):
                provider.apply(config, state_of(blue, blue=100), generation=generation)
            assert provider.observe(config) == before

    def test_apply_of_each_rollout_step_serves_deployment_with_traffic(
        self,
        provider: EndpointProvider,
        config: EndpointConfig,
        deployments: tuple[Deployment, Deployment],
    ) -> None:
        """Check first deployment, shift, clean-up, and rollback to a dropped deployment."""
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
            assert self.serves(provider, config, state.leader(), scale).is_equivalent(state)

    def test_roll_back_without_model_files_changes_traffic_weights_only(
        self,
        provider: EndpointProvider,
        config: EndpointConfig,
        deployments: tuple[Deployment, Deployment],
    ) -> None:
        """Check that a loaded deployment gets all traffic by a change of weights."""
        blue, green = deployments
        if "split" not in provider.capabilities(config.options):
            return
        provider.apply(config, state_of(blue, green, blue=90, green=10), generation=1)
        lost = [replace(one, location=f"{one.location}-lost") for one in (blue, green)]
        for generation in (2, 2, 3):
            provider.roll_back(config, state_of(*lost, blue=100, green=0), generation=generation)
        assert self.serves(provider, config, blue, 2.0).find_deployment(green) is not None
        with pytest.raises(ConflictError):
            provider.roll_back(config, state_of(*lost, blue=0, green=100), generation=2)

    def test_roll_back_to_dropped_deployment_deploys_it_again(
        self,
        provider: EndpointProvider,
        config: EndpointConfig,
        deployments: tuple[Deployment, Deployment],
    ) -> None:
        blue, green = deployments
        provider.apply(config, state_of(green, green=100), generation=1)
        provider.roll_back(config, state_of(blue, green, blue=100, green=0), generation=2)
        self.serves(provider, config, blue, 2.0)

    @pytest.mark.parametrize("fault", ["error", "lost answer", "kill"])
    def test_roll_back_after_failed_request_succeeds_when_repeated(
        self,
        provider: EndpointProvider,
        config: EndpointConfig,
        deployments: tuple[Deployment, Deployment],
        chosen: Callable[[Iterable[int]], Sequence[int]],
        fault: Disturbance,
    ) -> None:
        """Check that a rollback succeeds when it is repeated after a failed request.

        After a failure at any request, a reconciler observes the endpoint, moves the traffic back,
        and cleans up.
        """
        blue, green = deployments
        split = "split" in provider.capabilities(config.options)
        bad = state_of(blue, green, blue=90, green=10) if split else state_of(green, green=100)
        back = state_of(blue, green, blue=100, green=0)
        provider.apply(config, bad, generation=1)
        with self.disturbed("none") as hosts:
            provider.roll_back(config, back, generation=2)
        assert len(hosts), "override `disturbed`: no request went through `http.client`"
        for turn, at in enumerate(chosen(range(len(hosts))), start=1):
            provider.apply(config, bad, generation=2 * turn + 1)
            done = False
            with suppress(OnnxOpsError, Killed), self.disturbed(fault, at):
                provider.roll_back(config, back, generation=2 * turn + 2)
                done = True
            seen = provider.observe(config)
            back_again = seen is not None and serves_only(seen, blue)
            assert back_again or (not done and (seen is None or seen.is_equivalent(bad)))
            provider.roll_back(config, back, generation=2 * turn + 2)
            self.serves(provider, config, blue, 2.0)
        provider.apply(config, state_of(blue, blue=100), generation=2 * len(hosts) + 3)
        assert self.serves(provider, config, blue, 2.0).is_equivalent(state_of(blue, blue=100))

    def test_sticky_split_keeps_users_on_their_deployment(
        self,
        provider: EndpointProvider,
        config: EndpointConfig,
        deployments: tuple[Deployment, Deployment],
    ) -> None:
        if "sticky" not in provider.capabilities(config.options):
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

    def test_observe_of_split_returns_its_epoch_duration(
        self,
        provider: EndpointProvider,
        config: EndpointConfig,
        deployments: tuple[Deployment, Deployment],
    ) -> None:
        if "epochs" not in provider.capabilities(config.options):
            return
        blue, green = deployments
        sticky = state_of(blue, green, blue=50, green=50)
        for generation, epoch_s in enumerate((60.0, 30.0, 0.0), 1):
            state = replace(sticky, split=replace(sticky.split, epoch_s=epoch_s))
            provider.apply(config, state, generation=generation)
            observed = provider.observe(config)
            assert observed is not None
            assert observed.is_equivalent(state)

    def test_remove_ends_endpoint_and_next_apply_starts_anew(
        self,
        provider: EndpointProvider,
        config: EndpointConfig,
        deployments: tuple[Deployment, Deployment],
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

    def test_delete_orphan_removes_listed_orphans_and_keeps_serving_resources(
        self,
        provider: EndpointProvider,
        config: EndpointConfig,
        deployments: tuple[Deployment, Deployment],
    ) -> None:
        blue, green = deployments
        provider.apply(config, state_of(blue, green, blue=100, green=0), generation=1)
        provider.apply(config, state_of(blue, blue=100), generation=2)
        assert not provider.list_orphans(config, frozenset({blue.manifest, green.manifest}))
        for leftover in provider.list_orphans(config, frozenset({blue.manifest})):
            provider.delete_orphan(config, leftover)
            provider.delete_orphan(config, leftover)
        assert not provider.list_orphans(config, frozenset())
        self.serves(provider, config, blue, 2.0)
        provider.apply(config, state_of(green, green=100), generation=3)
        self.serves(provider, config, green, 3.0)
