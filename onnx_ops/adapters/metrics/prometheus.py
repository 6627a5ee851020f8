"""Metrics of an endpoint in Prometheus, Thanos, Mimir or VictoriaMetrics.

One query reads all series, so all counts of an instance come from the same scrape.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

from onnx_ops.adapters.metrics.prometheus_api import (
    make_answer_error,
    query_prometheus,
    quote_text,
)
from onnx_ops.adapters.server_metrics import count_slower
from onnx_ops.config.binding import bind_options
from onnx_ops.domain.artifact import digest_bytes, short_digest
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.quantities import Json, Pattern
from onnx_ops.domain.rollout_observations import (
    LatencyThresholds,
    MetricsReading,
    RequestCounts,
    ShadowCounts,
)
from onnx_ops.errors import ServiceUnavailableError
from onnx_ops.ports import MetricsSource
from onnx_ops.protocol.messages import FAILURE_STATUSES, REJECTION_STATUSES

_SCRAPED = "onnx_ops_scraped"
"""Label that marks the times of scrapes."""
_SHADOW = (
    "onnx_ops_shadow_answered_total",
    "onnx_ops_shadow_differing_total",
    "onnx_ops_shadow_failed_total",
)
_FEEDBACK = ("onnx_ops_feedback_total", "onnx_ops_feedback_successes_total")

_Metric = Annotated[str, Pattern("[a-zA-Z_:][a-zA-Z0-9_:]*", "the name of a metric")]
_Label = Annotated[str, Pattern("[a-zA-Z_][a-zA-Z0-9_]*", "the name of a label")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusOptions:
    """Options of the metrics source `prometheus`: the server, and names of series.

    The default names are those of the endpoint server. `select` are further labels that all series
    must have, such as `{job: serving, namespace: prod}`. `origin` is a series that changes its
    labels or its value when the counters restart, such as `process_start_time_seconds`.
    """

    endpoint_label: _Label = "endpoint"
    deployment_label: _Label = "deployment"
    status_label: _Label = "status"
    requests: _Metric = "onnx_ops_requests_total"
    histogram: _Metric = "onnx_ops_service_duration_seconds"
    origin: _Metric = "onnx_ops_server_info"
    select: Mapping[_Label, str] = field(default_factory=dict)
    url: Annotated[str, Pattern("https?://[^/]+.*", "an http address")]

    @property
    def is_own_server(self) -> bool:
        """Return whether the series are those of an onnx-ops server."""
        return (self.requests, self.origin) == ("onnx_ops_requests_total", "onnx_ops_server_info")

    def build_query(self, endpoint: str) -> str:
        """Return a query for all series of an endpoint and the times of their scrapes."""
        selected = [f"{label}={quote_text(value)}" for label, value in self.select.items()]
        matchers = [f"{self.endpoint_label}={quote_text(endpoint)}", *selected]
        metrics = [
            self.requests,
            f"{self.histogram}_bucket",
            *((*_SHADOW, *_FEEDBACK) if self.is_own_server else ()),
        ]
        origin = f"{self.origin}{{{','.join(matchers if self.is_own_server else selected)}}}"
        named = f"__name__=~{quote_text('|'.join(metrics))}"
        series = f"{{{','.join([named, *matchers])}}}"
        return (
            f'{origin} or label_replace(timestamp({origin}), "{_SCRAPED}", "yes", "", "") '
            f"or {series}"
        )


@dataclass(slots=True)
class _Page:
    """Samples of one query, summed over instances. The buckets are cumulative."""

    scraped_at: float = math.inf
    origins: list[str] = field(default_factory=list)
    statuses: dict[str, dict[str, int]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(int))
    )
    buckets: dict[str, dict[float, int]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(int))
    )
    counters: dict[str, dict[str, int]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(int))
    )


class PrometheusMetrics(MetricsSource):
    """Counts of endpoint servers, read from Prometheus.

    `MetricsReading.at` is the time at which the oldest sample was scraped, usually at most a scrape
    interval ago. The origin changes with every instance that starts or stops. Counts across such a
    change are left out.
    """

    def __init__(self, options: Mapping[str, Json]) -> None:
        remedy = "Set the options as in this example: `url: https://prometheus.example`."
        self._names = bind_options(options, PrometheusOptions, where="prometheus", remedy=remedy)
        self._url = self._names.url.rstrip("/")

    def capabilities(self) -> frozenset[str]:
        """Return `exceedances`; for an onnx-ops server, also `shadow` and `feedback`."""
        return frozenset(
            {"exceedances", "shadow", "feedback"} if self._names.is_own_server else {"exceedances"}
        )

    def latencies(
        self, config: EndpointConfig, deployment: str
    ) -> tuple[Sequence[float], Sequence[int]] | None:
        """Return the histogram of requests since the present instances started.

        Series with the label `judged="false"` are left out. The result is the finite bounds of its
        buckets in seconds, and the count of each bucket. The last bucket is unbounded. The result
        is None without a histogram.
        """
        bounds = self._page(config).buckets.get(deployment)
        if not bounds:
            return None
        ordered = sorted(bounds)
        below = [0, *(bounds[bound] for bound in ordered)]
        counts = [later - earlier for earlier, later in pairwise(below)]
        return [bound for bound in ordered if math.isfinite(bound)], counts

    def read(
        self, config: EndpointConfig, deployments: Mapping[str, LatencyThresholds | None]
    ) -> MetricsReading:
        """Return the counts at the last scrape; deployments without series are left out."""
        page = self._page(config)
        copies = [
            sum(page.counters[name][deployment] for deployment in deployments) for name in _SHADOW
        ]
        tallies = {}
        for name, thresholds in deployments.items():
            if name not in page.statuses:
                continue
            limits = {} if thresholds is None else thresholds.by_guardrail()
            statuses, buckets = (
                page.statuses[name],
                page.buckets.get(name, {}),
            )
            timed = max(buckets.values(), default=None)
            tallies[name] = RequestCounts(
                requests=sum(statuses.values()),
                errors=sum(
                    count for status, count in statuses.items() if status in FAILURE_STATUSES
                ),
                refused=sum(
                    count for status, count in statuses.items() if status in REJECTION_STATUSES
                ),
                feedback=page.counters[_FEEDBACK[0]][name],
                successes=page.counters[_FEEDBACK[1]][name],
                timed=timed,
            ).with_over(
                {
                    # The tolerance of 1e-4 allows for bucket bounds that are rounded to six digits.
                    place: count_slower(buckets, timed or 0, limit_s, 1e-4)
                    for place, limit_s in limits.items()
                }
            )
        return MetricsReading(
            origin=short_digest(digest_bytes("\n".join(sorted(page.origins)).encode())),
            at=page.scraped_at,
            tallies=tallies,
            shadow=ShadowCounts(compared=copies[0], differing=copies[1], failed=copies[2]),
        )

    def _page(self, config: EndpointConfig) -> _Page:
        page, names = _Page(), self._names
        for sample in query_prometheus(
            self._url, names.build_query(config.endpoint), where=config.endpoint
        ):
            try:
                labels, value = dict(sample["metric"]), float(sample["value"][1])
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise make_answer_error(config.endpoint, sample) from error
            if not math.isfinite(value):
                raise make_answer_error(config.endpoint, sample)
            metric, deployment = labels.get("__name__", ""), labels.get(names.deployment_label, "")
            if _SCRAPED in labels:
                page.scraped_at = min(page.scraped_at, value)
            elif metric == names.origin:
                page.origins.append(f"{sorted(labels.items())} {value!r}")
            elif not deployment or labels.get("judged") == "false":
                continue
            elif metric == names.requests:
                page.statuses[deployment][labels.get(names.status_label, "")] += int(value)
            elif metric == f"{names.histogram}_bucket":
                page.buckets[deployment][float(labels.get("le", "inf"))] += int(value)
            else:
                page.counters[metric][deployment] += int(value)
        if not page.origins or not math.isfinite(page.scraped_at):
            raise ServiceUnavailableError(
                "Prometheus has no samples of the endpoint",
                where=config.endpoint,
                why=f"no series {names.origin} was scraped within Prometheus' look-back period",
                remedy="Check that the server is scraped and that its labels match; "
                "see `onnx-ops docs metrics-sources`.",
            )
        return page
