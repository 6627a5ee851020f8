"""Rollouts through the HTTP API of analyses, over a fake Prometheus.

The true rates of errors are known. Time is simulated: a minute passes between two scrapes. The
proxy draws a revision for each request.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from benchmarks.truth.claims import Claim, at_least, at_most, table
from benchmarks.truth.draws import make_generator
from tests.app.analysis_parts import AnalysisClient, open_client

REQUESTS = 600
"""Requests in a minute."""
WEIGHTS = (0.1, 0.5)
MIN_REQUESTS = (1000, 3000)
MOST_MINUTES = 60
LONGEST_ANSWER_MS = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWorld:
    """A kind of traffic: rates of errors, and what else happens.

    In one of ten minutes, an outage fills the second half: requests to both revisions then fail
    with the probability `outage`. With `restarts`, the proxy restarts about once in ten minutes.
    With `moves`, the weight changes within a minute, unannounced, about once in thirty minutes.
    """

    name: str
    stable: float
    canary: float
    outage: float = 0.0
    restarts: bool = False
    moves: bool = False
    assignment: str = "request"

    @property
    def is_worse(self) -> bool:
        """Return whether the canary is worse."""
        return self.canary > self.stable


WORLDS = (
    RolloutWorld(name="equal, .5 % errors", stable=0.005, canary=0.005),
    RolloutWorld(name="equal, outages of both", stable=0.005, canary=0.005, outage=0.3),
    RolloutWorld(
        name="equal, outages, restarts and changes of the weight",
        stable=0.005,
        canary=0.005,
        outage=0.3,
        restarts=True,
        moves=True,
    ),
    RolloutWorld(name="errors .1 -> 1 %", stable=0.001, canary=0.01),
    RolloutWorld(
        name="errors .1 -> 1 %, effect estimated", stable=0.001, canary=0.01, assignment="sticky"
    ),
)


@dataclass(slots=True)
class WorldResult:
    """Outcomes of the rollouts of one world."""

    trials: int = 0
    failed: int = 0
    passed: int = 0
    requests: list[int] = field(default_factory=list)
    answers_ms: list[float] = field(default_factory=list)


def prove(trials: int) -> list[Claim]:
    """Simulate all worlds, print a table, and return the claims."""
    claims, rows = [], []
    answers_ms: list[float] = []
    for index, world in enumerate(WORLDS):
        result = simulate_world(world, index, trials)
        answers_ms += result.answers_ms
        median = str(int(np.median(result.requests))) if result.requests else "-"
        rows.append((world.name, str(result.failed), str(result.passed), median))
        if world.is_worse and world.assignment == "request":
            claims.append(at_least("analysis", world.name, result.failed, trials, 0.95))
        elif not world.is_worse:
            claims.append(at_most("analysis", world.name, result.failed, trials, 0.05))
    head = ("world", "failed", "passed", "median canary requests until fail")
    table(f"{trials} rollouts of each world", head, rows)
    slow = float(np.quantile(answers_ms, 0.99))
    claims.append(
        Claim(
            gate="analysis",
            what="answer from recorded state, 99th percentile",
            bound=f"<= {LONGEST_ANSWER_MS:g} ms",
            figure=f"{slow:.1f} ms, median {np.median(answers_ms):.1f} ms",
            is_met=slow <= LONGEST_ANSWER_MS,
        )
    )
    return claims


def simulate_world(world: RolloutWorld, index: int, trials: int) -> WorldResult:
    """Run rollouts of one world, each with a separate state."""
    result = WorldResult(trials=trials)
    with open_world(world) as client, httpx.Client(base_url=client.url, timeout=30) as http:
        for trial in range(trials):
            _run_rollout(world, make_generator(index, trial), client, http, trial, result)
    return result


@contextlib.contextmanager
def open_world(world: RolloutWorld) -> Iterator[AnalysisClient]:
    """Yield a client of a service for the rollouts of a world."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open_client(
            Path(folder),
            min_requests=list(MIN_REQUESTS),
            assignment=world.assignment,
            max_duration="12 h",
        ) as client,
    ):
        yield client


def _run_rollout(
    world: RolloutWorld,
    random: np.random.Generator,
    client: AnalysisClient,
    http: httpx.Client,
    trial: int,
    result: WorldResult,
) -> None:
    """Run one rollout: 10 %, 50 %, 100 %, each step after a verdict `pass`."""
    step, weight, served = 0, WEIGHTS[0], 0
    path = f"/v1/argo/web/rollout-{trial}"
    for _ in range(MOST_MINUTES):
        url = f"{path}?stable=a&canary=b&step={step}"
        verdict = http.get(url).json()["verdict"]
        begun = time.perf_counter()
        http.get(url)
        result.answers_ms.append(1000 * (time.perf_counter() - begun))
        if verdict == "fail":
            result.failed += 1
            result.requests.append(served)
            return
        if verdict == "pass":
            step += 1
            if step == len(WEIGHTS):
                result.passed += 1
                return
            weight = WEIGHTS[step]
            http.get(f"{path}?stable=a&canary=b&step={step}")
        moved = weight
        if world.moves and random.random() < 1 / 30:
            moved = 0.3 if weight == WEIGHTS[0] else WEIGHTS[0]
        served += _serve_minute(world, random, client, (weight, moved))
        weight = moved


def _serve_minute(
    world: RolloutWorld,
    random: np.random.Generator,
    client: AnalysisClient,
    weights: tuple[float, float],
) -> int:
    """Serve a minute of traffic, and return the requests of the canary.

    `weights` are those of the two halves of the minute.
    """
    prometheus, served = client.site.prometheus, 0
    outage = world.outage if random.random() < 0.1 else 0.0
    if world.restarts and random.random() < 0.1:
        prometheus.restart()
    for half, weight in enumerate(weights):
        canary = int(random.binomial(REQUESTS // 2, weight))
        # An outage fills the second half of its minute. The weight of this half can differ from
        # that of the first half.
        extra = outage if half else 0.0
        for revision, requests, rate in (
            ("b", canary, world.canary),
            ("a", REQUESTS // 2 - canary, world.stable),
        ):
            errors = int(random.binomial(requests, rate + extra * (1 - rate)))
            prometheus.add(revision, requests, errors)
        served += canary
    client.site.pass_time()
    return served
