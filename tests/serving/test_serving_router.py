from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import Deployment, EndpointState, TrafficSplit
from onnx_ops.errors import NotFoundError
from onnx_ops.protocol.routing_table import RoutingTable, build_next_table
from onnx_ops.serving.inference.deployments import TrafficRouter, mix_bits

USERS = [f"user-{number}".encode() for number in range(20_000)]


def table(weights: dict[str, int], previous: RoutingTable | None = None, content: str = "") -> RoutingTable:
    deployments = tuple(
        Deployment(
            name=name,
            model="m",
            version=name,
            variant="fp32",
            release=digest_bytes(b""),
            manifest=digest_bytes((name + content).encode()),
            location="/models",
        )
        for name in weights
    )
    return build_next_table(previous, EndpointState(deployments=deployments, split=TrafficSplit(weights=weights)))


def split(candidate: int, content: str = "") -> TrafficRouter:
    old = table({"old": 100}, content=content)
    return TrafficRouter.from_table(table({"old": 100 - candidate, "new": candidate}, old, content))


@given(st.binary(max_size=40), st.integers(0, 100), st.integers(0, 100))
def test_raising_the_candidate_only_moves_users_into_it(key: bytes, one: int, other: int) -> None:
    low, high = sorted((one, other))
    if low > 0 and split(low).route_key(key) == "new":
        assert split(high).route_key(key) == "new"


@given(st.binary(max_size=40), st.integers(0, 100))
def test_a_user_stays(key: bytes, weight: int) -> None:
    assert split(weight).route_key(key) == split(weight).route_key(key)


@pytest.mark.parametrize("weight", [1, 10, 50, 90])
def test_shares_of_users_are_those_of_the_split(weight: int) -> None:
    count = Counter(map(split(weight).route_key, USERS))["new"]
    deviation = (len(USERS) * weight / 100 * (1 - weight / 100)) ** 0.5
    assert abs(count - len(USERS) * weight / 100) < 4 * deviation


def test_the_next_experiment_draws_its_users_anew() -> None:
    first = {user for user in USERS if split(50, "release 1").route_key(user) == "new"}
    second = {user for user in USERS if split(50, "release 2").route_key(user) == "new"}
    deviation = (len(USERS) * 0.25 * 0.75) ** 0.5
    assert abs(len(first & second) - len(USERS) / 4) < 4 * deviation


def test_chance_covers_the_split() -> None:
    router = split(30)
    assert Counter(router.route_draw(number / 1000) for number in range(1000)) == {"new": 300, "old": 700}
    assert router.route_draw(0.9999999999999999) == "old"


@given(st.sets(st.integers(0, 2**32 - 1), max_size=200))
def test_mixing_keeps_numbers_apart_and_within_32_bits(values: set[int]) -> None:
    out = {mix_bits(value) for value in values}
    assert len(out) == len(values)
    assert all(0 <= value < 2**32 for value in out)


def test_pins_name_a_deployment() -> None:
    router = split(0)
    assert router.get_pinned({b"x-amzn-sagemaker-target-variant": b"new"}) == "new"
    assert router.get_pinned({b"azureml-model-deployment": b"old"}) == "old"
    assert router.get_pinned({b"x-user-key": b"a"}) is None
    with pytest.raises(NotFoundError, match="'grey'"):
        router.get_pinned({b"azureml-model-deployment": b"grey"})
