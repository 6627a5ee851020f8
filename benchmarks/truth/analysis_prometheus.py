"""Rollouts through the HTTP API of analyses, over a real Prometheus.

Prometheus scrapes a real server. All rollouts run at the same time, since a real Prometheus needs
real time.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import yaml

from benchmarks.truth.analysis_kills import run_service
from benchmarks.truth.claims import Claim, at_least, at_most
from benchmarks.truth.draws import make_generator
from onnx_ops.adapters.retry import wait_until

ROUNDS = 25
REQUESTS = 600
WEIGHT = 0.2
_STARTED = time.time()  # noqa: TID251 (exported as the start of the process)


def prove_with_prometheus(program: Path, trials: int) -> list[Claim]:
    """Run rollouts: half with equal revisions, half with 1 % instead of .1 % errors."""
    counts: Counter[tuple[int, str, str]] = Counter()
    names = {trial: "equal" if trial % 2 else "worse" for trial in range(trials)}
    _serve_round(counts, names, round_=0)
    verdicts: dict[int, str] = {}
    with (
        tempfile.TemporaryDirectory() as name,
        _export(counts) as target,
        _run_prometheus(program, Path(name), target) as url,
    ):
        config = _write_config(Path(name), url, names)
        with (
            run_service(config) as (_, service),
            httpx.Client(base_url=service, timeout=60) as http,
        ):
            for round_ in range(1, ROUNDS + 1):
                time.sleep(2.5)
                for trial in names:
                    path = f"/v1/argo/rollout-{trial}/shop?stable=a&canary=b"
                    verdict = http.get(path).json()["verdict"]
                    if verdicts.get(trial) != "fail":
                        verdicts[trial] = verdict
                _serve_round(counts, names, round_)
    failed = Counter(names[trial] for trial, verdict in verdicts.items() if verdict == "fail")
    totals = Counter(names.values())
    what = "real Prometheus"
    return [
        at_most("analysis", f"{what}: equal", failed["equal"], totals["equal"], 0.05),
        at_least("analysis", f"{what}: .1 -> 1 %", failed["worse"], totals["worse"], 0.95),
    ]


def _serve_round(counts: Counter[tuple[int, str, str]], names: dict[int, str], round_: int) -> None:
    for trial, kind in names.items():
        random = make_generator(77, round_, trial)
        canary = int(random.binomial(REQUESTS, WEIGHT))
        for revision, requests in (("a", REQUESTS - canary), ("b", canary)):
            rate = 0.01 if (kind, revision) == ("worse", "b") else 0.001
            errors = int(random.binomial(requests, rate))
            counts[trial, revision, "200"] += requests - errors
            counts[trial, revision, "500"] += errors


@contextlib.contextmanager
def _export(counts: Counter[tuple[int, str, str]]) -> Iterator[str]:
    """Yield the address of a server that exports the counters of a proxy."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            lines = [f"process_start_time_seconds {_STARTED}"]
            lines += [
                f'http_requests_total{{shop="{trial}",rev="{revision}",code="{code}"}} {number}'
                for (trial, revision, code), number in sorted(counts.items())
            ]
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write("\n".join([*lines, ""]).encode())

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextlib.contextmanager
def _run_prometheus(program: Path, folder: Path, target: str) -> Iterator[str]:
    """Yield the URL of a Prometheus that scrapes the target every second."""
    job = {"job_name": "proxy", "static_configs": [{"targets": [target]}]}
    settings = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(program), f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            if not wait_until(lambda: _has_scraped(url), timeout_s=30.0, pause_s=0.2):
                raise TimeoutError(f"{program} did not scrape {target} in 30 s")
            yield url
        finally:
            process.kill()


def _has_scraped(url: str) -> bool:
    """Return whether a Prometheus is ready and has scraped its target at least once."""
    with contextlib.suppress(httpx.HTTPError):
        answer = httpx.get(f"{url}/api/v1/query", params={"query": "up"})
        return answer.status_code == 200 and bool(answer.json()["data"]["result"])
    return False


def _write_config(folder: Path, url: str, names: dict[int, str]) -> Path:
    analyses = {
        f"rollout-{trial}": {
            "prometheus": {
                "url": url,
                "requests": "http_requests_total",
                "errors": {"label": "code", "regex": "5.."},
                "revision_label": "rev",
                "select": {"shop": str(trial)},
                "origin_select": {"job": "proxy"},
            },
            "interval": "500 ms",
            "max_duration": "15 min",
            "min_requests": 1000,
        }
        for trial in names
    }
    path = folder / "analysis.yaml"
    path.write_text(yaml.safe_dump({"state": "state", "analyses": analyses}))
    return path
