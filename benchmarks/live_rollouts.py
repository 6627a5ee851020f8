"""Run rollouts on a real server under real load, and count wrong ends.

    python -m benchmarks.live_rollouts [--rollouts N] [--world NAME]

In each world, N rollouts release the same version again, and N release a bad one. A bad version
fails on 10 % of the requests, and on all of them where there are few clients. Exits with 1 if more
than one good candidate is rolled back, or if a bad one is not. Epochs last a second, and most
rollouts from ten seconds to a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.truth.claims import table
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.release.promote import bind_endpoint
from onnx_ops.statistics.rollout.guardrails import FEWEST_REQUESTS
from tests.chaos.test_live_rollouts import RAILS, WIDTH, Site
from tests.support.load import LoadPlan, Payload
from tests.support.load.client import Load

POLICY = RolloutPolicy(steps=(0.2, 0.5, 1.0), min_requests=(1000,), guardrails=RAILS, epoch=1.0)
REQUESTS = 6000
BAD, WORSE = 9, 7
"""Table indexes: outside of both versions' tables, and of the bad one's only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """The users who send requests.

    The numbers of requests of the users follow Zipf's law with the exponent `skew`. The rows per
    request are log-normal by user, with the deviation `rows`, from 1 to 32. `fails` is the share of
    requests that fail on any version. Such a request is sent again with the probability `retried`.
    `hit` is the share of requests that fail on a bad candidate only. `patience_s` is the longest
    duration of a rollout in seconds: a single client is a unit of the candidate only in some
    epochs.
    """

    users: int = 2000
    skew: float = 1.1
    rows: float = 0.0
    fails: float = 0.0
    retried: float = 0.0
    weights_mb: int = 0
    hit: float = 0.1
    patience_s: float = 150.0


WORLDS = {
    "1 client": Crowd(users=1, hit=1.0, patience_s=1500.0),
    "3 clients": Crowd(users=3, skew=0.5, hit=1.0),
    "10 clients": Crowd(users=10, skew=0.5, hit=1.0),
    "sticky users, heavy tails": Crowd(rows=1.0),
    "retries .8": Crowd(skew=0.8, fails=0.01, retried=0.8),
    "cold candidate, 12 MB": Crowd(skew=0.8, weights_mb=12),
}


def payloads(crowd: Crowd, seed: int) -> Iterator[Payload]:
    draw = np.random.default_rng(seed)
    shares = np.arange(1, crowd.users + 1) ** -crowd.skew
    rows = np.clip(np.exp(crowd.rows * draw.standard_normal(crowd.users)), 1, 32).astype(int)
    for user in draw.choice(crowd.users, REQUESTS, p=shares / shares.sum()):
        fails = draw.random() < crowd.fails
        pick = BAD if fails else WORSE if draw.random() < crowd.hit else 0
        n = int(rows[user])
        x = np.round(draw.standard_normal(n * WIDTH), 2).tolist()
        inputs = [
            {"name": "x", "datatype": "FP32", "shape": [n, WIDTH], "data": x},
            {"name": "pick", "datatype": "INT64", "shape": [n], "data": [pick] * n},
        ]
        one = Payload(
            body=json.dumps({"inputs": inputs}).encode(),
            headers={"x-user-key": f"user-{user}-{seed}"},
        )
        for _ in range(draw.geometric(1 - crowd.retried) if fails and crowd.retried else 1):
            yield one


def send(plan: LoadPlan) -> None:
    async def run() -> None:
        load = Load(plan)
        await load.connect()
        await load.run()

    asyncio.run(run())


def wait_for_requests(site: Site) -> None:
    """Wait until the first version has enough answers for latency thresholds."""
    deadline = time.monotonic() + 120
    while (
        sum(sum(one.service) for one in site.local.counts(site.config).deployments.values())
        < 10 * FEWEST_REQUESTS
    ):
        if time.monotonic() > deadline:
            raise SystemExit("the load did not reach the server")
        time.sleep(0.1)


def rolled_out(crowd: Crowd, seed: int, *, bad: bool) -> tuple[bool, str]:
    """Return whether the candidate was rolled back, and why the last move was made."""
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder))
        try:
            bind_endpoint(site.context, site.config, POLICY)
            model = {"layers": 50, "weights_mb": crowd.weights_mb}
            site.release("first", **model)
            plan = LoadPlan(
                url=f"{site.local.address(site.config)}/v2/models/m/infer",
                payloads=list(payloads(crowd, seed)),
                headers={"content-type": "application/json"},
                seconds=2 * crowd.patience_s,
            )
            load = multiprocessing.get_context("spawn").Process(
                target=send, args=(plan,), daemon=True
            )
            load.start()
            try:
                wait_for_requests(site)
                site.release("second", **{**model, "table": 4 if bad else 8})
                why = site.drive(crowd.patience_s)
            finally:
                load.kill()
                load.join()
            return site.traffic() == {"v1": 100}, why
        finally:
            site.local.stop(site.config)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rollouts", type=int, default=20, help="of a good and of a bad candidate, in each world"
    )
    parser.add_argument("--world", choices=WORLDS, help="only this one")
    options = parser.parse_args()
    rows, false, missed = [], 0, 0
    for name, crowd in WORLDS.items():
        if options.world not in (None, name):
            continue
        found = []
        for bad in (False, True):
            began = time.perf_counter()
            ends = [rolled_out(crowd, seed, bad=bad) for seed in range(options.rollouts)]
            back = sum(end for end, _ in ends)
            found.append(
                f"{back} of {len(ends)} ({(time.perf_counter() - began) / len(ends):.0f} s each)"
            )
            for end, why in ends:
                if end is not bad:
                    print(f"{name}, {'bad' if bad else 'good'}: {why}", flush=True)
            false, missed = (false, missed + len(ends) - back) if bad else (false + back, missed)
        rows.append((name, *found))
        print(*rows[-1], sep="; ", flush=True)
    table("rolled back, on a real server", ("", "the same version", "a bad one"), rows)
    return 0 if false <= 1 and not missed else 1


if __name__ == "__main__":
    sys.exit(main())
