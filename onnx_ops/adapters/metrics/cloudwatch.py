"""What CloudWatch has counted of a SageMaker endpoint's variants.

It counts in whole minutes and tells them late, so a reading is of the time up to a minute that is surely over. Counts
begin with the endpoint's last change, which is the origin. Time is that of Amazon's answers, not of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Annotated, Any

from annotated_types import Ge, Unit, doc

from onnx_ops.adapters.aws import AwsAccess, Clients, access_in, clients, missing_credentials, translated, variant_of
from onnx_ops.config.binding import bind_settings
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.rollout_observations import LatencyQuantiles, LatencyThresholds, MetricsReading, RequestCounts
from onnx_ops.errors import OnnxOpsError, ServiceUnavailableError, quoted

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_COUNTS = {"requests": "Invocations", "refused": "Invocation4XXErrors", "errors": "Invocation5XXErrors"}
_LATENCIES = {"p50": "p50", "p99": "p99"}
_MICROSECONDS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudWatchSettings(AwsAccess):
    """Settings of the endpoint's section `metrics`. Access is that of the provider where it is left out."""

    delay: Annotated[float, Unit("s"), Ge(0), doc("Time after which the counts of a minute are complete.")] = 120.0


class CloudWatchMetrics:
    """Fulfils `ports.MetricsSource`. It has percentiles of the last minute and no histogram, so latencies are judged by
    the weaker rule. Answers 4xx of the model are refusals, a full queue's 429 among them; 5xx are errors.

    Args:
        settings: those of `CloudWatchSettings`.

    Raises:
        UserError: a setting is not known, or wrong.
    """

    def __init__(self, settings: Mapping[str, Json]) -> None:
        read = bind_settings(settings, CloudWatchSettings, where="cloudwatch")
        self._delay = timedelta(seconds=read.delay)
        self._settings = settings
        self._connected: dict[AwsAccess, Clients] = {}

    def lacking(self, config: EndpointConfig) -> OnnxOpsError | None:
        return missing_credentials(access_in(config.settings, self._settings), where=config.endpoint)

    def capabilities(self) -> frozenset[str]:
        return frozenset({"quantiles"})

    def latencies(self, config: EndpointConfig, deployment: str) -> tuple[Sequence[float], Sequence[int]] | None:
        """CloudWatch keeps no histogram that can be read."""
        return None

    def read(self, config: EndpointConfig, deployments: Mapping[str, LatencyThresholds | None]) -> MetricsReading:
        """A deployment of a guarded endpoint has no variant of its own: of those nothing is told."""
        connect = self._connect(config)
        with translated(config.endpoint):
            now, began = self._since(connect("sagemaker"), config.endpoint)
            until = _minute(now - self._delay)
            origin = f"{config.endpoint} {began.isoformat()}"
            guarded = config.settings.get("strategy") == "guarded"
            variants = {} if guarded else {name: variant_of(name) for name in deployments}
            begin = _minute(began) + timedelta(minutes=1)
            if until <= begin or not variants:
                empty = {name: RequestCounts() for name in variants}
                return MetricsReading(origin=origin, at=until.timestamp(), tallies=empty)
            asked = _counts(config.endpoint, variants, _period(begin, until))
            sums = _figures(connect("cloudwatch"), asked, begin, until)
            latest = _figures(
                connect("cloudwatch"), _percentiles(config.endpoint, variants), until - timedelta(minutes=1), until
            )
        names = list(variants)
        return MetricsReading(
            origin=origin,
            at=until.timestamp(),
            tallies={name: _tally(sums, index) for index, name in enumerate(names)},
            quantiles={name: found for index, name in enumerate(names) if (found := _quantiles(latest, index))},
        )

    def _connect(self, config: EndpointConfig) -> Clients:
        access = access_in(config.settings, self._settings, where=config.endpoint)
        if access not in self._connected:
            self._connected[access] = clients(access, where=config.endpoint)
        return self._connected[access]

    @staticmethod
    def _since(sagemaker: Any, endpoint: str) -> tuple[datetime, datetime]:
        """Now, and when the endpoint was changed last."""
        found = sagemaker.describe_endpoint(EndpointName=endpoint)
        if found["EndpointStatus"] != "InService":
            raise ServiceUnavailableError(
                "the endpoint is being changed; its counts begin anew", where=endpoint, why=found["EndpointStatus"]
            )
        now = parsedate_to_datetime(found["ResponseMetadata"]["HTTPHeaders"]["date"])
        return now.astimezone(UTC), found["LastModifiedTime"].astimezone(UTC)


def _counts(endpoint: str, variants: Mapping[str, str], period_s: int) -> list[dict[str, Any]]:
    return [
        _query(f"{key}{index}", metric, "Sum", endpoint, variant, period_s)
        for index, variant in enumerate(variants.values())
        for key, metric in _COUNTS.items()
    ]


def _percentiles(endpoint: str, variants: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        _query(f"{key}{index}", "ModelLatency", statistic, endpoint, variant, _MINUTE)
        for index, variant in enumerate(variants.values())
        for key, statistic in _LATENCIES.items()
    ]


def _query(key: str, metric: str, statistic: str, endpoint: str, variant: str, period_s: int) -> dict[str, Any]:
    dimensions = [{"Name": "EndpointName", "Value": endpoint}, {"Name": "VariantName", "Value": variant}]
    named = {"Namespace": "AWS/SageMaker", "MetricName": metric, "Dimensions": dimensions}
    return {"Id": key, "MetricStat": {"Metric": named, "Period": period_s, "Stat": statistic}, "ReturnData": True}


def _figures(cloudwatch: Any, asked: list[dict[str, Any]], begin: datetime, end: datetime) -> dict[str, list[float]]:
    """Values by the id of the query; raises ServiceUnavailableError where CloudWatch tells only a part."""
    found: dict[str, list[float]] = {}
    pages = cloudwatch.get_paginator("get_metric_data").paginate(
        MetricDataQueries=asked, StartTime=begin, EndTime=end, ScanBy="TimestampAscending"
    )
    for page in pages:
        for result in page["MetricDataResults"]:
            if result.get("StatusCode") not in ("Complete", "PartialData"):
                raise ServiceUnavailableError("CloudWatch answers in part", why=quoted(result.get("Messages", "")))
            found.setdefault(result["Id"], []).extend(map(float, result["Values"]))
    return found


def _tally(sums: Mapping[str, Sequence[float]], index: int) -> RequestCounts:
    counted = {key: round(sum(sums.get(f"{key}{index}", ()))) for key in _COUNTS}
    return RequestCounts(requests=counted["requests"], errors=counted["errors"], refused=counted["refused"])


def _quantiles(latest: Mapping[str, Sequence[float]], index: int) -> LatencyQuantiles | None:
    p50, p99 = (latest.get(f"{key}{index}", ()) for key in _LATENCIES)
    return LatencyQuantiles(p50_s=p50[-1] * _MICROSECONDS, p99_s=p99[-1] * _MICROSECONDS) if p50 and p99 else None


def _period(begin: datetime, end: datetime) -> int:
    """Minutes are told for two weeks, and a reading of a long step shall not take thousands of them."""
    return _MINUTE if (end - begin).total_seconds() <= _DAY else _HOUR


def _minute(at: datetime) -> datetime:
    return at.replace(second=0, microsecond=0)
