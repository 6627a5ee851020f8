"""CloudWatch's counts of an endpoint's variants, as the fake has written them of real invocations."""

from __future__ import annotations

import json
import time
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest

from onnx_ops import plugins
from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.adapters.metrics.cloudwatch import CloudWatchMetrics
from onnx_ops.domain.rollout_observations import diff_readings
from onnx_ops.errors import ServiceUnavailableError, UserError
from onnx_ops.testing.endpoints import scaling_deployment, state_of
from tests.adapters.sagemaker_cloud import cloud, config_of, fake, invoke
from tests.support.clouds.sagemaker import FakeSageMaker, client

__all__ = ["cloud", "fake"]
pytestmark = pytest.mark.services

BOTH = {"blue": None, "green": None}


def begin_minute(fake: FakeSageMaker) -> None:
    """Put the cloud's clock to the begin of a minute."""
    answer = client(fake, "sagemaker").list_models()
    fake.shift(60 - parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).second)


def test_requests_errors_and_percentiles_are_told_once_a_minute_is_over(fake: FakeSageMaker, tmp_path: Path) -> None:
    from botocore.exceptions import ClientError

    blue = scaling_deployment(tmp_path / "blue", name="blue", version="1", scale=2.0)
    green = scaling_deployment(tmp_path / "green", name="green", version="2", scale=3.0)
    provider, config = SageMakerEndpoints(), config_of("counted")
    begin_minute(fake)
    provider.apply(config, state_of(blue, green, blue=80, green=20), generation=1)
    invoke(fake, "counted", "blue")  # in the minute of the change, whose requests may be those of the state before
    source = provider.metrics()
    assert isinstance(source, CloudWatchMetrics)
    assert source.capabilities() == {"quantiles"}
    assert source.latencies(config, "blue") is None
    fake.shift(240)
    first = source.read(config, BOTH)
    assert {name: tally.requests for name, tally in first.tallies.items()} == {"blue": 0, "green": 0}
    for _ in range(50):
        invoke(fake, "counted")
    with pytest.raises(ClientError, match=r"422|400"):
        client(fake, "sagemaker-runtime").invoke_endpoint(
            EndpointName="counted", ContentType="application/json", Body=json.dumps({"inputs": {}}).encode(),
            TargetVariant="green",
        )  # fmt: skip
    assert source.read(config, BOTH).tallies["blue"].requests == 0
    fake.shift(180)
    second = source.read(config, BOTH)
    assert {name: tally.requests for name, tally in second.tallies.items()} == {"blue": 40, "green": 11}
    assert (second.tallies["green"].refused, second.tallies["green"].errors) == (1, 0)
    assert second.tallies["green"].over_p50 is None
    between = diff_readings(first, second, step=0, stable="blue", candidate="green")
    assert between is not None
    assert (between.stable.requests, between.canary.requests) == (40, 11)
    provider.apply(config, state_of(blue, green, blue=50, green=50), generation=2)
    assert source.read(config, BOTH).origin != second.origin


def test_percentiles_are_those_of_the_last_whole_minute(fake: FakeSageMaker, tmp_path: Path) -> None:
    blue = scaling_deployment(tmp_path / "blue", name="blue", version="1", scale=2.0)
    provider, config = SageMakerEndpoints(), config_of("percentiles")
    provider.apply(config, state_of(blue, blue=100), generation=1)
    source = plugins.load("metrics", "cloudwatch", {"delay": "0 s"})
    fake.shift(180)
    begun_s = time.monotonic()
    for _ in range(30):
        invoke(fake, "percentiles")
    elapsed_s = time.monotonic() - begun_s
    fake.shift(60)
    reading = source.read(config, {"blue": None})
    assert reading.tallies["blue"].requests == 30
    assert 0 < reading.quantiles["blue"].p50_s <= reading.quantiles["blue"].p99_s < elapsed_s
    fake.shift(60)
    later = source.read(config, {"blue": None})
    assert later.tallies == reading.tallies
    assert later.quantiles == {}


def test_while_it_is_changed_or_not_there_nothing_is_told(fake: FakeSageMaker, tmp_path: Path) -> None:
    blue = scaling_deployment(tmp_path / "blue", name="blue", version="1", scale=2.0)
    provider, config = SageMakerEndpoints(), config_of("changing")
    provider.apply(config, state_of(blue, blue=100), generation=1)
    fake.behave(reads=9)
    client(fake, "sagemaker").delete_endpoint(EndpointName="changing")
    with pytest.raises(ServiceUnavailableError, match="being changed"):
        provider.metrics().read(config, {"blue": None})


def test_a_guarded_endpoint_tells_no_versions_apart(fake: FakeSageMaker, tmp_path: Path) -> None:
    blue = scaling_deployment(tmp_path / "blue", name="blue", version="1", scale=2.0)
    provider, config = SageMakerEndpoints(), config_of("one-variant", strategy="guarded")
    provider.apply(config, state_of(blue, blue=100), generation=1)
    assert provider.metrics().read(config, {"blue": None}).tallies == {}


@pytest.mark.parametrize("settings", [{"dealy": "1 s"}, {"delay": "soon"}, {"delay": "-1 s"}])
def test_wrong_settings_are_refused(settings: dict[str, str | int]) -> None:
    with pytest.raises(UserError, match="delay"):
        CloudWatchMetrics(settings)
