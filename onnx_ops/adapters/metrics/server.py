"""What an endpoint server has counted, read off its own `/metrics`."""

from __future__ import annotations

import http.client
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from urllib.parse import urlsplit

from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.rollout_observed import Reading, Tally, Thresholds
from onnx_ops.errors import ServiceUnavailable
from onnx_ops.ports import Clock

_PATIENCE_S = 5.0
_SAMPLE = re.compile(r"(\w+)\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_OWN_FAILURES = frozenset({"500", "503", "504"})
"""Statuses that are the server's doing: it failed, had no model, or was too late. 429 is a full queue that both
versions share, 4xx the client's request, 499 a client that went away."""
_SAME = 1e-4
"""Bounds are printed with six digits."""


@dataclass(slots=True)
class Page:
    """The samples that matter, by deployment. `over` counts requests by the bounds that they were slower than."""

    origin: str = ""
    requests: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    errors: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    buckets: dict[str, dict[float, int]] = field(default_factory=lambda: defaultdict(dict))


class ServerMetrics:
    """Asks the server where clients call it.

    Args:
        clock: tells when a reading was made.
        address: where an endpoint is called; None if it does not exist.
    """

    def __init__(self, clock: Clock, address: Callable[[EndpointConfig], str | None]) -> None:
        self._clock = clock
        self._address = address

    def capabilities(self) -> frozenset[str]:
        return frozenset({"exceedances"})

    def latencies(self, config: EndpointConfig, deployment: str) -> tuple[Sequence[float], Sequence[int]] | None:
        """All requests that the deployment has answered since the server was started."""
        bounds = page_of(self._text(config)).buckets.get(deployment)
        if not bounds:
            return None
        ordered = sorted(bounds)
        below = [0, *(bounds[bound] for bound in ordered)]
        counts = [later - earlier for earlier, later in pairwise(below)]
        return [bound for bound in ordered if math.isfinite(bound)], counts

    def read(self, config: EndpointConfig, deployments: Sequence[str], thresholds: Thresholds | None) -> Reading:
        page = page_of(self._text(config))
        tallies = {name: _tally(page, name, thresholds) for name in deployments if name in page.buckets}
        return Reading(origin=page.origin, at=self._clock.now(), tallies=tallies)

    def _text(self, config: EndpointConfig) -> str:
        address = self._address(config)
        if address is None:
            raise ServiceUnavailable("the endpoint does not exist", where=config.endpoint)
        parts = urlsplit(address)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_PATIENCE_S)
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            raise ServiceUnavailable("the endpoint tells no metrics", where=config.endpoint, why=why) from error
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise ServiceUnavailable(
                "the endpoint tells no metrics", where=config.endpoint, why=f"HTTP {answer.status}"
            )
        return body.decode("utf-8", errors="replace")


def page_of(text: str) -> Page:
    """The samples in Prometheus' text format."""
    page = Page()
    for line in text.splitlines():
        if (found := _SAMPLE.fullmatch(line)) is None:
            continue
        name, written, value = found.groups()
        labels = {key: _unescape(label) for key, label in _LABEL.findall(written)}
        _add(page, name, labels, value)
    return page


def _add(page: Page, name: str, labels: Mapping[str, str], value: str) -> None:
    deployment = labels.get("deployment", "")
    match name:
        case "onnx_ops_counts":
            page.origin = labels.get("origin", "")
        case "onnx_ops_requests_total" if deployment:
            page.requests[deployment] += int(value)
            page.errors[deployment] += int(value) * (labels["status"] in _OWN_FAILURES)
        case "onnx_ops_request_seconds_bucket" if deployment:
            page.buckets[deployment][float(labels["le"])] = int(value)
        case _:
            pass


def _tally(page: Page, deployment: str, thresholds: Thresholds | None) -> Tally:
    p50, p99 = (None, None) if thresholds is None else (thresholds.p50_s, thresholds.p99_s)
    buckets = page.buckets[deployment]
    return Tally(
        requests=page.requests[deployment],
        errors=page.errors[deployment],
        over_p50=_over(buckets, p50),
        over_p99=_over(buckets, p99),
    )


def _over(buckets: Mapping[float, int], bound_s: float | None) -> int | None:
    """Requests slower than a bound of the histogram; None for any other latency."""
    if bound_s is None:
        return None
    below = [count for bound, count in buckets.items() if math.isclose(bound, bound_s, rel_tol=_SAME)]
    return max(buckets.values()) - below[0] if below else None


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], text)
