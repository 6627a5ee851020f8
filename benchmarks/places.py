"""Measure how fast replicas follow tables, and whether clients lose requests.

    python -m benchmarks.places [--store folder|s3|blob]... [--rollouts N] [--kills N] [--outages N]
    [--rate R]

Requests are sent during steps, rollbacks, kills and outages. Four replicas, each with its own
folder, follow the same tables and each answer an open-loop load. Their connection to S3 and Azure
Blob Storage leads through a proxy that can be cut. Exits with 1 if a promised bound does not hold:
a step and a rollback are adopted within 5 s, a replica that is cut off gives the candidate no
traffic after 35 s, and no request fails but those of a replica that was killed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.debt.stores import STORES, open_store
from benchmarks.truth.claims import Claim, summary
from onnx_ops.protocol.replica_tables import DEADLINE_S, LEASE_S, TableNumber
from onnx_ops.testing.endpoints import EndpointProviderSuite
from tests.adapters.replica_site import ReplicaSite, open_site
from tests.support.load import LoadPlan, LoadProcess, Payload, Records
from tests.support.processes import until
from tests.support.proxy import Proxy

NAMES = ("r1", "r2", "r3", "r4")
ADOPTED_S = 5.0
OK = 200
BODY = b'{"inputs": {"x": [[1.0, 1.0]]}}'


@dataclass(kw_only=True)
class Figures:
    """The results for one kind of store. Times are in seconds.

    Attributes:
        failed: requests that failed at each replica while it ran, by kind of failure.
        down: requests that failed at replicas between their kill and their next answer.
    """

    steps: list[float] = field(default_factory=list)
    rollbacks: list[float] = field(default_factory=list)
    cut_s: float = 0.0
    requests: int = 0
    failed: dict[str, dict[str, int]] = field(default_factory=dict)
    down: int = 0


class Place:
    """A site of four replicas under load.

    If the store has a port, each replica reaches it through a proxy.
    """

    def __init__(
        self, folder: Path, kind: str, root: str, port: int, route: Callable[[int], dict[str, str]]
    ) -> None:
        url = f"{root}/{random.randrange(10**9)}"  # noqa: S311 (a name)
        urls = {"control": f"{url}/control", "reports": f"{url}/reports"} if root else {}
        self.site: ReplicaSite = open_site(folder, replicas=len(NAMES), **urls)
        self.kind = kind
        self.proxies = {name: Proxy(port) for name in NAMES} if port else {}
        self._route = route
        self.sequence = 0
        self.outages: dict[str, list[tuple[int, int]]] = {name: [] for name in NAMES}
        """For each replica, when it was killed and when it answered again.

        Times are in nanoseconds of the monotonic clock.
        """

    def start(self, name: str) -> None:
        proxy = self.proxies.get(name)
        self.site.environ = self._route(proxy.port) if proxy else {}
        self.site.start(name)

    def apply(self, **weights: int) -> float:
        """Publish a split, and return the seconds until all replicas have adopted it.

        The time begins with the creation of the split's table. New models are loaded before, by a
        table that gives them no traffic.
        """
        self.sequence += 1
        name, adopted_at = TableNumber(self.sequence).name, [0.0]

        def watch() -> None:
            until(lambda: self.site.control.read(name) is not None, seconds=600, pause_s=0.1)
            adopted_at[0] = self._wait(time.monotonic())

        watcher = threading.Thread(target=watch)
        watcher.start()
        self.site.apply(self.sequence, None, **weights)
        watcher.join()
        return adopted_at[0]

    def roll_back(self) -> float:
        self.sequence += 1
        began = time.monotonic()
        state = self.site.state(blue=100, green=0)
        self.site.provider.roll_back(self.site.config, state, generation=self.sequence)
        return self._wait(began)

    def _wait(self, began: float) -> float:
        number = TableNumber(self.sequence)
        running = list(self.site.processes)
        until(
            lambda: all((self.site.adopted(name) or TableNumber(0)) >= number for name in running),
            pause_s=0.1,
        )
        return time.monotonic() - began

    def cut(self, name: str) -> None:
        """Cut a replica off from the store; with a folder, suspend its follower."""
        if name in self.proxies:
            self.proxies[name].cut()
        else:
            self.site.processes[name].send_signal(signal.SIGSTOP)

    def mend(self, name: str) -> None:
        if name in self.proxies:
            self.proxies[name].mend()
        else:
            self.site.processes[name].send_signal(signal.SIGCONT)

    def kill(self, name: str) -> None:
        """Kill a replica and its server, and start the replica again."""
        record, began_ns = self.site.read_record(name), time.monotonic_ns()
        self.site.stop(name, signal.SIGKILL)
        if record is not None:
            for pid in (record.pid, *_list_children(record.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.start(name)
        until(lambda: (self.site.adopted(name) or TableNumber(0)).sequence == self.sequence)
        until(lambda: _answers(self.site.address(name)))
        self.outages[name].append((began_ns, time.monotonic_ns()))

    def split_failures(self, name: str, records: Records) -> tuple[dict[str, int], int]:
        """Return the failures while a replica ran, and the number of all others.

        The first value counts the failed requests by kind of failure.
        """
        is_down = np.zeros(len(records), dtype=bool)
        for began_ns, ended_ns in self.outages[name]:
            is_down |= (records.sent_ns <= ended_ns) & (records.done_ns >= began_ns)
        down = int((is_down & (records.status != OK)).sum())
        return records.select(~is_down).failures(), down


def _answers(address: str) -> bool:
    with suppress(OSError):
        return EndpointProviderSuite().scale(address) > 0
    return False


def _list_children(pid: int) -> list[int]:
    with suppress(OSError):
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
        return [int(child) for child in text.split()]
    return []


def run_place(place: Place, options: argparse.Namespace) -> Figures:
    """Roll out, roll back, kill replicas and cut off the store, under load."""
    figures, site, draw = Figures(), place.site, random.Random(options.seed)  # noqa: S311 (a choice of victims)
    place.apply(blue=100)
    for name in NAMES:
        place.start(name)
    until(lambda: all(site.adopted(name) for name in NAMES))
    with ExitStack() as stack:
        loads = {
            name: stack.enter_context(LoadProcess(_plan(site.address(name), options.rate)))
            for name in NAMES
        }
        for turn in range(options.rollouts):
            figures.steps.append(place.apply(green=10, blue=90))
            figures.steps.append(place.apply(green=50, blue=50))
            if turn < options.rollouts - 1 and turn % 2:
                figures.steps.append(place.apply(green=100, blue=0))
            figures.rollbacks.append(place.roll_back())
            if turn < options.kills:
                place.kill(draw.choice(NAMES))
            if turn < options.outages:
                for name in NAMES:
                    place.cut(name)
                time.sleep(3)
                for name in NAMES:
                    place.mend(name)
        figures.cut_s = _measure_cut(place)
        records = {name: load.stop() for name, load in loads.items()}
    figures.requests = sum(map(len, records.values()))
    for name, each in records.items():
        figures.failed[name], down = place.split_failures(name, each)
        figures.down += down
    return figures


def _measure_cut(place: Place) -> float:
    """Return how long a replica that is cut off gives the candidate traffic.

    The replica is cut off in a canary, which is then rolled back. The time is in seconds, from the
    rollback to the replica's last answer by the candidate.
    """
    suite, site = EndpointProviderSuite(), place.site
    place.apply(green=50, blue=50)

    def has_both() -> bool:
        # A replica that was just restarted gives the candidate traffic only after a
        # reconciliation has confirmed the rollout.
        site.provider.confirm_rollout(site.config)
        return {suite.scale(site.address("r4")) for _ in range(20)} == {2.0, 3.0}

    until(has_both)
    place.cut("r4")
    place.sequence += 1
    began = last = time.monotonic()
    state = site.state(blue=100, green=0)
    site.provider.roll_back(site.config, state, generation=place.sequence)
    while time.monotonic() - began < LEASE_S + DEADLINE_S + 5:
        if suite.scale(site.address("r4")) == 3.0:
            last = time.monotonic()
        time.sleep(0.01)
    place.mend("r4")
    return last - began


def _plan(address: str, rate: float) -> LoadPlan:
    return LoadPlan(
        url=f"{address}/invocations",
        payloads=[Payload(body=BODY)],
        headers={"content-type": "application/json"},
        connections=4,
        seconds=3600.0,
        rate=rate,
    )


def list_claims(kind: str, figures: Figures) -> list[Claim]:
    """Return each promised bound beside the measured value."""
    lost = sum(sum(kinds.values()) for kinds in figures.failed.values())
    limit_s = LEASE_S + DEADLINE_S
    slowest = max(figures.steps), max(figures.rollbacks)
    return [
        Claim(
            gate=kind,
            what="slowest step",
            bound=f"≤ {ADOPTED_S:g} s",
            figure=f"{slowest[0]:.2f} s",
            is_met=slowest[0] <= ADOPTED_S,
        ),
        Claim(
            gate=kind,
            what="slowest rollback",
            bound=f"≤ {ADOPTED_S:g} s",
            figure=f"{slowest[1]:.2f} s",
            is_met=slowest[1] <= ADOPTED_S,
        ),
        Claim(
            gate=kind,
            what="candidate traffic of a replica that is cut off",
            bound=f"≤ {limit_s:g} s",
            figure=f"{figures.cut_s:.1f} s",
            is_met=figures.cut_s <= limit_s,
        ),
        Claim(
            gate=kind,
            what="failed requests, but at a replica that was killed",
            bound="0",
            figure=f"{lost}",
            is_met=lost == 0,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--store", action="append", choices=STORES, help="kind of store; repeat for several (all)"
    )
    parser.add_argument(
        "--rollouts", type=int, default=6, help="rollouts, each of which is rolled back (6)"
    )
    parser.add_argument("--kills", type=int, default=2, help="replicas that are killed (2)")
    parser.add_argument(
        "--outages", type=int, default=1, help="outages of the store, of 3 s each (1)"
    )
    parser.add_argument(
        "--rate", type=float, default=200.0, help="requests a second for each replica (200)"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    claims: list[Claim] = []
    for kind in options.store or STORES:
        with (
            tempfile.TemporaryDirectory(prefix="onnx-ops-places-") as folder,
            open_store(kind) as (root, port, route),
        ):
            place = Place(Path(folder), kind, root, port, route)
            try:
                figures = run_place(place, options)
            finally:
                place.site.stop_all()
        print(
            f"{kind}: {figures.requests:,} requests; "
            f"steps {statistics.median(figures.steps):.2f} s in the median, "
            f"rollbacks {statistics.median(figures.rollbacks):.2f} s; "
            f"failed {figures.failed}, and {figures.down} at replicas that had been killed"
        )
        claims += list_claims(kind, figures)
    summary(claims)
    return 0 if all(claim.is_met for claim in claims) else 1


if __name__ == "__main__":
    raise SystemExit(main())
