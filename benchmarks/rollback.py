"""How long from the command to all traffic on the previous version? On a real endpoint under load, with MLflow down.

    python -m benchmarks.rollback [--turns N]

Inside a process that is up, and as a whole command with Python's start. Ends 1 if a promised bound does not hold: a
median under 100 ms inside, under 1 s as a command, and no failed request.
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
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.rollout import RolloutPolicy
from onnx_ops.operations.journal import Journal
from onnx_ops.operations.promote import configure, promote
from onnx_ops.operations.reconcile import settle
from onnx_ops.operations.rollback import roll_back
from onnx_ops.ports import Ports
from onnx_ops.testing.fakes import FakeRegistry
from onnx_ops.testing.registries import publication
from onnx_ops.wiring.project import open_project
from tests.support.load import LoadPlan, LoadProcess, Payload

ENDPOINT, MODEL, TARGET = "digits", "linear", "cpu-1t"
NOBODY = "http://127.0.0.1:9"
"""Nothing listens there: MLflow is down."""
BOOKKEEPING_S = 8.0
"""The command leaves a process behind that tries to tell MLflow; it shall not disturb the next one."""
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}).encode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9, help="whole commands (9)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="onnx-ops-rollback-") as folder:
        os.environ["ONNX_OPS_TRACKING_URI"] = NOBODY
        ports = two_versions(Path(folder))
        local = ports.provider("local")
        assert isinstance(local, LocalEndpoints)
        config = Journal.open(ports, ENDPOINT).config
        try:
            with load(local, config, options.turns * (BOOKKEEPING_S + 4) + 30) as running:
                inside = [
                    timed(partial(roll_back, ports, ENDPOINT, to=to, reason="timed", force=True)) for to in turns(21)
                ]
                whole = [command(Path(folder), to) for to in itertools.islice(turns(options.turns + 1), 1, None)]
                failed = running.stop().failed
        finally:
            local.stop(config)
    print(f"inside a process: {shown(inside)}\nwhole command:    {shown(whole)}\nload average {os.getloadavg()[0]:.1f}")
    claims = [
        bound("median inside a process", statistics.median(inside), 0.1),
        bound("median of the whole command", statistics.median(whole), 1.0),
        Claim(gate="rollback", what="failed requests", bound="0", figure=str(failed), held=failed == 0),
    ]
    summary(claims)
    return 0 if all(claim.held for claim in claims) else 1


def two_versions(root: Path, registry: FakeRegistry | None = None) -> Ports:
    """A project with an endpoint that serves version 2 and keeps version 1; its registry was there for that alone."""
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
    ports = setting_up(root, registry)
    configure(ports, config, RolloutPolicy())
    for seed in ("a", "b"):
        version = registry.publish(publication(root / "files", model=MODEL, seed=seed, target=TARGET))["fp32"]
        promote(ports, MODEL, version, TARGET, override=True, reason="only the rollback is looked at")
        settle(ports, ENDPOINT)
    return open_project(root).ports


def setting_up(root: Path, registry: FakeRegistry) -> Ports:
    """The project's ports with a registry in memory."""
    return replace(open_project(root).ports, registry=lambda: registry)


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
    """Versions to go back to: 1, 2, 1 ..., each from the other one."""
    return itertools.islice(itertools.cycle("12"), number)


def command(root: Path, to: str) -> float:
    """Seconds of `onnx-ops rollback`."""
    options = [ENDPOINT, "--to", to, "--force", "--reason", "timed"]
    program = [sys.executable, "-P", "-m", "onnx_ops", "rollback", *options]
    seconds = timed(lambda: subprocess.run(program, cwd=root, check=True, capture_output=True))
    time.sleep(BOOKKEEPING_S)
    return seconds


def shown(seconds: list[float]) -> str:
    return f"median {1e3 * statistics.median(seconds):.0f} ms, {1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f} ms"


def bound(what: str, seconds: float, limit_s: float) -> Claim:
    return Claim(
        gate="rollback",
        what=what,
        bound=f"< {1e3 * limit_s:.0f} ms",
        figure=f"{1e3 * seconds:.0f} ms",
        held=seconds < limit_s,
    )


if __name__ == "__main__":
    sys.exit(main())
