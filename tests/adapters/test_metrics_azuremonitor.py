"""Azure Monitor as a source of counts.

The fake answers real requests and reports their metrics.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.adapters.endpoints.azureml_plan import build_azure_name
from onnx_ops.adapters.metrics.azuremonitor import AzureMonitorMetrics
from onnx_ops.domain.rollout_observations import LatencyQuantiles
from onnx_ops.errors import ServiceUnavailableError, UserError
from onnx_ops.testing.endpoints import scaling_deployment
from onnx_ops.testing.fakes import FakeClock
from tests.adapters.azureml_parts import config_of, inside
from tests.support.clouds.azureml import AzureCloud, FaultRule
from tests.support.extras import require

require(
    "azure.ai.ml", reason="LOUD: the extra `azure` is not installed, so Azure Monitor is not tested"
)

NOON = datetime.datetime(2026, 11, 20, 12, tzinfo=datetime.UTC).timestamp()


def wind(clock: FakeClock, at: float) -> None:
    clock.advance(at - clock.now())


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOON)


@pytest.fixture
def cloud(tmp_path: Path, clock: FakeClock) -> Iterator[AzureCloud]:
    with AzureCloud(tmp_path / "cloud", clock=clock) as cloud, inside(cloud):
        yield cloud


def test_azure_monitor_read_returns_counts_and_latencies_of_complete_minutes(
    cloud: AzureCloud, clock: FakeClock, tmp_path: Path
) -> None:
    name = build_azure_name(scaling_deployment(tmp_path / "m", name="v1", version="1", scale=2.0))
    source, config = AzureMonitorMetrics({}, clock), config_of(cloud)
    for minute, status in ((0, 200), (0, 200), (1, 500), (1, 429), (2, 404), (2, 200), (30, 200)):
        wind(clock, NOON + 60 * minute)
        cloud.monitor.count("scaling", name, status, 0.010 if status == 200 else 0.050)
    cloud.monitor.count("scaling", "v12-" + name[3:], 200, 1.0)
    wind(clock, NOON + 6 * 60 + 17)
    reading = source.read(config, {"v1": None, "v2": None})
    assert reading.at == NOON + 3 * 60
    assert reading.origin == "2026-11-20T00:00:00Z"
    tally = reading.tallies["v1"]
    assert (tally.requests, tally.errors, tally.refused) == (6, 2, 1)
    assert (tally.over_p50, tally.over_p99) == (None, None)
    assert reading.tallies["v2"].requests == 0
    assert reading.quantiles == {"v1": LatencyQuantiles(p50_s=0.010, p99_s=0.050)}
    wind(clock, NOON + 40 * 60)
    later = source.read(config, {"v1": None})
    assert later.origin == reading.origin
    assert later.tallies["v1"].requests == 7
    since = later.tallies["v1"].minus(tally)
    assert since is not None
    assert since.requests == 1


def test_azure_monitor_read_three_minutes_after_midnight_starts_new_origin(
    cloud: AzureCloud, clock: FakeClock, tmp_path: Path
) -> None:
    name = build_azure_name(scaling_deployment(tmp_path / "m", name="v1", version="1", scale=2.0))
    midnight = NOON + 12 * 3600
    wind(clock, midnight - 60)
    cloud.monitor.count("scaling", name, 200, 0.01)
    source = AzureMonitorMetrics({}, clock)
    wind(clock, midnight + 179)
    assert source.read(config_of(cloud), {"v1": None}).origin == "2026-11-20T00:00:00Z"
    wind(clock, midnight + 180)
    fresh = source.read(config_of(cloud), {"v1": None})
    assert (fresh.origin, fresh.at, fresh.tallies["v1"].requests) == (
        "2026-11-21T00:00:00Z",
        midnight,
        0,
    )


def test_azure_monitor_capabilities_are_quantiles_and_latencies_returns_none(
    cloud: AzureCloud, clock: FakeClock
) -> None:
    source, config = AzureMonitorMetrics({}, clock), config_of(cloud)
    assert source.capabilities() == {"quantiles"}
    assert source.latencies(config, "v1") is None


def test_azure_monitor_metrics_when_throttled_or_with_wrong_options_raise_error(
    cloud: AzureCloud, clock: FakeClock
) -> None:
    source, config = AzureMonitorMetrics({}, clock), config_of(cloud)
    cloud.fault_rule = lambda *_: FaultRule(fault="throttle")
    with pytest.raises(ServiceUnavailableError):
        source.read(config, {"v1": None})
    cloud.fault_rule = lambda *_: None
    with pytest.raises(UserError, match="subscription"):
        source.read(replace(config, options={}), {"v1": None})
    with pytest.raises(UserError, match="unknown key 'window'; azuremonitor has no options"):
        AzureMonitorMetrics({"window": 3})
