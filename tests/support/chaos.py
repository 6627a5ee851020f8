"""Kills of a server family under load, and their effects on clients.

A kill happens at a chosen moment of a publication.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.errors import MeasurementError
from tests.support.fault_injection import FaultPoint, arm, count_points
from tests.support.load import LoadPlan, LoadProcess, Payload, Records, stale
from tests.support.publish_stress import Publisher, states
from tests.support.server import ServerFamily

_INFER = "/v2/models/m/infer"
_BODY = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}'
_GENERATION = 3
CONNECTIONS = 8

Victim = Literal["supervisor", "worker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of killing one process during a publication.

    Args:
        moment: moment of the publication at which the process was killed.
        reached: whether the publication reached that moment; if not, no process was killed.
        answered: whether the publication was answered with 200.
        generation: generation that the server serves after the kill; -1 for none.
        wanted: generation that was being published.
        healed: whether the next publication was accepted.
        stale: number of answers by a version that was replaced before the request was sent.
        records: records of the load from before the kill until after the next publication.
    """

    moment: int
    reached: bool
    answered: bool
    generation: int
    wanted: int
    healed: bool
    stale: int
    records: Records

    def broken(self, victim: Victim) -> list[str]:
        """Return a description of each guarantee that was broken.

        A killed supervisor must not fail any request. A killed worker may fail at most the request
        under way on each of its connections.
        """
        found = []
        allowed = (self.wanted,) if self.answered else (self.wanted - 1, self.wanted)
        if self.generation not in allowed:
            found.append(
                f"it came back with generation {self.generation}, "
                f"not {' or '.join(map(str, allowed))}"
            )
        if not self.healed:
            found.append("the next publication was refused")
        if self.stale:
            found.append(f"{self.stale} stale answers")
        failures = self.records.failures()
        lost = (
            sum(failures.pop(name, 0) for name in ("reset", "closed")) if victim == "worker" else 0
        )
        if failures or lost > CONNECTIONS:
            found.append(f"requests failed: {self.records.failures()}")
        if not len(self.records):
            found.append("no request was sent meanwhile")
        return found


def dying_server(folder: Path, *options: str) -> tuple[ServerFamily, Path]:
    """Return a server that watches for a fault point, and the file of the point.

    `folder` is the state folder.
    """
    point = folder.parent / f"{folder.name}-point.json"
    program = ("-m", "tests.support.fault_injection", str(point))
    return ServerFamily(folder=folder, program=program, options=options), point


def count_moments(folder: Path, first: Deployment, *, workers: int = 2) -> int:
    """Return the number of moments of a publication."""
    server, point = dying_server(folder, "--workers", str(workers))
    try:
        publisher, upcoming = _begun(server, first)
        arm(point, FaultPoint(at=-1))
        publisher.publish(next(upcoming))
        return count_points(point)
    finally:
        server.destroy()


def publish_and_kill(
    folder: Path, first: Deployment, *, moment: int, victim: Victim, workers: int = 2
) -> Outcome:
    """Publish under load, and kill the victim at one moment of the publication.

    `fault_injection` describes the moments. A killed supervisor is started again, beside the
    workers that it left.
    """
    server, point = dying_server(folder, "--workers", str(workers))
    try:
        publisher, upcoming = _begun(server, first)
        payloads = [Payload(body=_BODY)]
        plan = LoadPlan(
            url=server.url(_INFER), payloads=payloads, connections=CONNECTIONS, seconds=300
        )
        with LoadProcess(plan) as load:
            arm(point, FaultPoint(at=moment, victim=victim))
            try:
                answered = publisher.publish(next(upcoming)).status == 200
            except (OSError, http.client.HTTPException):
                answered = False
            reached = moment < count_points(point)
            point.unlink()
            if victim == "supervisor" and reached:
                server.reap()
                server.start()
            state = server.state()
            healed = publisher.publish(next(upcoming)).status == 200
            records = load.stop()
        return Outcome(
            moment=moment,
            reached=reached,
            answered=answered,
            generation=-1 if state is None else state.generation,
            wanted=_GENERATION,
            healed=healed,
            stale=len(stale(records, publisher.publications)),
            records=records,
        )
    finally:
        server.destroy()


def _begun(server: ServerFamily, first: Deployment) -> tuple[Publisher, Iterator[EndpointState]]:
    """Start a server with some publications; the next one has generation _GENERATION."""
    server.start()
    publisher, upcoming = Publisher(server), states(first)
    for _ in range(_GENERATION - 1):
        answer = publisher.publish(next(upcoming))
        if answer.status != 200:
            raise MeasurementError("the first publications were refused", why=repr(answer))
    return publisher, upcoming
