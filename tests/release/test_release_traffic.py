"""The traffic of an endpoint, measured from its counts or read from its ledger."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest

from onnx_ops.domain.rollout_observations import (
    USER_BLOCKS,
    GenerationCounts,
    GenerationUnits,
    MetricsReading,
    RequestCounts,
    UnitCounts,
    UserBlocks,
)
from onnx_ops.errors import NotFoundError, ServiceUnavailableError, UserError
from onnx_ops.release import traffic
from onnx_ops.release.traffic import measure_traffic, read_recorded_traffic
from tests.release.release_parts import Scene
from tests.release.release_scenes import begun, serving


def make_sleep(scene: Scene, requests: int, **more: int) -> Callable[[float], None]:
    """Return a sleep in which the stable version gets requests."""
    counted = scene.world.provider.counted

    def sleep(seconds: float) -> None:
        counted.clock.advance(seconds)
        counted.count("v1", requests=requests, over_p50=0, over_p99=0, **more)

    return sleep


@pytest.mark.parametrize("make_scene", [begun, lambda: serving("a")])
def test_measure_traffic_returns_rate_errors_and_latencies_of_window(
    make_scene: Callable[[], Scene],
) -> None:
    scene = make_scene()
    measured = measure_traffic(scene.context, "digits", 20.0, sleep=make_sleep(scene, 60, errors=3))
    assert measured.rate == pytest.approx(3.0)
    assert measured.errors == pytest.approx(0.05)
    assert measured.counted == 60
    assert sum(measured.latencies) == 1000


def test_measure_traffic_of_rollout_reads_candidate_first(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = begun()
    counted = scene.world.provider.counted
    read = Mock(wraps=counted.read)
    monkeypatch.setattr(counted, "read", read)
    measure_traffic(scene.context, "digits", 20.0, sleep=make_sleep(scene, 60))
    assert [list(call.args[1]) for call in read.call_args_list] == [["v2", "v1"]] * 2


def test_measure_traffic_without_requests_raises_user_error() -> None:
    scene = serving("a")
    with pytest.raises(UserError, match="no request was counted in 20 s"):
        measure_traffic(scene.context, "digits", 20.0, sleep=make_sleep(scene, 0))


def test_measure_traffic_without_new_reading_raises_service_unavailable_error() -> None:
    with pytest.raises(ServiceUnavailableError, match="no counts of the measured time"):
        measure_traffic(serving("a").context, "digits", 20.0, sleep=lambda _: None)


def test_measure_traffic_with_unreachable_metrics_source_raises_service_unavailable_error() -> None:
    scene = serving("a")
    scene.world.provider.counted.down = True
    with pytest.raises(ServiceUnavailableError, match="does not answer"):
        measure_traffic(scene.context, "digits", 20.0, sleep=lambda _: None)


def test_measure_traffic_of_endpoint_without_version_or_unknown_endpoint_raises_error() -> None:
    with pytest.raises(UserError, match="serves no version"):
        measure_traffic(serving().context, "digits", 20.0, sleep=lambda _: None)
    with pytest.raises(NotFoundError):
        measure_traffic(serving().context, "nowhere", 20.0, sleep=lambda _: None)


def test_read_recorded_traffic_returns_rate_of_last_rollout() -> None:
    scene = begun()
    assert read_recorded_traffic(scene.context, "digits") is None
    counted = scene.world.provider.counted
    for _ in range(3):
        counted.clock.advance(60.0)
        counted.count("v1", requests=108, errors=1)
        counted.count("v2", requests=12)
        scene.reconcile()
    recorded = read_recorded_traffic(scene.context, "digits")
    assert recorded is not None
    assert recorded.rate == pytest.approx(2.0)
    assert recorded.errors == pytest.approx(1 / 108)
    assert recorded.users == 0


def make_reading(requests: tuple[int, ...]) -> MetricsReading:
    blocks = UserBlocks(requests=requests, events=(0,) * len(requests))
    counts = GenerationCounts(
        origin="o",
        generation=1,
        tallies={"v1": RequestCounts(requests=sum(requests))},
        blocks={"v1": {"errors": blocks}},
    )
    return MetricsReading(at=0.0, counts=(counts,))


@pytest.mark.parametrize("users", [1, 10, 300])
def test_estimate_users_is_within_factor_two_of_equally_active_users(users: int) -> None:
    random = np.random.default_rng(users)
    blocks = random.integers(0, USER_BLOCKS, users)
    requests = np.bincount(blocks[random.integers(0, users, 20_000)], minlength=USER_BLOCKS)
    found = traffic._estimate_users(make_reading((*requests.tolist(), 0)), "v1")
    assert users / 2 <= found <= 2 * users


def test_estimate_users_of_mostly_keyless_requests_or_without_blocks_returns_0() -> None:
    assert traffic._estimate_users(make_reading((*([1] * USER_BLOCKS), 1000)), "v1") == 0
    assert traffic._estimate_users(MetricsReading(at=0.0), "v1") == 0


def test_estimate_users_of_equal_blocks_returns_number_of_requests() -> None:
    found = traffic._estimate_users(make_reading((*([10] * USER_BLOCKS), 0)), "v1")
    assert found == 10 * USER_BLOCKS


def test_solve_users_inverts_units_of_epoch_or_returns_0_if_nearly_each_request_is_unit() -> None:
    units = {"errors": UnitCounts(candidate=(10,), stable=(630,))}
    split = GenerationUnits(generation=1, step=0, percent=10, is_drawn=True, epochs=10, units=units)
    # 100 users send 100 requests an epoch, so 63 of them are active: 1 - 1/e.
    assert 95 <= traffic._solve_users(100 / 60, split, 60.0) <= 110
    assert traffic._solve_users(65 / 60, split, 60.0) == 0
