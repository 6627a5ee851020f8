"""Check that two reconcilers on two machines agree over one ledger.

    python -m benchmarks.two_machines [--trials 20] [--provider sagemaker]

The machines have separate projects, model folders and states, and clocks that are five minutes
ahead and behind. They share the ledger, the registry, the keys, and an endpoint on the fake of a
cloud behind its real SDK. Their watches run side by side and are killed repeatedly. Meanwhile
aliases are moved to versions that are approved, that have failed their gates, and that a stranger
has signed. Versions are rolled back and overridden, from either machine. A client calls the
endpoint all the time. Exits with 1 if a request failed, if a version answered that was not
approved, if ledger, registry and endpoint do not agree in the end, or if a trial showed nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from benchmarks.debt.clients import Client
from benchmarks.debt.processes import (
    comes_true,
    end_process,
    given_up_after,
    run_bounded,
    start_process,
)
from benchmarks.debt.project import MODEL, TARGET, Place, create_project, serve_first, watch
from benchmarks.debt.providers import opened
from benchmarks.debt.sites import Site
from benchmarks.truth.claims import Claim, at_most, summary, table
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.endpoint import serves_only
from onnx_ops.domain.ledger import Intent
from onnx_ops.domain.rollout import format_alias
from onnx_ops.errors import MeasurementError, OnnxOpsError
from onnx_ops.release.promote import promote
from onnx_ops.release.rollback import roll_back_each
from onnx_ops.testing.fakes import FakeRegistry
from onnx_ops.testing.registries import publication

CLOCKS_S = {"ahead": 300.0, "behind": -300.0}
APPROVED = ("1", "2")
REFUSED = ("3", "4")
"""Version 3 has failed its gates; version 4 was signed by a stranger."""
EVENTS = 12
LONG_S = 1000.0
"""Time after which every lease has ended, on either clock."""
SETTLED_S = 60.0
TRIAL_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of one trial.

    Attributes:
        requests: number of requests.
        failed: number of requests that failed.
        unapproved: number of answers by a version that was not approved, and of intents to give
            such a version traffic.
        kills: number of times that a reconciler was killed.
        disagreement: what does not agree in the end.
    """

    requests: int
    failed: int
    unapproved: int
    kills: int
    disagreement: str


def promote_by_force(place: Place, version: str) -> None:
    promote(place.context(), MODEL, version, TARGET, override=True, reason="a trial")


def roll_back(place: Place, to: str) -> None:
    roll_back_each(place.context(), (place.config.endpoint,), to=to, reason="a trial", force=True)


class Machines:
    """The watches of two machines, which are killed and started again."""

    def __init__(self, places: dict[str, Place]) -> None:
        self.places = places
        self.kills = 0
        self._watches: dict[str, BaseProcess] = {}

    def start(self, name: str) -> None:
        self._watches[name] = start_process(watch, self.places[name])

    def kill(self, name: str) -> None:
        if end_process(self._watches[name]):
            raise MeasurementError(
                f"the watch ended with {self._watches[name].exitcode}", where=name
            )
        self.kills += 1

    def end(self) -> None:
        for process in self._watches.values():
            end_process(process)


@contextmanager
def two_machines(place: Place) -> Iterator[Machines]:
    """Yield the endpoint's project on two machines, each with a copy of its folder."""
    with tempfile.TemporaryDirectory(prefix="onnx-ops-machines-") as folder:
        places = {}
        for name, ahead_s in CLOCKS_S.items():
            shutil.copytree(place.root / ".onnx-ops", Path(folder) / name / ".onnx-ops")
            shutil.copy(place.root / "onnx-ops.toml", Path(folder) / name)
            places[name] = replace(place, root=Path(folder) / name, machine=name, ahead_s=ahead_s)
        machines = Machines(places)
        try:
            yield machines
        finally:
            machines.end()


def make_trial(site: Site, number: int, draw: random.Random) -> Trial:
    place = site.place(f"two-{number}")
    place.time_file.unlink(missing_ok=True)
    with site.endpoint(place, ""):
        serve_first(place)
        client = Client(site.route(place), timeout_s=30.0)
        try:
            with two_machines(place) as machines:
                for name in machines.places:
                    machines.start(name)
                for _ in range(EVENTS):
                    happen(machines, place, draw)
                    time.sleep(draw.uniform(0.0, 1.0))
                for name in machines.places:
                    machines.kill(name)
                put_forward(place)
                last = draw.choice(list(machines.places))
                machines.start(last)
                agreed = comes_true(lambda: not disagreement(place), SETTLED_S)
                client.wait_for(3, next(iter(serving(place))))
        finally:
            client.stop()
        bodies = [entry.body for entry in place.ledger().read(place.config.endpoint)]
        intents = [body.action.state for body in bodies if isinstance(body, Intent)]
        bad = [
            name
            for state in intents
            for name, weight in state.split.weights.items()
            if weight and name[1:] in REFUSED
        ]
        answered = [name for name in client.answers if name[1:] not in APPROVED]
        return Trial(
            requests=len(client.answers) + client.failures,
            failed=client.failures,
            unapproved=len(bad) + len(answered),
            kills=machines.kills,
            disagreement="" if agreed else disagreement(place),
        )


def happen(machines: Machines, place: Place, draw: random.Random) -> None:
    """Let one random event happen."""
    one = draw.choice(list(machines.places))
    match draw.choice(
        ["alias", "alias", "champion", "override", "rollback", "kill", "kill", "time"]
    ):
        case "alias":
            place.registry.set_alias(
                MODEL, format_alias("challenger", TARGET), draw.choice(APPROVED + REFUSED)
            )
        case "champion":
            place.registry.set_alias(
                MODEL, format_alias("champion", TARGET), draw.choice(APPROVED + REFUSED)
            )
        case "override":
            run_bounded(promote_by_force, machines.places[one], draw.choice(APPROVED))
        case "rollback":
            run_bounded(roll_back, machines.places[one], draw.choice(APPROVED))
        case "kill":
            machines.kill(one)
            machines.start(one)
        case _:
            put_forward(place)


def put_forward(place: Place) -> None:
    before = float(place.time_file.read_text()) if place.time_file.exists() else 0.0
    aside = place.time_file.with_suffix(".new")
    aside.write_text(str(before + LONG_S))
    aside.replace(place.time_file)


def serving(place: Place) -> set[str]:
    actual = place.context().provider(place.config.provider).observe(place.config)
    weights = {} if actual is None else actual.split.weights
    return {name for name, weight in weights.items() if weight}


def disagreement(place: Place) -> str:
    """Return how ledger, registry and endpoint disagree.

    The text is empty if they agree and nothing is left to do.
    """
    try:
        state = place.state()
        actual = place.context().provider(place.config.provider).observe(place.config)
        aliases = place.registry.aliases(MODEL)
    except OnnxOpsError as error:
        return str(error)
    stable = state.roles.stable
    if (
        stable is None
        or state.open_intent is not None
        or state.pending_rollback is not None
        or state.pending_aliases
    ):
        return "something is left to do"
    if actual is None or not serves_only(actual, stable):
        return f"{stable.name} should serve: {actual}"
    if aliases.get(format_alias("champion", TARGET)) != stable.version:
        return f"{stable.name} serves, but the aliases are {aliases}"
    if (
        format_alias("challenger", TARGET) in aliases
        and aliases[format_alias("challenger", TARGET)] != stable.version
    ):
        return f"a challenger waits: {aliases}"
    return ""


def registry_of(root: Path) -> FakeRegistry:
    """Return a registry with two approved versions and two refused ones."""
    registry = create_project(root)
    for seed, verdict in (("failed", Verdict.FAIL), ("forged", Verdict.PASS)):
        registry.publish(
            publication(root / "files", model=MODEL, seed=seed, target=TARGET, verdict=verdict)
        )
    return registry


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=20, help="of each provider (20)")
    parser.add_argument(
        "--provider", choices=("sagemaker", "azureml"), action="append", help="only this one"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what happens when (0)")
    options = parser.parse_args()
    draw = random.Random(options.seed)  # noqa: S311 (events, no secrets)
    # The filter hides warnings of marshmallow about Azure's SDK.
    warnings.simplefilter("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"
    # The import is slow on a busy machine. It is made here, so that it does not use up the time
    # limit of the first trial.
    importlib.import_module("azure.ai.ml")
    trials: list[Trial | None] = []
    for name in options.provider or ("sagemaker", "azureml"):
        with (
            tempfile.TemporaryDirectory(prefix="onnx-ops-two-") as folder,
            opened(name, Path(folder)) as site,
        ):
            registry = registry_of(Path(folder))
            for number in range(options.trials):
                site.place("").registry.create(registry)
                try:
                    with given_up_after(TRIAL_S):
                        trials.append(make_trial(site, number, draw))
                except Exception:
                    trials.append(None)
                    print(
                        f"{name}, trial {number}:\n{traceback.format_exc()}",
                        file=sys.stderr,
                        flush=True,
                    )
                print(f"{name}, trial {number}: {trials[-1]}", file=sys.stderr, flush=True)
    claims = claims_of(trials)
    summary(claims)
    return 0 if all(claim.is_met for claim in claims) else 1


def claims_of(trials: list[Trial | None]) -> list[Claim]:
    seen = [trial for trial in trials if trial is not None]
    requests, failed = sum(t.requests for t in seen), sum(t.failed for t in seen)
    apart = sum(bool(t.disagreement) for t in seen)
    unapproved = sum(t.unapproved > 0 for t in seen)
    kills, nothing = sum(t.kills for t in seen), len(trials) - len(seen)
    table(
        "two machines",
        ("trials", "kills", "requests"),
        [(str(len(trials)), str(kills), str(requests))],
    )
    return [
        at_most("two machines", "inconsistent states", apart, len(seen), 0.0),
        at_most("two machines", "failed requests", failed, requests, 0.0),
        at_most("two machines", "something unapproved served", unapproved, len(seen), 0.0),
        Claim(
            gate="two machines",
            what="trials that showed nothing",
            bound="0",
            figure=f"{nothing} of {len(trials)}",
            is_met=not nothing,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
