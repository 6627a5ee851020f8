"""CloudWatch's counts of an endpoint's variants.

The fake records them from real invocations.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from unittest.mock import MagicMock

import pytest

from onnx_ops import plugins
from onnx_ops.adapters.metrics import cloudwatch
from onnx_ops.adapters.metrics.cloudwatch import CloudWatchMetrics
from onnx_ops.domain.rollout_observations import diff_readings
from onnx_ops.errors import ServiceUnavailableError, UserError
from tests.adapters.sagemaker_cloud import Site, config_of
from tests.support.clouds.sagemaker import SETTINGS

pytestmark = pytest.mark.services

BOTH = {"blue": None, "green": None}


def test_cloudwatch_read_returns_counts_of_complete_minutes_since_last_change(site: Site) -> None:
    from botocore.exceptions import ClientError

    config = config_of("counted")
    headers = site.client("sagemaker").list_models()["ResponseMetadata"]["HTTPHeaders"]
    # CloudWatch counts by the minute, so the test starts at the beginning of a minute.
    site.fake.shift(60 - parsedate_to_datetime(headers["date"]).second)
    site.apply(1, config, blue=80, green=20)
    # The requests in the minute of the change can belong to the previous state.
    site.invoke("counted", "blue")
    source = site.provider.metrics(SETTINGS)
    assert isinstance(source, CloudWatchMetrics)
    assert source.capabilities() == {"quantiles"}
    assert source.latencies(config, "blue") is None
    site.fake.shift(240)
    first = source.read(config, BOTH)
    assert {name: tally.requests for name, tally in first.tallies.items()} == {
        "blue": 0,
        "green": 0,
    }
    for _ in range(50):
        site.invoke("counted")
    with pytest.raises(ClientError, match=r"422|400"):
        site.client("sagemaker-runtime").invoke_endpoint(
            EndpointName="counted",
            ContentType="application/json",
            Body=json.dumps({"inputs": {}}).encode(),
            TargetVariant="green",
        )
    assert source.read(config, BOTH).tallies["blue"].requests == 0
    site.fake.shift(180)
    second = source.read(config, BOTH)
    assert {name: tally.requests for name, tally in second.tallies.items()} == {
        "blue": 40,
        "green": 11,
    }
    assert (second.tallies["green"].refused, second.tallies["green"].errors) == (1, 0)
    assert second.tallies["green"].over_p50 is None
    between = diff_readings(first, second, step=0, stable="blue", candidate="green")
    assert between is not None
    assert (between.stable.requests, between.canary.requests) == (40, 11)
    site.apply(2, config, blue=50, green=50)
    assert source.read(config, BOTH).origin != second.origin


def test_cloudwatch_read_returns_percentiles_of_last_complete_minute(site: Site) -> None:
    config = config_of("percentiles")
    site.apply(1, config, blue=100)
    source = plugins.load("metrics", "cloudwatch", {"delay": "0 s"})
    site.fake.shift(180)
    begun_s = time.monotonic()
    for _ in range(30):
        site.invoke("percentiles")
    elapsed_s = time.monotonic() - begun_s
    site.fake.shift(60)
    reading = source.read(config, {"blue": None})
    assert reading.tallies["blue"].requests == 30
    assert 0 < reading.quantiles["blue"].p50_s <= reading.quantiles["blue"].p99_s < elapsed_s
    site.fake.shift(60)
    later = source.read(config, {"blue": None})
    assert later.tallies == reading.tallies
    assert later.quantiles == {}


def test_cloudwatch_read_a_day_after_change_starts_with_whole_hour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CloudWatch rounds start times down to whole hours after 63 days."""
    changed, aws = datetime(2026, 3, 1, 12, 7, 30, tzinfo=UTC), MagicMock()
    paginate = aws.get_paginator.return_value.paginate
    monkeypatch.setattr(cloudwatch, "make_clients", lambda *_, **__: lambda _: aws)
    source, origins, queries = CloudWatchMetrics({}), [], []
    for days in (0.5, 2, 70):
        date = format_datetime(changed + timedelta(days=days), usegmt=True)
        aws.describe_endpoint.return_value = {
            "EndpointStatus": "InService",
            "LastModifiedTime": changed,
            "ResponseMetadata": {"HTTPHeaders": {"date": date}},
        }
        paginate.reset_mock()
        origins.append(source.read(config_of("old"), BOTH).origin)
        query = paginate.call_args_list[0].kwargs
        (period_s,) = {q["MetricStat"]["Period"] for q in query["MetricDataQueries"]}
        queries.append((query["StartTime"], period_s))
    minute, hour = changed.replace(minute=8, second=0), changed.replace(hour=13, minute=0, second=0)
    assert queries == [(minute, 60), (hour, 3600), (hour, 3600)]
    assert origins[0] != origins[1] == origins[2]


def test_cloudwatch_read_while_endpoint_is_deleted_raises_service_unavailable_error(
    site: Site,
) -> None:
    config = config_of("changing")
    site.apply(1, config, blue=100)
    site.fake.behave(reads=9)
    site.client("sagemaker").delete_endpoint(EndpointName="changing")
    with pytest.raises(ServiceUnavailableError, match="not in service"):
        site.provider.metrics(SETTINGS).read(config, {"blue": None})


def test_cloudwatch_read_of_guarded_endpoint_returns_no_tallies(site: Site) -> None:
    config = config_of("one-variant", strategy="guarded")
    site.apply(1, config, blue=100)
    assert site.provider.metrics(SETTINGS).read(config, {"blue": None}).tallies == {}


@pytest.mark.parametrize("options", [{"dealy": "1 s"}, {"delay": "soon"}, {"delay": "-1 s"}])
def test_cloudwatch_metrics_with_wrong_options_raise_user_error(
    options: dict[str, str | int],
) -> None:
    with pytest.raises(UserError, match="delay"):
        CloudWatchMetrics(options)
