"""Check that no version is served again after a request to roll it back.

    python -m benchmarks.rollback_debt [--quick] [--provider NAME] [--only FAULT]

The servers run on this machine, and on the fakes of two clouds behind their real SDKs. Every trial
requests a rollback while something is broken: the request ends with an error, is killed, or runs
out of time. Then the command, the reconciler or the watch tries repeatedly, first while the fault
lasts, then after the repair. A client calls the endpoint all the time.

A version is served again if it answers after another version has answered, or after no version has.
It is also served again if an effect in the ledger was to give it traffic. Exits with 1 if the
rolled-back version was served again, if a rollback was forgotten, if a command took longer than
10 s, or if a trial showed nothing.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from benchmarks.debt.clients import Client
from benchmarks.debt.processes import (
    comes_true,
    context_of,
    end_process,
    given_up_after,
    run_bounded,
    start_process,
)
from benchmarks.debt.project import (
    FOLLOWERS,
    Place,
    confirm,
    create_project,
    request,
    serve_both,
    serve_canary,
)
from benchmarks.debt.providers import PROVIDERS, opened
from benchmarks.debt.sites import Fault, Repair, Site
from benchmarks.truth.claims import Claim, at_most, summary, table
from onnx_ops.adapters.host import SystemClock
from onnx_ops.errors import MeasurementError
from onnx_ops.protocol.replica_tables import DEADLINE_S, LEASE_S
from onnx_ops.release.endpoint_calls import COMMAND_TIMEOUT_S
from onnx_ops.testing.fakes import FakeRegistry

ANSWER_S = 10.0
"""Time in seconds within which an operator must get an answer."""
SET_UP_S = 100.0
"""Time limit in seconds for an endpoint to serve both versions in turn."""
REPAIRED_S = 60.0
"""Time limit in seconds from a repair to the right traffic."""
TRIAL_S = 240.0
"""Time limit of a trial in seconds; a longer trial counts as showing nothing."""
ENDINGS = ("error", "kill -9", "time-out")
WAYS = list(itertools.product(ENDINGS, FOLLOWERS))
QUICK = {
    "sagemaker": ("429", "response lost", "capacity missing"),
    "azureml": ("409", "response lost", "image cannot start"),
    "replicas-folder": ("two reconcilers", "operator's share not mounted, canary"),
    "replicas-s3": ("response lost", "replica cut off, canary"),
}
"""The faults of a quick run, for the providers that have many."""
NOT_QUICK = ("replicas-blob",)
"""Providers that a quick run leaves out; the server of this one is an npm package."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of one trial.

    Attributes:
        pending: whether the request could not be carried out immediately.
        again: number of answers of the rolled-back version after another state of the endpoint, and
            of effects that were to bring it back.
        seconds: duration of the slowest command.
        forgotten: whether the rollback never took effect, or did not last.
    """

    pending: bool
    again: int
    seconds: float
    forgotten: bool


def try_fault(
    site: Site, fault_name: str, ending: str, follower: str, *, number: int, draw: random.Random
) -> Trial:
    """Make one trial. `number` selects one of the two ways of a fault."""
    fault, variant, clock = site.faults[fault_name], bool(number % 2), SystemClock()
    place = site.place(f"debt-{number}-{draw.randrange(1 << 24):06x}", fault_name)
    with site.endpoint(place, fault_name), ExitStack() as stack:
        serve_before(place, fault, variant)
        routes = site.routes(place)
        repair = fault.apply(place, variant)
        clients = [Client(route, timeout_s=0.5) for route in routes]
        for client in clients:
            stack.callback(client.stop)
        seconds = [*send_until_recorded(place, ending, draw)]
        pending = not place.is_paid()
        paid_at = follow_until_paid(place, fault, follower, repair, seconds)
        if paid_at is not None:
            run_bounded(confirm, place, limit_s=REPAIRED_S)
        forgotten = paid_at is None or not place.is_paid()
        if not forgotten:
            for client in clients:
                client.wait_for(3, "v1")
    ended_at = clock.now() if paid_at is None else paid_at
    again = sum(count_again(client, fault, place.requested_at(), ended_at) for client in clients)
    again += place.intents_for_the_rolled_back()
    return Trial(pending=pending, again=again, seconds=max(seconds), forgotten=forgotten)


def serve_before(place: Place, fault: Fault, variant: bool) -> None:
    """Let the endpoint serve what the fault concerns.

    This is a candidate, or a release that has finished.
    """
    if fault.candidate:
        run_bounded(serve_canary, place, limit_s=SET_UP_S)
    else:
        keep_first = not (variant if fault.unloaded is None else fault.unloaded)
        run_bounded(serve_both, place, keep_first, limit_s=SET_UP_S)


def send_until_recorded(place: Place, ending: str, draw: random.Random) -> Iterator[float]:
    """Request the rollback until it is recorded, at most twice.

    The second request follows if the first one ended before it was recorded. Yields the seconds of
    each request.

    Raises:
        MeasurementError: the rollback was not recorded.
    """
    yield send_request(place, ending, draw)
    if not place.is_requested():
        yield send_request(place, "error", draw)
    if not place.is_requested():
        raise MeasurementError("the rollback was not recorded", where=place.config.endpoint)


def follow_until_paid(
    place: Place, fault: Fault, follower: str, repair: Repair, seconds: list[float]
) -> float | None:
    """Let processes retry the rollback, under the fault and after the repair.

    Return when the rollback took effect, in seconds since the epoch; None if it did not in time.
    The durations of the slowest commands are added to `seconds`.
    """
    clock = SystemClock()
    with ExitStack() as stack:
        slowest = [stack.enter_context(following(place, follower)) for _ in range(fault.followers)]

        def is_paid() -> bool:
            # Processes block while the pipes of their reports are full, so all reports are read.
            seconds.extend(seconds_of_one() for seconds_of_one in slowest)
            return place.is_paid()

        paid_at, repaired_at = 0.0, clock.now() + fault.broken_s
        while clock.now() < repaired_at:
            paid_at = paid_at or (clock.now() if is_paid() else 0.0)
            time.sleep(0.1)
        repair()
        is_late = not comes_true(is_paid, REPAIRED_S)
    return None if is_late else paid_at or clock.now()


def count_again(client: Client, fault: Fault, requested_at: float, paid_at: float) -> int:
    """Return how many answers of version 2 began when it must not serve any more.

    A finished release can answer at a server until that server serves version 1, and nowhere after
    the rollback took effect. A candidate can answer until the rollback took effect, or until its
    lease must have ended.
    """
    limit = min(paid_at, requested_at + LEASE_S + DEADLINE_S) if fault.candidate else paid_at
    late = [
        name == "v2" and began_at > limit
        for name, began_at in zip(client.answers, client.began_at, strict=True)
    ]
    if fault.candidate:
        return sum(late)
    first = (
        0
        if fault.down
        else next((at for at, name in enumerate(client.answers) if name == "v1"), len(late))
    )
    return sum(name == "v2" for name in client.answers[first:]) + sum(late[:first])


def send_request(place: Place, ending: str, draw: random.Random) -> float:
    """Request a rollback in a separate process.

    Return the seconds until the process answered; 0 if it was killed.
    """
    killed_s = draw.uniform(0.0, 0.6) if ending == "kill -9" else None
    return run_bounded(
        request, place, 0.05 if ending == "time-out" else COMMAND_TIMEOUT_S, killed_s=killed_s
    )


@contextmanager
def following(place: Place, follower: str) -> Iterator[Callable[[], float]]:
    """Let a process retry the rollback repeatedly.

    Yields a function that returns the seconds of the slowest command so far.
    """
    mine, its = context_of(place).Pipe()
    process = start_process(FOLLOWERS[follower], place, its)
    began: list[float] = []
    seconds = [0.0]

    def slowest() -> float:
        while mine.poll():
            what, at = mine.recv()
            if what == "began":
                began[:] = [at]
            else:
                seconds.append(at - began.pop())
        return max([*seconds, *(time.monotonic() - at for at in began)])

    try:
        yield slowest
        if end_process(process):
            raise MeasurementError(
                f"{follower} ended with {process.exitcode}", where=place.config.endpoint
            )
    finally:
        end_process(process)


def try_provider(
    name: str, *, only: Sequence[str] | None, quick: bool, seed: int
) -> list[Trial | None]:
    """Make all trials of a provider; return None for each that showed nothing.

    Each trial and a table of all trials are printed.
    """
    draw = random.Random(seed)  # noqa: S311 (moments, no secrets)
    trials: list[Trial | None] = []
    rows: list[tuple[str, ...]] = []
    with (
        tempfile.TemporaryDirectory(prefix="onnx-ops-debt-") as folder,
        opened(name, Path(folder)) as site,
    ):
        registry = create_project(Path(folder))
        few = QUICK.get(name) if quick else None
        faults = [fault for fault in site.faults if fault in (only or few or site.faults)]
        for number, fault in enumerate(faults):
            chosen = [WAYS[(4 * number) % len(WAYS)]] if quick else WAYS
            of_fault = [
                run_trial(site, registry, fault, way, number=number + index, draw=draw)
                for index, way in enumerate(chosen)
            ]
            seen = [trial for trial in of_fault if trial is not None]
            counts = [
                sum(bool(getattr(trial, what)) for trial in seen)
                for what in ("pending", "again", "forgotten")
            ]
            slowest = f"{max((trial.seconds for trial in seen), default=0.0):.1f} s"
            rows.append(
                (fault, str(len(of_fault)), *map(str, counts), slowest, str(of_fault.count(None)))
            )
            trials += of_fault
    head = (
        "fault",
        "trials",
        "pending at first",
        "served again",
        "forgotten",
        "slowest command",
        "showed nothing",
    )
    table(name, head, rows)
    return trials


def run_trial(
    site: Site,
    registry: FakeRegistry,
    fault: str,
    way: tuple[str, str],
    *,
    number: int,
    draw: random.Random,
) -> Trial | None:
    """Make and print one trial within a time limit; None if it showed nothing."""
    site.place("").registry.create(registry)
    trial, began = None, time.monotonic()
    try:
        with given_up_after(TRIAL_S):
            trial = try_fault(site, fault, *way, number=number, draw=draw)
    except Exception:
        print(traceback.format_exc(), file=sys.stderr)
    what = "showed nothing"
    if trial is not None:
        bad = f"{trial.again} times again, {'forgotten' if trial.forgotten else 'not forgotten'}"
        what = f"{bad}, slowest command {trial.seconds:.1f} s"
    took = time.monotonic() - began
    print(
        f"{site.name}, {fault}, {', '.join(way)}: {took:.1f} s, {what}", file=sys.stderr, flush=True
    )
    return trial


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="some faults, each with one ending and one follower"
    )
    parser.add_argument("--provider", choices=PROVIDERS, action="append", help="only this one")
    parser.add_argument("--only", action="append", help="only this fault")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of kills (0)")
    options = parser.parse_args()
    # The variable hides warnings of marshmallow about Azure's SDK.
    os.environ["PYTHONWARNINGS"] = "ignore"
    names = options.provider or [
        name for name in PROVIDERS if not (options.quick and name in NOT_QUICK)
    ]
    # The few trials of a quick run mostly wait, so the providers are tested in parallel.
    with ProcessPoolExecutor(
        len(names) if options.quick else 1, mp_context=get_context("spawn")
    ) as pool:
        asked = partial(try_provider, only=options.only, quick=options.quick, seed=options.seed)
        trials = [trial for of_one in pool.map(asked, names) for trial in of_one]
    claims = claims_of(trials)
    summary(claims)
    return 0 if all(claim.is_met for claim in claims) else 1


def claims_of(trials: Sequence[Trial | None]) -> list[Claim]:
    seen = [trial for trial in trials if trial is not None]
    slowest = max((trial.seconds for trial in seen), default=0.0)
    nothing = len(trials) - len(seen)
    again, forgotten = (
        sum(trial.again > 0 for trial in seen),
        sum(trial.forgotten for trial in seen),
    )
    return [
        at_most("rollback", "served again", again, len(seen), 0.0),
        at_most("rollback", "forgotten", forgotten, len(seen), 0.0),
        Claim(
            gate="rollback",
            what="slowest answer",
            bound=f"≤ {ANSWER_S:g} s",
            figure=f"{slowest:.1f} s",
            is_met=slowest <= ANSWER_S,
        ),
        Claim(
            gate="rollback",
            what="trials that showed nothing",
            bound="0",
            figure=f"{nothing} of {len(trials)}",
            is_met=not nothing,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
