"""The split of traffic: shares, sticky users, and epochs with new draws."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.endpoint import EndpointState, TrafficSplit
from onnx_ops.errors import NotFoundError
from onnx_ops.protocol.messages import USER_CELLS
from onnx_ops.protocol.routing_table import RoutingTable, build_next_table
from onnx_ops.serving.inference.traffic_router import TrafficRouter, draw_slots, mix_bits
from tests.support.endpoints import fileless_deployment

USERS = [f"user-{number}".encode() for number in range(20_000)]


def table(
    weights: dict[str, int],
    previous: RoutingTable | None = None,
    content: str = "",
    *,
    epoch_s: float = 0.0,
    generation: int = 1,
) -> RoutingTable:
    deployments = tuple(fileless_deployment(name, name + content) for name in weights)
    split = TrafficSplit(weights=weights, epoch_s=epoch_s)
    return build_next_table(
        previous, EndpointState(deployments=deployments, split=split, generation=generation)
    )


def split(
    candidate: int, content: str = "", *, epoch_s: float = 0.0, generation: int = 1
) -> TrafficRouter:
    old = table({"old": 100}, content=content)
    weights = {"old": 100 - candidate, "new": candidate}
    return TrafficRouter.from_table(
        table(weights, old, content, epoch_s=epoch_s, generation=generation)
    )


def route(router: TrafficRouter, key: bytes, epoch: int = 0) -> str:
    return router.route_cell(router.get_draw(epoch), router.get_cell(key))


def new_cells(router: TrafficRouter, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which cells of users the candidate gets."""
    draw = router.get_draw(epoch)
    return np.array([router.route_cell(draw, cell) == "new" for cell in range(USER_CELLS)])


@given(st.binary(max_size=40), st.integers(0, 100), st.integers(0, 100))
def test_route_with_raised_candidate_weight_keeps_its_users(
    key: bytes, one: int, other: int
) -> None:
    low, high = sorted((one, other))
    if low > 0 and route(split(low), key) == "new":
        assert route(split(high), key) == "new"


@pytest.mark.parametrize("epoch_s", [0.0, 60.0])
@pytest.mark.parametrize("weight", [1, 10, 50, 90])
def test_route_of_many_users_matches_split_weights(weight: int, epoch_s: float) -> None:
    router = split(weight, epoch_s=epoch_s)
    count = Counter(route(router, user, 7) for user in USERS)["new"]
    deviation = (len(USERS) * weight / 100 * (1 - weight / 100)) ** 0.5
    assert abs(count - len(USERS) * weight / 100) < 4 * deviation


def test_route_in_next_experiment_draws_users_independently() -> None:
    one, next_one = split(50, "release 1"), split(50, "release 2")
    first = {user for user in USERS if route(one, user) == "new"}
    second = {user for user in USERS if route(next_one, user) == "new"}
    deviation = (len(USERS) * 0.25 * 0.75) ** 0.5
    assert abs(len(first & second) - len(USERS) / 4) < 4 * deviation


def test_get_draw_without_epochs_returns_same_draw() -> None:
    router = split(50)
    assert router.get_draw(1) is router.get_draw(2)
    assert router.get_draw(3).epoch == 0


def test_get_draw_of_epoch_is_stable_and_matches_weight_exactly() -> None:
    router, again = split(10, epoch_s=60.0), split(10, epoch_s=60.0)
    for epoch in (29_000_000, 29_000_001, 5):
        draw = router.get_draw(epoch)
        assert (draw.generation, draw.epoch) == (1, epoch)
        assert router.get_draw(epoch) is draw
        assert new_cells(router, epoch).sum() == USER_CELLS / 10
        assert again.get_draw(epoch).slots == draw.slots, "every server draws the same"


def test_draws_of_epochs_generations_and_experiments_are_independent() -> None:
    """Two draws of a tenth of the cells have a tenth of their cells in common.

    Each cell is drawn equally often.
    """
    routers = {
        "epoch": (split(10, epoch_s=60.0), split(10, epoch_s=60.0), 1),
        "generation": (split(10, epoch_s=60.0), split(10, epoch_s=60.0, generation=2), 0),
        "experiment": (split(10, epoch_s=60.0), split(10, "release 2", epoch_s=60.0), 0),
    }
    expected, deviation = USER_CELLS * 0.01, (USER_CELLS * 0.01 * 0.99) ** 0.5
    for one, other, later in routers.values():
        both = [int((new_cells(one, n) & new_cells(other, n + later)).sum()) for n in range(1, 21)]
        assert max(abs(count - expected) for count in both) < 5 * deviation
    times = np.sum([new_cells(routers["epoch"][0], epoch) for epoch in range(200)], axis=0)
    assert (times.mean(), times.var()) == (
        pytest.approx(20),
        pytest.approx(200 * 0.1 * 0.9, rel=0.1),
    )


def test_draw_slots_of_fixed_seed_returns_fixed_bytes() -> None:
    assert draw_slots("seed")[:12].hex() == "0a3f54191028251f07341c1b"


def test_router_slots_match_split_weights() -> None:
    router = split(30)
    assert Counter(router.slots) == {"new": 30, "old": 70}
    assert len(router.slots) == 100


@pytest.mark.parametrize(("weight", "comparable"), [(0, 100), (1, 1), (10, 10), (50, 50), (90, 10)])
def test_comparable_slots_of_versions_with_traffic_are_equal_in_number(
    weight: int, comparable: int
) -> None:
    router = split(weight)
    slots = Counter(
        name
        for name, is_comparable in zip(router.slots, router.comparable, strict=True)
        if is_comparable
    )
    assert slots == ({"new": comparable, "old": comparable} if weight else {"old": 100})


@given(st.sets(st.integers(0, 2**32 - 1), max_size=200))
def test_mix_bits_is_injective_within_32_bits(values: set[int]) -> None:
    out = {mix_bits(value) for value in values}
    assert len(out) == len(values)
    assert all(0 <= value < 2**32 for value in out)


def test_get_pinned_with_selection_header_returns_deployment() -> None:
    router = split(0)
    assert router.get_pinned({b"x-amzn-sagemaker-target-variant": b"new"}) == "new"
    assert router.get_pinned({b"azureml-model-deployment": b"old"}) == "old"
    assert router.get_pinned({b"x-user-key": b"a"}) is None
    with pytest.raises(NotFoundError, match="'grey'"):
        router.get_pinned({b"azureml-model-deployment": b"grey"})
