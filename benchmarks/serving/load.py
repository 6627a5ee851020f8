"""One burst of load.

`wrk` sends it where it is installed (Debian package `wrk`), else tests.support.load.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.contestants import Call
from tests.support.load import LoadPlan, LoadProcess, Payload

_SCRIPT = Path(__file__).with_name("wrk.lua")
_REQUESTS = 4096
_REQUESTS_BYTES = 16 << 20
"""Maximum number and total bytes of the different requests that wrk repeats.

If there are more bodies or users, their number is used instead.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """The measurements of one burst.

    `failed` counts broken connections, time-outs and statuses from 400.
    """

    requests: int
    seconds: float
    failed: int
    p50_us: float
    p99_us: float


def generator() -> str:
    return "wrk" if shutil.which("wrk") else "tests.support.load"


def burst(call: Call, port: int, *, connections: int, seconds: float, folder: Path) -> Burst:
    url = f"http://127.0.0.1:{port}{call.path}"
    if generator() != "wrk":
        return _own(call, url, connections, seconds)
    for number, body in enumerate(call.bodies):
        (folder / f"body-{number}").write_bytes(body)
    headers = "\n".join(f"{name}: {value}" for name, value in call.headers.items())
    settings = {
        "BODY": str(folder / "body-"),
        "BODIES": str(len(call.bodies)),
        "REQUESTS": str(
            max(len(call.bodies), call.keys, min(_REQUESTS, _REQUESTS_BYTES // len(call.bodies[0])))
        ),
        "KEYS": str(call.keys),
        "HEADERS": headers,
    }
    done = subprocess.run(
        [
            "wrk",
            "-t1",
            f"-c{connections}",
            f"-d{max(1, round(seconds))}s",
            "--timeout",
            "30s",
            "-s",
            _SCRIPT,
            url,
        ],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    return Burst(**json.loads(done.stdout.strip().splitlines()[-1]))


def _own(call: Call, url: str, connections: int, seconds: float) -> Burst:
    plan = LoadPlan(
        url=url,
        payloads=[Payload(body=body) for body in call.bodies],
        headers=call.headers,
        connections=connections,
        seconds=seconds,
        keys=call.keys,
        timeout_s=30,
    )
    with LoadProcess(plan) as load:
        figures = load.wait().summary()
    return Burst(
        requests=figures["requests"],
        seconds=figures["seconds"],
        failed=figures["failed"],
        p50_us=1e3 * (figures["p50_ms"] or 0),
        p99_us=1e3 * (figures["p99_ms"] or 0),
    )
