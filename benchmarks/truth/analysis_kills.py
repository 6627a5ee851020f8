"""Kill the service of analyses during answers, and compare verdicts and record."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.truth.claims import Claim
from benchmarks.truth.draws import make_generator
from onnx_ops import codec
from onnx_ops.adapters.analysis_log import AnalysisLog
from onnx_ops.adapters.files import LocalObjects
from onnx_ops.domain.rollout_analysis import AnalysisEntry, CountsRecorded, RolloutKey
from onnx_ops.statistics.rollout.verdict import judge_state
from tests.app.analysis_parts import write_config
from tests.support.fake_prometheus import FakePrometheus

KEY = RolloutKey(analysis="web", rollout="shop", stable="a", canary="b")
URL = "/v1/argo/web/shop?stable=a&canary=b"


def prove_kills(kills: int) -> list[Claim]:
    """Kill a service `kills` times within answers, and return the claims."""
    random = make_generator(99)
    now = time.time()  # noqa: TID251 (the service uses the clock of this machine)
    prometheus = FakePrometheus(at=now)
    prometheus.add("a", 1000, 5)
    prometheus.add("b", 100)
    answers: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, prometheus.listen() as url:
        folder = Path(name)
        config = write_config(
            folder / "analysis.yaml", url, interval="10 ms", max_duration="1 h", min_requests=500
        )
        prometheus.scrape(0.0)
        for index in range(kills):
            with (
                run_service(config) as (process, service),
                httpx.Client(base_url=service, timeout=60) as http,
            ):
                _add_minute(prometheus, worse=index > kills // 2)
                answers.append(http.get(URL).json())
                _add_minute(prometheus, worse=index > kills // 2)
                timer = threading.Timer(float(random.uniform(0.0, 0.03)), process.kill)
                timer.start()
                with contextlib.suppress(httpx.HTTPError, ValueError):
                    while len(answers) < 100_000:
                        # The loop ends with an error when the service is killed.
                        answers += [http.get(URL).json()]
                timer.join()
        changed = _count_changes(folder, answers)
    figure = f"{changed} of {len(answers)} answers, killed {kills} times"
    return [
        Claim(
            gate="analysis",
            what="answers that differ from the record",
            bound="0",
            figure=figure,
            is_met=not changed,
        )
    ]


@contextlib.contextmanager
def run_service(config: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield the process of a service and its URL; the process is killed at the end."""
    command = [sys.executable, "-m", "onnx_ops", "analysis", "serve", str(config)]
    with subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().partition(": ")[0]
        finally:
            process.kill()


def _add_minute(prometheus: FakePrometheus, *, worse: bool) -> None:
    prometheus.add("a", 900, 5)
    prometheus.add("b", 100, 3 if worse else 0)
    # The service records a reading only after a minimum time since the previous reading.
    time.sleep(1.9)
    prometheus.scrape(1.9)


def _count_changes(folder: Path, answers: list[dict[str, Any]]) -> int:
    """Return how many answers differ from the verdicts that the record leads to.

    One is added if the record has any requests twice, or lacks any.
    """
    state = AnalysisLog(LocalObjects(folder / "state")).read(KEY)
    assert state.policy is not None
    verdicts = {0: "inconclusive"}
    for end in range(1, len(state.intervals) + 1):
        part = type(state)(
            key=state.key,
            stable="a",
            canary="b",
            intervals=state.intervals[:end],
        )
        has_failed = verdicts[end - 1] == "fail"
        verdicts[end] = "fail" if has_failed else judge_state(part, state.policy).verdict
    changed: int = sum(verdicts[each["intervals"]] != each["verdict"] for each in answers)
    bodies = [*_read_bodies(folder)]
    counted = sum(body.margins[0] for body in bodies if body.margins is not None)
    served = [body.reading.tallies["b"].requests for body in bodies if body.reading is not None]
    is_counted_once: bool = counted == served[-1] - served[0]
    return changed + (not is_counted_once)


def _read_bodies(folder: Path) -> Iterator[CountsRecorded]:
    """Yield the recorded counts in their order."""
    for path in sorted((folder / "state" / KEY.folder).glob("0*.json")):
        body = codec.loads(path.read_bytes(), AnalysisEntry).body
        if isinstance(body, CountsRecorded):
            yield body
