"""What a Prometheus server (or Thanos, Mimir, VictoriaMetrics behind the same API) has scraped of an endpoint.

Everything is read in one query, so that all counts are of the same scrape.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

from onnx_ops.adapters.exchange import exchange, host_of
from onnx_ops.adapters.metrics.selecting import Names
from onnx_ops.config.binding import bind_settings
from onnx_ops.domain.artifact import digest_bytes, short_digest
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.quantities import Json, Pattern
from onnx_ops.domain.rollout_observations import LatencyThresholds, MetricsReading, RequestCounts, ShadowCounts
from onnx_ops.errors import RefusedError, ServiceUnavailableError, quoted
from onnx_ops.protocol.messages import FAILURE_STATUSES, REJECTION_STATUSES

VARIABLE = "ONNX_OPS_PROMETHEUS_TOKEN"
_SAME = 1e-4
"""Bounds are printed with six digits."""
_SCRAPED = "onnx_ops_scraped"
"""Label that marks the times of scrapes in the answer."""
_SHADOW = ("onnx_ops_shadow_answered_total", "onnx_ops_shadow_differing_total", "onnx_ops_shadow_failed_total")
_OUTCOMES = ("onnx_ops_outcomes_total", "onnx_ops_outcome_successes_total")


@dataclass(slots=True)
class _Page:
    """The samples of one query, summed over the endpoint's instances. Buckets count what was faster than a bound."""

    scraped_at: float = math.inf
    origins: list[str] = field(default_factory=list)
    statuses: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    buckets: dict[str, dict[float, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    counters: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusSettings(Names):
    """Settings of the endpoint's section `metrics`: the server's address, and what series and labels are called."""

    url: Annotated[str, Pattern("https?://[^/]+.*", "an http address")]


class PrometheusMetrics:
    """Fulfils `ports.MetricsSource`.

    `MetricsReading.at` is when the oldest of the samples was scraped, which is up to a scrape interval ago. The origin
    changes with every instance that comes, goes or is started again: what was counted across that is left out.

    Args:
        settings: those of `PrometheusSettings`.

    Raises:
        UserError: a setting is not known, missing or wrong.
    """

    def __init__(self, settings: Mapping[str, Json]) -> None:
        remedy = "For example: url: https://prometheus.example"
        self._names = bind_settings(settings, PrometheusSettings, where="prometheus", remedy=remedy)
        self._url = self._names.url.rstrip("/")

    def capabilities(self) -> frozenset[str]:
        return frozenset({"exceedances", "shadow", "outcomes"} if self._names.own else {"exceedances"})

    def latencies(self, config: EndpointConfig, deployment: str) -> tuple[Sequence[float], Sequence[int]] | None:
        """All requests that the deployment's present instances have answered since they were started."""
        bounds = self._page(config).buckets.get(deployment)
        if not bounds:
            return None
        ordered = sorted(bounds)
        below = [0, *(bounds[bound] for bound in ordered)]
        counts = [later - earlier for earlier, later in pairwise(below)]
        return [bound for bound in ordered if math.isfinite(bound)], counts

    def read(self, config: EndpointConfig, deployments: Mapping[str, LatencyThresholds | None]) -> MetricsReading:
        page = self._page(config)
        copies = [sum(page.counters[name][deployment] for deployment in deployments) for name in _SHADOW]
        return MetricsReading(
            origin=short_digest(digest_bytes("\n".join(sorted(page.origins)).encode())),
            at=page.scraped_at,
            tallies={name: _tally(page, name, limits) for name, limits in deployments.items() if name in page.statuses},
            shadow=ShadowCounts(compared=copies[0], differing=copies[1], failed=copies[2]),
        )

    def _page(self, config: EndpointConfig) -> _Page:
        page = _Page()
        for sample in self._query(self._names.query(config.endpoint, (*_SHADOW, *_OUTCOMES), _SCRAPED), config):
            _add(page, self._names, *_sample(sample, config))
        if not page.origins or not math.isfinite(page.scraped_at):
            raise ServiceUnavailableError(
                "Prometheus knows nothing of the endpoint now",
                where=config.endpoint,
                why=f"no series {self._names.origin} was scraped within its look-back",
                remedy="Is the server scraped, and under which labels? See docs/rollouts.md.",
            )
        return page

    def _query(self, query: str, config: EndpointConfig) -> list[Any]:
        token = os.environ.get(VARIABLE, "").strip()
        host = host_of(self._url, "prometheus' url") if token else str(urlsplit(self._url).hostname)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = f"{self._url}/api/v1/query?query={quote(query, safe='')}"
        try:
            found = exchange("GET", url, host=host, headers=headers)
        except RefusedError as error:
            raise ServiceUnavailableError("Prometheus tells nothing", where=config.endpoint, why=str(error)) from error
        try:
            partial, samples = found.get("warnings"), found["data"]["result"]
        except (AttributeError, KeyError, TypeError) as error:
            raise _nonsense(config, found) from error
        if partial:  # what only some of the stores know is less than was counted
            raise ServiceUnavailableError("Prometheus answers in part", where=config.endpoint, why=quoted(partial))
        if not isinstance(samples, list):
            raise _nonsense(config, found)
        return samples


def _sample(sample: Any, config: EndpointConfig) -> tuple[Mapping[str, str], float]:
    try:
        labels, value = dict(sample["metric"]), float(sample["value"][1])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise _nonsense(config, sample) from error
    if not math.isfinite(value):
        raise _nonsense(config, sample)
    return labels, value


def _add(page: _Page, names: Names, labels: Mapping[str, str], value: float) -> None:
    metric, deployment = labels.get("__name__", ""), labels.get(names.deployment_label, "")
    if _SCRAPED in labels:
        page.scraped_at = min(page.scraped_at, value)
    elif metric == names.origin:
        page.origins.append(f"{sorted(labels.items())} {value!r}")
    elif not deployment:
        return
    elif metric == names.requests:
        page.statuses[deployment][labels.get(names.status_label, "")] += int(value)
    elif metric == f"{names.histogram}_bucket":
        page.buckets[deployment][float(labels.get("le", "inf"))] += int(value)
    else:
        page.counters[metric][deployment] += int(value)


def _tally(page: _Page, deployment: str, thresholds: LatencyThresholds | None) -> RequestCounts:
    limits = {} if thresholds is None else thresholds.by_guardrail()
    statuses, buckets = page.statuses[deployment], page.buckets.get(deployment, {})
    return RequestCounts(
        requests=sum(statuses.values()),
        errors=sum(count for status, count in statuses.items() if status in FAILURE_STATUSES),
        refused=sum(count for status, count in statuses.items() if status in REJECTION_STATUSES),
        outcomes=page.counters[_OUTCOMES[0]][deployment],
        successes=page.counters[_OUTCOMES[1]][deployment],
        timed=max(buckets.values(), default=None),
    ).with_over({name: _over(buckets, limit_s) for name, limit_s in limits.items()})


def _over(buckets: Mapping[float, int], bound_s: float) -> int | None:
    """Requests slower than a bound of the histogram; None for any other latency."""
    below = [count for bound, count in buckets.items() if math.isclose(bound, bound_s, rel_tol=_SAME)]
    return max(buckets.values()) - below[0] if below else None


def _nonsense(config: EndpointConfig, found: object) -> ServiceUnavailableError:
    return ServiceUnavailableError("that is no answer of Prometheus'", where=config.endpoint, why=quoted(repr(found)))
