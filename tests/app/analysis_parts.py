"""A service of analyses over a fake Prometheus, for tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from onnx_ops.adapters.web.analysis_server import AnalysisServer
from onnx_ops.app.analysis import AnalysisAnswer, AnalysisService, make_service
from onnx_ops.app.analysis_routes import AnalysisRoutes
from onnx_ops.config.analysis import load_analysis_config
from onnx_ops.domain.rollout_analysis import RolloutKey
from onnx_ops.testing.fakes import FakeClock
from tests.support.fake_prometheus import REQUESTS, FakePrometheus

KEY = RolloutKey(analysis="web", rollout="shop", stable="a", canary="b")
POSTED = RolloutKey(analysis="posted", rollout="shop")


def write_config(path: Path, url: str, **changes: Any) -> Path:
    """Write a configuration with one analysis of Prometheus and one of counts of clients."""
    web: Mapping[str, Any] = {
        "prometheus": {
            "url": url,
            "requests": REQUESTS,
            "errors": {"label": "code", "regex": "5.."},
            "revision_label": "rev",
            "timeout": "2 s",
            **changes.pop("prometheus", {}),
        },
        "guardrails": ["errors"],
        "min_requests": 100,
        **changes,
    }
    posted = {"guardrails": ["errors"], "min_requests": 100}
    document = {"state": "state", "analyses": {"web": web, "posted": posted}}
    path.write_text(yaml.safe_dump(document))
    return path


@dataclass
class AnalysisSite:
    """A service, its clock, and the Prometheus that it reads."""

    folder: Path
    clock: FakeClock
    prometheus: FakePrometheus
    service: AnalysisService

    def restart(self) -> AnalysisService:
        """Return another instance over the same state."""
        config = load_analysis_config(self.folder / "analysis.yaml")
        return make_service(config, self.folder, self.clock)

    def pass_time(self, seconds: float = 60.0) -> None:
        """Let time pass, and scrape the proxy at its end."""
        self.clock.advance(seconds)
        self.prometheus.scrape(seconds)

    def observe(self, service: AnalysisService | None = None, **options: Any) -> AnalysisAnswer:
        """Return the verdict on canary `b` against stable `a`."""
        return (service or self.service).observe(KEY, "a", "b", **options)

    def serve_traffic(
        self, minutes: int, *, canary: tuple[int, int], stable: tuple[int, int]
    ) -> AnalysisAnswer:
        """Serve requests and errors of both revisions in each minute, and observe them.

        The first minute of a rollout is in addition: its interval only shows the split.
        """
        result = self.observe()
        first = int(result.state.margins is None and minutes > 0)
        for _ in range(minutes + first):
            self.prometheus.add("a", *stable)
            self.prometheus.add("b", *canary)
            self.pass_time()
            result = self.observe()
        return result


@contextmanager
def open_site(folder: Path, **changes: Any) -> Iterator[AnalysisSite]:
    """Yield a service whose proxy has served both revisions before."""
    clock = FakeClock()
    prometheus = FakePrometheus(at=clock.now())
    prometheus.add("a", 1000, 10)
    prometheus.add("b", 5)
    prometheus.scrape(0.0)
    with prometheus.listen() as url:
        path = write_config(folder / "analysis.yaml", url, **changes)
        service = make_service(load_analysis_config(path), folder, clock)
        yield AnalysisSite(folder, clock, prometheus, service)


@dataclass
class AnalysisClient:
    """A client of the HTTP service over a site."""

    site: AnalysisSite
    url: str

    def send(
        self,
        method: str,
        path: str,
        document: object = None,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Send a request with a JSON body or with raw content."""
        return httpx.request(
            method,
            f"{self.url}{path}",
            json=document,
            content=content,
            headers=dict(headers or {}),
            timeout=30,
        )


@contextmanager
def open_client(folder: Path, *, token: str = "", **changes: Any) -> Iterator[AnalysisClient]:
    """Yield a client of the HTTP service over a fake Prometheus."""
    with (
        open_site(folder, **changes) as site,
        AnalysisServer(
            "127.0.0.1", 0, token=token, handle=AnalysisRoutes(site.service).handle
        ) as server,
    ):
        yield AnalysisClient(site, server.url)
