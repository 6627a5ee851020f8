"""Measure the user-space CPU time of a request without a socket.

    python -m benchmarks.serving.path [--rounds N]

A worker's protocol gets a transport that keeps what is written. Requests are identical, have new
request ids, have traces too, or differ as behind a gateway: with users, and two clients that share
one connection. Prints the microseconds of a request beyond those of `session.run`. Beside them are
those of a plain parser loop that has neither split, metrics nor limits (`peers/plain.py`).
Each value is the minimum of many interleaved rounds of one thread's time. Exits with 1 if a value
exceeds its `BOUNDS`, which are relative to the plain parser loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.models import MLP, write_all
from benchmarks.serving.peers.plain import PlainProtocol, open_session
from onnx_ops.serving.inference import request_queue
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import deploy
from tests.serving.serving_worker import Worker

REQUESTS = 512
"""Requests of a round; all of them differ where clients' requests do."""
BOUNDS: Mapping[str, float] = {"JSON": 2.0, "binary": 1.6}
"""Largest cost by form, relative to the cost of the plain parser loop for the same requests."""
BINARY = {"content-type": "application/octet-stream"}


class Transport:
    """A transport that keeps the bytes that were written last."""

    written = b""

    def write(self, data: bytes) -> None:
        self.written = data

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def is_closing(self) -> bool:
        return False


def json_bodies() -> list[bytes]:
    draw = np.random.default_rng(1).random((REQUESTS, *MLP.shape)).round(4)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, *MLP.shape]}
    return [json.dumps({"inputs": [{**tensor, "data": row.tolist()}]}).encode() for row in draw]


def binary_bodies() -> list[tuple[bytes, int]]:
    """Return bodies, each with the length of its JSON header."""
    draw = np.random.default_rng(1).random((REQUESTS, *MLP.shape)).astype(np.float32)
    tensor = {
        "name": "x",
        "datatype": "FP32",
        "shape": [1, *MLP.shape],
        "parameters": {"binary_data_size": 64},
    }
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return [(header + row.tobytes(), len(header)) for row in draw]


def other_json(body: bytes) -> bytes:
    """Return the same request as another client writes it."""
    return json.dumps(json.loads(body), separators=(",", ":")).encode()


def other_binary(body: bytes, length: int) -> tuple[bytes, int]:
    header = json.loads(body[:length])
    header["outputs"] = [{"name": "y", "parameters": {"binary_data": True}}]
    del header["parameters"]
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + body[length:], len(text)


def post(number: int, body: bytes, headers: Mapping[str, str]) -> bytes:
    lines = [f"POST /v2/models/{MLP.name}/infer HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def identical(number: int) -> dict[str, str]:
    return {"Host": "127.0.0.1:8080", "Content-Type": "application/json"}


def new_ids(number: int) -> dict[str, str]:
    return {**identical(number), "x-request-id": f"{number * 0x9E3779B9:032x}"}


def traced(number: int) -> dict[str, str]:
    trace, span = number * 0x9E3779B97F4A7C15 % (1 << 128), number * 0x85EBCA6B
    return {**new_ids(number), "traceparent": f"00-{trace:032x}-{span % (1 << 64):016x}-01"}


def behind_gateway(number: int) -> dict[str, str]:
    """Return headers of two alternating clients behind a proxy.

    The proxy adds the client's address, its user and its trace.
    """
    common = {
        "x-forwarded-for": f"10.0.{number % 200}.7",
        "x-forwarded-proto": "https",
        "authorization": f"Bearer {number * 0xC2B2AE35:064x}",
        "x-user-key": f"user-{number * 7919 % 1000}",
    }
    if number % 2:
        return {**traced(number), **common, "user-agent": "python-httpx/0.28.1", "accept": "*/*"}
    return {
        **traced(number),
        **common,
        "User-Agent": "Go-http-client/1.1",
        "Accept-Encoding": "gzip",
    }


CALLERS: Mapping[str, Callable[[int], dict[str, str]]] = {
    "identical": identical,
    "new ids": new_ids,
    "new ids, traced": traced,
    "two clients, traced": behind_gateway,
}


def requests_of(form: str, caller: Callable[[int], dict[str, str]]) -> list[bytes]:
    """Return requests whose bodies differ, except for `identical`."""
    requests = []
    for number in range(REQUESTS):
        place = 0 if caller is identical else number
        is_other = caller is behind_gateway and number % 2
        headers = caller(number)
        if form == "JSON":
            body = json_bodies_[place]
            requests.append(post(number, other_json(body) if is_other else body, headers))
        else:
            body, length = binary_bodies_[place]
            body, length = other_binary(body, length) if is_other else (body, length)
            headers |= {**BINARY, "Inference-Header-Content-Length": str(length)}
            headers.pop("Content-Type")
            requests.append(post(number, body, headers))
    return requests


json_bodies_, binary_bodies_ = json_bodies(), binary_bodies()


@contextmanager
def connections(folder: Path) -> Iterator[Mapping[str, Callable[[], Any]]]:
    """Yield functions that build a connection of each server.

    The worker of this project has two deployments that share the traffic.
    """
    write_all(folder)
    request_queue._LEAVE_INLINE_S = math.inf  # noqa: SLF001 (a busy machine must not move the model to a thread)
    location = MLP.path(folder).parent
    blue, green = (
        deploy(location, name=name, version=name, model=MLP.name) for name in ("blue", "green")
    )
    worker = Worker(state_of(blue, green, blue=80, green=20))
    worker.assemble()
    worker.deployments.get_current()
    yield {
        "ours": worker.build_connection,
        "plain": lambda: PlainProtocol(open_session(MLP.path(folder))),
    }


async def measure(rounds: int) -> tuple[float, dict[tuple[str, str, str], float]]:
    with (
        tempfile.TemporaryDirectory(prefix="onnx-ops-path-") as name,
        connections(Path(name)) as made,
    ):
        plain = made["plain"]()
        cases: dict[tuple[str, str, str], Callable[[], None]] = {}
        for form in BOUNDS:
            for caller, build in CALLERS.items():
                requests = requests_of(form, build)
                for server, make in made.items():
                    cases[form, caller, server] = drive(make(), requests)
        feed = {"x": MLP.rows()[0]}
        session = plain.session
        least = dict.fromkeys(cases, math.inf)
        run = math.inf
        for _ in range(rounds):
            for case, play in cases.items():
                least[case] = min(least[case], cost(play))
            run = min(run, cost(lambda: [session.run(None, feed) for _ in range(REQUESTS)]))
        return run, least


def drive(connection: Any, requests: list[bytes]) -> Callable[[], None]:
    """Return a function that sends all requests.

    First sends each request once.

    Raises:
        SystemExit: a request is not answered with status 200.
    """
    transport = Transport()
    connection.connection_made(transport)
    for request in requests:
        transport.written = b""
        connection.data_received(request)
        if not transport.written.startswith(b"HTTP/1.1 200 OK\r\n"):
            raise SystemExit(f"{request!r} was answered by {transport.written!r}")
    receive = connection.data_received

    def play() -> None:
        for request in requests:
            receive(request)

    return play


def cost(play: Callable[[], object]) -> float:
    """Return the microseconds of a request."""
    begun = time.thread_time_ns()
    play()
    return (time.thread_time_ns() - begun) / 1e3 / REQUESTS


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    run, least = asyncio.run(measure(parser.parse_args().rounds))
    print(f"session.run: {run:.1f} µs")
    held = True
    for form, bound in BOUNDS.items():
        for caller in CALLERS:
            ours, plain = (least[form, caller, server] - run for server in ("ours", "plain"))
            held = held and ours <= bound * plain
            print(
                f"{form:8}{caller:22}{ours:8.1f} µs  plain {plain:6.1f} µs  "
                f"× {ours / plain:.2f}  (≤ {bound:g})"
            )
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
