"""A fake Prometheus over HTTP with the counters of one proxy.

It answers the one query that `RevisionCounters` sends. Samples are those of the last scrape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from onnx_ops.testing.notifiers import ReceivedRequest, Reply, WebhookSink

REQUESTS, ERRORS, SECONDS = "http_requests_total", "http_errors_total", "http_seconds"
ORIGIN = "process_start_time_seconds"
_VALUE = re.compile(r'rev="([^"]*)"')


@dataclass
class FakePrometheus:
    """Counters of a proxy by revision and status code.

    `at` is the time of the last scrape.

    `counts` change immediately; `scrape` makes them visible to queries.
    """

    at: float
    started: float = 1.0
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    buckets: dict[tuple[str, float], int] = field(default_factory=dict)
    extra: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    has_origin: bool = True
    status: int = 200
    queries: list[str] = field(default_factory=list)
    _shown: list[dict[str, Any]] = field(default_factory=list)

    def add(self, revision: str, requests: int, errors: int = 0) -> None:
        """Count requests of a revision, of which some failed."""
        for code, number in (("200", requests - errors), ("500", errors)):
            if number:
                key = revision, code
                self.counts[key] = self.counts.get(key, 0) + number

    def add_latencies(self, revision: str, latencies: dict[float, int]) -> None:
        """Count requests by the upper bound of their latency."""
        bounds = sorted({bound for _, bound in self.buckets} | set(latencies))
        for bound in bounds:
            number = sum(count for each, count in latencies.items() if each <= bound)
            self.buckets[revision, bound] = self.buckets.get((revision, bound), 0) + number

    def restart(self) -> None:
        """Start the proxy again: its counters begin at zero."""
        self.started = self.at
        self.counts.clear()
        self.buckets.clear()

    def scrape(self, seconds: float = 60.0) -> None:
        """Make the counters visible, at a later time."""
        self.at += seconds
        base = {"instance": "proxy-0", "job": "proxy"}
        self._shown = [
            _sample(REQUESTS, {**base, "rev": revision, "code": code}, number)
            for (revision, code), number in self.counts.items()
        ]
        self._shown += [
            _sample(
                f"{SECONDS}_bucket",
                {**base, "rev": revision, "le": str(bound).replace("inf", "+Inf")},
                number,
            )
            for (revision, bound), number in self.buckets.items()
        ]
        if self.has_origin:
            self._shown.append(_sample(ORIGIN, base, self.started))
            self._shown.append(
                {"metric": {**base, "onnx_ops_mark": "scraped"}, "value": [self.at, str(self.at)]}
            )

    def __call__(self, letter: ReceivedRequest) -> Reply:
        (query,) = parse_qs(urlsplit(letter.path).query)["query"]
        self.queries.append(query)
        if self.status != 200:
            return Reply(status=self.status)
        revisions = set(_VALUE.findall(query))
        result = [
            sample
            for sample in (*self._shown, *self.extra)
            if sample["metric"].get("rev", "") in {"", *revisions}
        ]
        data = {"resultType": "vector", "result": result}
        return Reply(document={"status": "success", "data": data, "warnings": self.warnings})

    @contextmanager
    def listen(self) -> Iterator[str]:
        """Yield the address of the server."""
        with WebhookSink(self).open() as sink:
            yield sink.url


def _sample(name: str, labels: dict[str, str], value: float) -> dict[str, Any]:
    return {"metric": {"__name__": name, **labels}, "value": [0, str(value)]}
