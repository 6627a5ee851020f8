"""Measure what an idle reconcile pass costs the registry.

    python -m benchmarks.registry [--versions 10000] [--models 50] [--rounds 40]
        [--page docs/reconcile-cost.md]

Two MLflow servers take turns in one run: one with 100 versions, one with `--versions`, over the
same number of models. Each model has an endpoint that serves its champion. The database is SQLite,
then PostgreSQL, which is started for the purpose where it is installed with its driver psycopg2.
Requests are counted where MLflow's client sends them. Exits with 1 if the number of requests
depends on the number of versions.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import requests

from benchmarks.registries.databases import create_database, populate, postgresql, why_no_postgresql
from benchmarks.truth.page import fill, markdown
from onnx_ops.adapters.files import open_objects
from onnx_ops.adapters.host import SystemClock
from onnx_ops.adapters.ledgers.log import ObjectLedger
from onnx_ops.adapters.registries.mlflow import MlflowRegistry
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import Deployment, EndpointConfig
from onnx_ops.domain.ledger import AliasesWritten
from onnx_ops.domain.rollout import Action, ActionKind, Roles, build_split_state
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.ports import Context
from onnx_ops.release.effects import perform_action
from onnx_ops.release.journal import Journal
from onnx_ops.release.promote import bind_endpoint
from onnx_ops.release.reconcile_pass import read_registry
from onnx_ops.release.watch import ReconcileQueue, WatchEvent, WatchEventKind, WatchLoop
from onnx_ops.testing.fakes import FakeWorld, make_ledger_keys
from tests.support.mlflow_server import mlflow_server

FEW, ALIAS, TARGET = 100, "champion-cpu-1t", "cpu-1t"
WARM_UP, PER_MODEL = 3, "query of the registry, one request for each model"
CALLS: Mapping[str, Callable[[Context, WatchLoop], object]] = {
    "idle pass over all endpoints": lambda context, watcher: watcher.reconcile_all(),
    "query of the registry in an idle pass": lambda context, watcher: read_registry(context),
    PER_MODEL: lambda context, watcher: [
        context.registry().aliases(name.removeprefix("endpoint-"))
        for name in context.ledger.endpoints()
    ],
}


@dataclass
class Counter:
    """The seconds of each turn and the number of requests, by call, of one server."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in CALLS})
    requests: dict[str, int] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", type=int, default=10_000)
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--page", type=Path, help="write the table into this page")
    options = parser.parse_args()
    rows: list[list[str]] = []
    is_met = True
    with tempfile.TemporaryDirectory(prefix="onnx-ops-registry-") as name:
        for kind in ("SQLite", "PostgreSQL"):
            missing = why_no_postgresql() if kind == "PostgreSQL" else ""
            if missing:
                rows.append([kind, f"left out: {missing}", "", "", ""])
                continue
            few, many = measure(kind, Path(name) / kind, options)
            rows += [[kind, call, *compare_counts(few, many, call)] for call in CALLS]
            is_met &= all(few.requests[call] == many.requests[call] for call in CALLS)
    head = (
        "database",
        "operation",
        f"requests, {FEW} versions",
        f"requests, {options.versions:,} versions",
        "time ratio",
    )
    table = markdown(head, rows)
    print(table)
    if options.page:
        fill(options.page, "registry", table)
    return 0 if is_met else 1


def compare_counts(few: Counter, many: Counter, call: str) -> list[str]:
    low, high = (statistics.median(counter.seconds[call]) for counter in (few, many))
    ratios = sorted(b / a for a, b in zip(few.seconds[call], many.seconds[call], strict=True))
    spread = f"{ratios[len(ratios) // 10]:.2f} to {ratios[-1 - len(ratios) // 10]:.2f}"
    time_told = (
        f"{statistics.median(ratios):.2f} ({spread}; {1000 * low:.0f} ms, {1000 * high:.0f} ms)"
    )
    return [str(few.requests[call]), str(many.requests[call]), time_told]


def measure(kind: str, folder: Path, options: argparse.Namespace) -> tuple[Counter, Counter]:
    sides: list[tuple[Context, WatchLoop, Counter]] = []
    with ExitStack() as stack:
        server = stack.enter_context(postgresql(folder)) if kind == "PostgreSQL" else ""
        for versions in (FEW, options.versions):
            place = folder / str(versions)
            place.mkdir(parents=True)
            database = (
                create_database(server, f"mlflow_{versions}")
                if server
                else f"sqlite:///{place}/mlflow.db"
            )
            populate(database, place, models=options.models, versions=versions, alias=ALIAS)
            url = stack.enter_context(mlflow_server(place, database=database))
            context = connected(url, place)
            for number in range(options.models):
                serve(context, f"model-{number:03d}", str(versions // options.models))
            watcher = WatchLoop(context, ReconcileQueue(), interval_s=5.0, on_event=quiet)
            sides.append((context, watcher, Counter()))
        counted(sides)
        for turn in range(options.rounds + WARM_UP):
            for call, do in CALLS.items():
                if call == PER_MODEL and turn >= WARM_UP + 5:
                    continue  # Such a call takes seconds and serves only for comparison.
                for context, watcher, counter in sides if turn % 2 else reversed(sides):
                    begun = time.perf_counter()
                    do(context, watcher)
                    if turn >= WARM_UP:
                        counter.seconds[call].append(time.perf_counter() - begun)
    return sides[0][2], sides[1][2]


def counted(sides: list[tuple[Context, WatchLoop, Counter]]) -> None:
    """Make one call of each kind on each server, and count its requests."""
    send = requests.Session.send
    sent: list[str] = []

    def counting(
        self: requests.Session, request: requests.PreparedRequest, **kwargs: Any
    ) -> requests.Response:
        sent.append(str(request.url))
        return send(self, request, **kwargs)

    requests.Session.send = counting  # type: ignore[method-assign]
    try:
        for context, watcher, counter in sides:
            for call, do in CALLS.items():
                sent.clear()
                do(context, watcher)
                counter.requests[call] = len(sent)
    finally:
        requests.Session.send = send  # type: ignore[method-assign]


def connected(url: str, folder: Path) -> Context:
    """Return a context with a real registry and a real ledger.

    Endpoints and model files are in memory, as they are not measured.
    """
    registry = MlflowRegistry(url)
    ledger = ObjectLedger(open_objects(str(folder / "ledger")), make_ledger_keys())
    return replace(
        FakeWorld(ledger=ledger).context(), registry=lambda: registry, clock=SystemClock()
    )


def serve(context: Context, model: str, version: str) -> None:
    """Record an endpoint that serves a version, as a finished rollout leaves it."""
    config = EndpointConfig(
        endpoint=f"endpoint-{model}",
        provider="memory",
        model=model,
        target=TARGET,
        target_digest=digest_bytes(b"target"),
        pipeline="p",
    )
    bind_endpoint(context, config, RolloutPolicy())
    digest = digest_bytes(f"{model} {version}".encode())
    deployment = Deployment(
        name=f"v{version}",
        model=model,
        version=version,
        variant="fp32",
        release=digest,
        manifest=digest,
        location="",
    )
    journal = Journal.open(context, config.endpoint)
    state, roles = build_split_state(None, deployment, 100), Roles(stable=deployment)
    perform_action(
        journal,
        Action(kind=ActionKind.FIRST, state=state, roles=roles, why="", aliases={ALIAS: version}),
    )
    journal.append(AliasesWritten(aliases={ALIAS: version}))


def quiet(report: WatchEvent) -> None:
    """Stop the benchmark if a pass is not idle, since idle passes are measured."""
    if report.kind is not WatchEventKind.WAITING:
        raise SystemExit(f"not idle: {report}")


if __name__ == "__main__":
    raise SystemExit(main())
