"""Measure the time from a rollback to all traffic on the previous version.

    python -m benchmarks.rollback [--turns N]

The endpoint is real and under load; MLflow is down. A rollback is timed inside a running process,
and as a whole command. Both are compared with a start of the program that does nothing (`onnx-ops
--version`). Starts and commands take turns, so that a slow or busy machine slows both down alike.
Exits with 1 if a promised bound does not hold: a rollback inside a process takes at most half of
such a start, a command at most three of them, and no request fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.truth.claims import Claim, summary
from onnx_ops.adapters.endpoints.local import LocalEndpoints
from onnx_ops.app.context import open_project
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.ports import Context
from onnx_ops.release.journal import Journal
from onnx_ops.release.promote import bind_endpoint, promote
from onnx_ops.release.reconcile import reconcile_until_stable
from onnx_ops.testing.fakes import FakeRegistry
from onnx_ops.testing.registries import publication
from tests.release.release_parts import roll_back
from tests.support.load import LoadPlan, LoadProcess, Payload

ENDPOINT, MODEL, TARGET = "digits", "linear", "cpu-1t"
NOBODY = "http://127.0.0.1:9"
"""An address on which nothing listens, so that MLflow is down."""
BOOKKEEPING_S = 8.0
"""Wait after each command, in seconds.

The command leaves a process behind that writes to MLflow. That process must not disturb the next
command.
"""
BODY = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
).encode()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=9, help="whole commands (9)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="onnx-ops-rollback-") as folder:
        os.environ["ONNX_OPS_TRACKING_URI"] = NOBODY
        context = two_versions(Path(folder))
        local = context.provider("local")
        assert isinstance(local, LocalEndpoints)
        config = Journal.open(context, ENDPOINT).config
        try:
            with load(local, config, options.turns * (BOOKKEEPING_S + 4) + 30) as running:
                inside = [
                    timed(partial(roll_back, context, ENDPOINT, to=to, reason="timed", force=True))
                    for to in turns(21)
                ]
                started, whole = [], []
                for to in itertools.islice(turns(options.turns + 1), 1, None):
                    started.append(timed(partial(program, Path(folder), "--version")))
                    whole.append(command(Path(folder), to))
                failed = running.stop().failed
        finally:
            local.stop(config)
    print(
        f"inside a process: {shown(inside)}\nwhole command:    {shown(whole)}\nbare start:       "
        f"{shown(started)}"
    )
    start = statistics.median(started)
    claims = [
        bound("median inside a process, in bare starts", statistics.median(inside) / start, 0.5),
        bound("median of the whole command, in bare starts", statistics.median(whole) / start, 3.0),
        Claim(
            gate="rollback",
            what="failed requests",
            bound="0",
            figure=str(failed),
            is_met=failed == 0,
        ),
    ]
    summary(claims)
    return 0 if all(claim.is_met for claim in claims) else 1


def two_versions(root: Path, registry: FakeRegistry | None = None) -> Context:
    """Create a project with an endpoint that serves version 2 and keeps version 1.

    The registry serves only to create the project; the returned context does not use it.
    """
    registry = registry or FakeRegistry()
    (root / "onnx-ops.toml").touch()
    config = EndpointConfig(
        endpoint=ENDPOINT,
        provider="local",
        model=MODEL,
        target=TARGET,
        target_digest=digest_bytes(b"target"),
        pipeline="p",
    )
    context = setting_up(root, registry)
    bind_endpoint(context, config, RolloutPolicy())
    for seed in ("a", "b"):
        version = registry.publish(
            publication(root / "files", model=MODEL, seed=seed, target=TARGET)
        )["fp32"]
        promote(
            context, MODEL, version, TARGET, override=True, reason="only the rollback is looked at"
        )
        reconcile_until_stable(context, ENDPOINT)
    return open_project(root).context


def setting_up(root: Path, registry: FakeRegistry) -> Context:
    """Return the project's context with a registry in memory."""
    return replace(open_project(root).context, registry=lambda: registry)


def load(local: LocalEndpoints, config: EndpointConfig, seconds: float) -> LoadProcess:
    plan = LoadPlan(
        url=f"{local.address(config)}/v2/models/{MODEL}/infer",
        payloads=[Payload(body=BODY)],
        headers={"content-type": "application/json"},
        connections=4,
        rate=200,
        seconds=seconds,
    )
    return LoadProcess(plan)


def timed(call: object) -> float:
    assert callable(call)
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def turns(number: int) -> Iterator[str]:
    """Return the versions to go back to: 1, 2, 1 ..., each from the other one."""
    return itertools.islice(itertools.cycle("12"), number)


def command(root: Path, to: str) -> float:
    """Return the seconds that `onnx-ops rollback` takes."""
    seconds = timed(
        partial(program, root, "rollback", ENDPOINT, "--to", to, "--force", "--reason", "timed")
    )
    time.sleep(BOOKKEEPING_S)
    return seconds


def program(root: Path, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-P", "-m", "onnx_ops", *arguments],
        cwd=root,
        check=True,
        capture_output=True,
    )


def shown(seconds: list[float]) -> str:
    return (
        f"median {1e3 * statistics.median(seconds):.0f} ms, "
        f"{1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f} ms"
    )


def bound(what: str, ratio: float, limit: float) -> Claim:
    return Claim(
        gate="rollback",
        what=what,
        bound=f"<= {limit}",
        figure=f"{ratio:.2f}",
        is_met=ratio <= limit,
    )


if __name__ == "__main__":
    sys.exit(main())
