"""Metrics of a SageMaker endpoint's variants in CloudWatch.

CloudWatch counts whole minutes and publishes them late. A reading starts with the first whole
minute after the endpoint's last change, and ends with the last complete minute. More than a day
after the change, it starts with the first whole hour. The clock is that of AWS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Annotated, Any

from annotated_types import Ge, Unit, doc

from onnx_ops.adapters.aws import (
    AwsAccess,
    Clients,
    build_variant_name,
    find_missing_credentials,
    make_clients,
    read_access,
    translate_errors,
)
from onnx_ops.config.binding import bind_options
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.rollout_observations import (
    LatencyQuantiles,
    LatencyThresholds,
    MetricsReading,
    RequestCounts,
)
from onnx_ops.errors import OnnxOpsError, ServiceUnavailableError, quoted
from onnx_ops.ports import MetricsSource

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_COUNTS = {
    "requests": ("Invocations", "Sum"),
    "refused": ("Invocation4XXErrors", "Sum"),
    "errors": ("Invocation5XXErrors", "Sum"),
}
_PERCENTILES = {"p50": ("ModelLatency", "p50"), "p99": ("ModelLatency", "p99")}
_MICROSECONDS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudWatchOptions(AwsAccess):
    """Options of the metrics source `cloudwatch`.

    Omitted options of `AwsAccess` default to those of the endpoint.
    """

    delay: Annotated[
        float, Unit("s"), Ge(0), doc("Time after which the counts of a minute are complete.")
    ] = 120.0


class CloudWatchMetrics(MetricsSource):
    """Counts and latency percentiles of SageMaker variants, read from CloudWatch.

    A request with status 4xx is refused, and one with 5xx is an error. CloudWatch has no histogram,
    so the weaker rule of docs/rollout-analysis.md applies to latencies.
    """

    def __init__(self, options: Mapping[str, Json]) -> None:
        read = bind_options(options, CloudWatchOptions, where="cloudwatch")
        self._delay = timedelta(seconds=read.delay)
        self._options = options
        self._connected: dict[AwsAccess, Clients] = {}

    def find_missing_requirement(self, config: EndpointConfig) -> OnnxOpsError | None:
        """Return an error if profile, region or credentials are missing; send no request to AWS."""
        return find_missing_credentials(
            read_access(config.options, self._options), where=config.endpoint
        )

    def capabilities(self) -> frozenset[str]:
        """Return the only capability of this source: `quantiles`."""
        return frozenset({"quantiles"})

    def read(
        self, config: EndpointConfig, deployments: Mapping[str, LatencyThresholds | None]
    ) -> MetricsReading:
        """Return the counts since the endpoint's last change.

        The percentiles are those of the last complete minute. An endpoint with `strategy: guarded`
        has no counts.

        Raises:
            ServiceUnavailableError: the endpoint has another status than `InService`, or AWS
                cannot serve a request, does not complete a query, or does not accept the
                credentials.
            RefusedError: AWS denies access.
            InfrastructureError: AWS refuses a request, for example for a missing endpoint.
            UserError: profile or region is missing or wrong, or credentials are missing.
            MissingPackageError: boto3 is not installed.
        """
        access = read_access(config.options, self._options, where=config.endpoint)
        if access not in self._connected:
            self._connected[access] = make_clients(access, where=config.endpoint)
        connect = self._connected[access]
        with translate_errors(config.endpoint):
            description = connect("sagemaker").describe_endpoint(EndpointName=config.endpoint)
            if (status := description["EndpointStatus"]) != "InService":
                what = "the endpoint is not in service; its counts restart"
                raise ServiceUnavailableError(what, where=config.endpoint, why=status)
            now = parsedate_to_datetime(
                description["ResponseMetadata"]["HTTPHeaders"]["date"]
            ).astimezone(UTC)
            began = description["LastModifiedTime"].astimezone(UTC)
            until = _minute(now - self._delay)
            guarded = config.options.get("strategy") == "guarded"
            variants = {} if guarded else {name: build_variant_name(name) for name in deployments}
            begin = _minute(began) + timedelta(minutes=1)
            period_s = _MINUTE
            if (until - begin).total_seconds() > _DAY:
                # Hourly sums limit the number of values in the response. CloudWatch rounds start
                # times down, to 5 minutes after 15 days and to hours after 63 days. A whole hour
                # stays as it is, so that no count from before the change is included.
                begin, period_s = (begin + timedelta(minutes=59)).replace(minute=0), _HOUR
            origin = f"{config.endpoint} {began.isoformat()} {begin.isoformat()}"
            if until <= begin or not variants:
                empty = {name: RequestCounts() for name in variants}
                return MetricsReading(origin=origin, at=until.timestamp(), tallies=empty)
            queries = _queries(config.endpoint, variants, _COUNTS, period_s)
            counts = _read_values(connect("cloudwatch"), queries, begin, until)
            queries = _queries(config.endpoint, variants, _PERCENTILES, _MINUTE)
            latest = _read_values(
                connect("cloudwatch"), queries, until - timedelta(minutes=1), until
            )
        tallies, quantiles = {}, {}
        for index, name in enumerate(variants):
            requests, refused, errors = (
                round(sum(counts.get(f"{key}{index}", ()))) for key in _COUNTS
            )
            tallies[name] = RequestCounts(requests=requests, refused=refused, errors=errors)
            p50, p99 = (latest.get(f"{key}{index}", ()) for key in _PERCENTILES)
            if p50 and p99:
                quantiles[name] = LatencyQuantiles(
                    p50_s=p50[-1] * _MICROSECONDS, p99_s=p99[-1] * _MICROSECONDS
                )
        return MetricsReading(
            origin=origin, at=until.timestamp(), tallies=tallies, quantiles=quantiles
        )


def _queries(
    endpoint: str,
    variants: Mapping[str, str],
    statistics: Mapping[str, tuple[str, str]],
    period_s: int,
) -> list[dict[str, Any]]:
    """Return a query for each variant and statistic.

    The id of a query consists of the key of the statistic and the variant's number.
    """

    def metric(name: str, variant: str) -> dict[str, Any]:
        dimensions = [
            {"Name": "EndpointName", "Value": endpoint},
            {"Name": "VariantName", "Value": variant},
        ]
        return {"Namespace": "AWS/SageMaker", "MetricName": name, "Dimensions": dimensions}

    return [
        {
            "Id": f"{key}{index}",
            "MetricStat": {"Metric": metric(name, variant), "Period": period_s, "Stat": statistic},
            "ReturnData": True,
        }
        for index, variant in enumerate(variants.values())
        for key, (name, statistic) in statistics.items()
    ]


def _read_values(
    cloudwatch: Any, queries: list[dict[str, Any]], begin: datetime, end: datetime
) -> dict[str, list[float]]:
    """Return the values of each query, by the id of the query.

    Raises:
        ServiceUnavailableError: CloudWatch did not complete a query.
    """
    values: dict[str, list[float]] = {}
    pages = cloudwatch.get_paginator("get_metric_data").paginate(
        MetricDataQueries=queries, StartTime=begin, EndTime=end, ScanBy="TimestampAscending"
    )
    for page in pages:
        for result in page["MetricDataResults"]:
            if result.get("StatusCode") not in ("Complete", "PartialData"):
                raise ServiceUnavailableError(
                    f"CloudWatch returned status {result.get('StatusCode')} "
                    f"for query {result['Id']}",
                    why=quoted(result.get("Messages", "")),
                )
            values.setdefault(result["Id"], []).extend(map(float, result["Values"]))
    return values


def _minute(at: datetime) -> datetime:
    return at.replace(second=0, microsecond=0)
