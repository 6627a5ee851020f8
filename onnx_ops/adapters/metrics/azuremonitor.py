"""Metrics of a managed online endpoint in Azure Monitor, as one-minute averages.

The average of `RequestsPerMinute` is a number of requests, so sums over whole minutes are counts.
Latencies have percentiles but no exceedances, so the weaker rule of docs/rollout-analysis.md
applies to them.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Mapping, Sequence
from urllib.parse import quote, urlencode

from onnx_ops.adapters.azure import (
    find_missing_credentials,
    read_endpoint_name,
    read_workspace,
    request_resource,
)
from onnx_ops.adapters.host import SystemClock
from onnx_ops.config.binding import refuse_options
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.rollout_observations import (
    LatencyQuantiles,
    LatencyThresholds,
    MetricsReading,
    RequestCounts,
)
from onnx_ops.errors import OnnxOpsError, RefusedError, ServiceUnavailableError, quoted
from onnx_ops.ports import Clock, MetricsSource
from onnx_ops.protocol.messages import FAILURE_STATUSES

_MINUTE = 60.0
_DAY = 86_400.0
_SETTLED = 3 * _MINUTE
"""Seconds after the end of a minute during which its counts can still grow."""
_WINDOW = 10 * _MINUTE
"""Seconds of the window before a reading in which percentiles are read."""
_MODEL_ERROR = "424"
"""Azure's status if the status of the container is not 200.

`modelStatusCode` contains the container's status.
"""
_P50, _P99 = "RequestLatency_P50", "RequestLatency_P99"


class AzureMonitorMetrics(MetricsSource):
    """Counts and percentiles of deployments, without a histogram.

    The source has no options: workspace and name are those of the endpoint. Counts restart at 00:00
    UTC; `MetricsReading.origin` is the start of that day. `MetricsReading.at` is the end of the
    last minute whose numbers no longer change, three to four minutes ago.
    """

    def __init__(self, options: Mapping[str, Json], clock: Clock | None = None) -> None:
        refuse_options(options, "azuremonitor")
        self._clock = clock or SystemClock()

    def find_missing_requirement(self, config: EndpointConfig) -> OnnxOpsError | None:
        """Return an error if credentials are missing; send no request to Azure."""
        return find_missing_credentials(where=config.endpoint)

    def capabilities(self) -> frozenset[str]:
        """Return the only capability of this source: `quantiles`."""
        return frozenset({"quantiles"})

    def read(
        self, config: EndpointConfig, deployments: Mapping[str, LatencyThresholds | None]
    ) -> MetricsReading:
        """Return the counts of the day (UTC) of the reading for each deployment.

        The percentiles are medians of one-minute percentiles over the ten minutes before the time
        of the reading, or since 00:00 UTC if that is later. Only a deployment with latencies has
        percentiles.
        """
        until = (self._clock.now() - _SETTLED) // _MINUTE * _MINUTE
        day = until // _DAY * _DAY
        counts = self._series(
            config, "RequestsPerMinute", ("statusCode", "modelStatusCode"), day, until
        )
        latencies = self._series(config, f"{_P50},{_P99}", (), max(day, until - _WINDOW), until)
        tallies, quantiles = {}, {}
        for name in deployments:
            by_status = [
                (status, round(sum(values))) for _, status, values in _rows_of(counts, name)
            ]
            tallies[name] = RequestCounts(
                requests=sum(count for _, count in by_status),
                errors=sum(
                    count
                    for status, count in by_status
                    if status >= "500" or status in FAILURE_STATUSES
                ),
                refused=sum(
                    count
                    for status, count in by_status
                    if "400" <= status < "500" and status not in FAILURE_STATUSES
                ),
            )
            minutes_ms = {
                metric: values for metric, _, values in _rows_of(latencies, name) if values
            }
            if _P50 in minutes_ms and _P99 in minutes_ms:
                p50_ms, p99_ms = (statistics.median(minutes_ms[metric]) for metric in (_P50, _P99))
                quantiles[name] = LatencyQuantiles(p50_s=p50_ms / 1e3, p99_s=p99_ms / 1e3)
        return MetricsReading(origin=_text(day), at=until, tallies=tallies, quantiles=quantiles)

    def _series(
        self,
        config: EndpointConfig,
        metrics: str,
        dimensions: Sequence[str],
        first: float,
        until: float,
    ) -> list[tuple[str, str, str, list[float]]]:
        """Return each series: metric, deployment, status, and a value per minute.

        Minutes without data are left out.

        Raises:
            ServiceUnavailableError: the query of Azure Monitor fails or is refused, or the answer
                has another format.
            UserError: the options lack a workspace, or the endpoint's name is not valid.
        """
        if until <= first:
            return []
        place = read_workspace(config.options, where=config.endpoint)
        name = read_endpoint_name(config.endpoint, config.options)
        chosen = " and ".join(f"{key} eq '*'" for key in ("deployment", *dimensions))
        query = {
            "api-version": "2023-10-01",
            "metricnames": metrics,
            "timespan": f"{_text(first)}/{_text(until)}",
            "interval": "PT1M",
            "aggregation": "Average",
            "$filter": chosen,
            "top": "1000",
        }
        path = f"{place.path}/onlineEndpoints/{name}/providers/Microsoft.Insights/metrics"
        try:
            answer = request_resource(f"{path}?{urlencode(query, quote_via=quote)}")
        except RefusedError as error:
            raise ServiceUnavailableError(
                "the query of Azure Monitor was refused",
                where=config.endpoint,
                why=str(error),
                remedy="Check the credentials, and assign the role Monitoring Reader on the "
                "workspace to the identity.",
            ) from error
        rows = []
        try:
            for metric, series in (
                (m["name"]["value"], s) for m in answer["value"] for s in m["timeseries"]
            ):
                labels = {
                    m["name"]["value"].lower(): str(m["value"])
                    for m in series.get("metadatavalues", ())
                }
                values = [
                    float(point["average"])
                    for point in series["data"]
                    if point.get("average") is not None
                ]
                status = labels.get("statuscode", "")
                if status == _MODEL_ERROR:
                    status = labels.get("modelstatuscode", status)
                rows.append((metric, labels.get("deployment", ""), status, values))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            what = "Azure Monitor returned an unexpected response"
            raise ServiceUnavailableError(
                what, where=config.endpoint, why=quoted(repr(answer))
            ) from error
        return rows


def _rows_of(
    rows: Sequence[tuple[str, str, str, list[float]]], deployment: str
) -> list[tuple[str, str, list[float]]]:
    """Return the rows of a deployment.

    Its name in Azure consists of its name in onnx-ops and a digest.
    """
    prefix = f"{deployment.lower()}-"
    return [
        (metric, status, values)
        for metric, name, status, values in rows
        if name.rpartition("-")[0] + "-" == prefix
    ]


def _text(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
