"""Load an endpoint server, and count exactly what failed.

    python -m tests.support.load http://127.0.0.1:8080/v2/models/m/infer --body request.json
    --connections 16

The exit code is 0 if requests were sent and all were answered with 200; otherwise it is 1. Errors
have the exit codes of onnx-ops.
SIGINT and SIGTERM end the load early; the results up to that time are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from onnx_ops.errors import OnnxOpsError, UserError
from tests.support.load.client import Load
from tests.support.load.plan import LoadPlan, Payload
from tests.support.load.records import Records

RUNNING = "running"
"""First line on standard error, written once all connections are open."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        plan = _plan(given)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            records = runner.run(_run(plan))
        if given.records is not None:
            records.save(given.records)
    except (OnnxOpsError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code if isinstance(error, OnnxOpsError) else 4
    summary = records.summary()
    text = (
        json.dumps(summary)
        if given.json
        else "\n".join(f"{name:<15} {value}" for name, value in summary.items())
    )
    sys.stdout.write(f"{text}\n")
    return 1 if records.failed or not len(records) else 0


async def _run(plan: LoadPlan) -> Records:
    load = Load(plan)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, load.stop)
    await load.connect()
    sys.stderr.write(f"{RUNNING}: {plan.connections} connections\n")
    sys.stderr.flush()
    return await load.run()


def _plan(given: argparse.Namespace) -> LoadPlan:
    headers = {}
    for text in given.header:
        name, colon, value = text.partition(":")
        if not colon:
            raise UserError(f"{text!r} is not a header", remedy="Give NAME: VALUE.")
        headers[name.strip()] = value.strip()
    return LoadPlan(
        url=given.url,
        payloads=[Payload(body=path.read_bytes()) for path in given.body],
        headers=headers,
        connections=given.connections,
        seconds=given.seconds,
        requests=given.requests,
        rate=given.rate,
        keys=given.keys,
        timeout_s=given.timeout,
        seed=given.seed,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("url", help="where requests are posted to")
    add(
        "--body",
        type=Path,
        action="append",
        default=[],
        help="file with a body; several are sent in turn",
    )
    add(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="sent with every request",
    )
    add(
        "--connections",
        type=int,
        default=1,
        help="keep-alive connections, one request at a time on each (1)",
    )
    add("--seconds", type=float, default=5.0, help="how long requests are begun (5)")
    add("--requests", type=int, default=0, help="how many requests at most (as many as fit)")
    add(
        "--rate",
        type=float,
        default=0.0,
        help="requests a second whether or not answers come (closed loop)",
    )
    add(
        "--keys", type=int, default=0, help="how many users send, each with its x-user-key (no key)"
    )
    add(
        "--timeout",
        type=float,
        default=10.0,
        help="seconds until a request without an answer has failed (10)",
    )
    add("--seed", type=int, default=0, help="of the arrivals (0)")
    add("--records", type=Path, help="file for one row a request (.npz)")
    add("--json", action="store_true", help="one JSON document")
    return parser


if __name__ == "__main__":
    sys.exit(main())
