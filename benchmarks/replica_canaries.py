"""Measure the error rates of canary verdicts over simulated replicas.

    python -m benchmarks.replica_canaries [--rollouts N] [--epochs N] [--seed N] [--world NAME]...

A verdict over replicas that end, scale and lag must be as reliable as one over a single server.
Each rollout is a canary step of 10 % in simulated time, by real followers, counts, reports and
judge. It is judged once an epoch. Exits with 1 if the confidence interval of a rate leaves its
bound. Equal candidates are rolled back in at most 2 % of rollouts, and candidates with ten times
the errors in at least 95 %. A user meets one version in an epoch. With 100 rollouts of each kind,
the benchmark takes an hour of one core.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.truth.claims import Claim, at_least, at_most, summary, table
from benchmarks.truth.draws import begin_run, derive_seed
from benchmarks.truth.replica_world import (
    CANDIDATE,
    EPOCH_S,
    SimulatedReplica,
    SimulatedSite,
    Traffic,
)
from onnx_ops.errors import ServiceUnavailableError

BEFORE_S = 600.0
"""Time with the stable version alone."""
KILL_S, KILL_FOLLOWER_S = 30.0, 100.0
CUT_S, CUT_EVERY_S = 40.0, 180.0
LATE_S, APART_S = 20.0, 1.0
SCALED_S, SCALE_EVERY_S = 250.0, 600.0
"""Time with more replicas, and interval from one such time to the next."""
LOOK_S = 10.0
"""Interval of reconciliations.

Each of them lets new replicas give the candidate traffic.
"""
FEW, MANY, KEYLESS = Traffic(users=20, skew=1.1), Traffic(users=5000, skew=0.8), Traffic()
WORSE = Traffic(users=2000, skew=0.8, errors=0.001, worse=10.0, uneven=False)
Disturb = Callable[[SimulatedSite], None]


def _repeat(
    site: SimulatedSite,
    every_s: float,
    call: Callable[[], None],
    victim: SimulatedReplica | None = None,
) -> None:
    """Call a function at an interval of simulated time.

    `victim` is the replica that the call ends: its `ends_at` is set to the time of the next call.
    """

    def turn() -> None:
        call()
        plan(every_s)

    def plan(wait_s: float) -> None:
        site.clock.call_later(wait_s, turn)
        if victim is not None:
            victim.ends_at = site.clock.now + wait_s

    plan(site.random.uniform(0.1, 1.0) * every_s)


def kill_one(site: SimulatedSite) -> None:
    """Kill one of two replicas every 30 s."""
    _, victim = site.add(), site.add()
    _repeat(site, KILL_S, lambda: victim.restart(site.choose_down_s()), victim)


def kill_follower(site: SimulatedSite) -> None:
    """Kill the follower of one of two replicas every 100 s; its server keeps running."""
    _, victim = site.add(), site.add()
    _repeat(
        site,
        KILL_FOLLOWER_S,
        lambda: victim.restart(site.choose_down_s(), with_server=False),
        victim,
    )


def scale(site: SimulatedSite) -> None:
    """Scale from 2 to 6 replicas and back repeatedly, and kill one each time."""
    site.add()
    site.add()

    def end(replica: SimulatedReplica, *, is_killed: bool) -> None:
        replica.kill() if is_killed else replica.stop()
        site.replicas.remove(replica)

    def grow() -> None:
        for number in range(4):
            added, lives_s = site.add(), SCALED_S + site.random.uniform(0, 10)
            added.ends_at = site.clock.now + lives_s
            site.clock.call_later(lives_s, partial(end, added, is_killed=number == 0))

    _repeat(site, SCALE_EVERY_S, grow)


def lag(site: SimulatedSite) -> None:
    """Let clocks differ and reports arrive late, and cut a replica off at times."""
    apart = [site.random.uniform(-APART_S / 2, APART_S / 2) for _ in range(3)]
    site.add(ahead_s=apart[0])
    site.add(ahead_s=apart[1], late_s=LATE_S)
    victim = site.add(ahead_s=apart[2])

    def cut() -> None:
        victim.cut(is_cut=True)
        site.clock.call_later(CUT_S, lambda: victim.cut(is_cut=False))

    _repeat(site, CUT_EVERY_S, cut, victim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one rollout ended, and what was counted.

    `epoch` is the epoch in which the rollout was rolled back; None if it was not. `counted` holds
    the numbers of counted epochs, of the candidate's units, and of the stable version's units.
    """

    epoch: int | None
    why: str
    counted: tuple[int, int, int]


def run_rollout(disturb: Disturb, traffic: Traffic, epochs: int, seed: int) -> Outcome:
    """Run one canary step, and judge it once an epoch, at the same moment of each."""
    with tempfile.TemporaryDirectory(prefix="onnx-ops-canary-") as folder:
        site = SimulatedSite(Path(folder), seed)
        with site.installed():
            disturb(site)
            site.publish(1, 0)
            site.clock.run(BEFORE_S + site.random.uniform(0, EPOCH_S))
            site.send(traffic)
            site.publish(2, 10)
            _repeat(site, LOOK_S, site.confirm)
            for epoch in range(1, epochs + 1):
                site.clock.run(EPOCH_S)
                try:
                    why = site.judge()
                except ServiceUnavailableError:
                    continue
                if why:
                    return Outcome(epoch=epoch, why=why, counted=site.count_units())
            return Outcome(epoch=None, why="", counted=site.count_units())


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One kind of rollouts, and what disturbs them.

    `least` is the least share that is rolled back; it is 0 if the candidate equals the stable
    version.
    """

    disturb: Disturb
    traffic: Sequence[Traffic] = (FEW, MANY, KEYLESS)
    least: float = 0.0

    @property
    def is_worse(self) -> bool:
        return self.least > 0


WORLDS: Mapping[str, World] = {
    "one of 2 killed every 30 s": World(disturb=kill_one),
    "follower of one of 2 killed every 100 s": World(disturb=kill_follower),
    "2 to 6 to 2 replicas": World(disturb=scale),
    "clocks 1 s apart, reports 20 s late, one cut off": World(disturb=lag),
    "ten times the errors, one of 2 killed every 30 s": World(
        disturb=kill_one, traffic=(WORSE,), least=0.95
    ),
    "ten times the errors, 2 to 6 to 2 replicas": World(
        disturb=scale, traffic=(WORSE,), least=0.95
    ),
}


def prove_world(
    number: int, name: str, world: World, rollouts: int, epochs: int
) -> tuple[Claim, Sequence[str]]:
    """Return the claim of a world, and its row of the table."""
    begun = time.perf_counter()
    outcomes = [
        run_rollout(
            world.disturb,
            world.traffic[turn % len(world.traffic)],
            epochs,
            derive_seed(number, turn),
        )
        for turn in range(rollouts)
    ]
    ended = [each.epoch for each in outcomes if each.epoch is not None]
    for why in dict.fromkeys(each.why for each in outcomes if each.why and not world.is_worse):
        print(f"  {name}: {why}", flush=True)
    claim = (
        at_least("power", f"{name}: rolled back", len(ended), rollouts, world.least)
        if world.is_worse
        else at_most("alike", f"{name}: rolled back", len(ended), rollouts, 0.02)
    )
    counted, candidate, stable = (
        median(column) for column in zip(*(each.counted for each in outcomes), strict=True)
    )
    when = f"{median(ended):g}" if ended else "-"
    print(
        f"  {name}: {len(ended)} of {rollouts} rolled back ({time.perf_counter() - begun:.0f} s)",
        flush=True,
    )
    return claim, (
        *(name, f"{rollouts} x {epochs}", f"{len(ended)}", when),
        *(f"{counted:g}", f"{candidate:g}", f"{stable:g}"),
    )


def prove_users(seed: int, percent: int, *, users: int = 10_000, requests: int = 20) -> list[Claim]:
    """Let each user send requests to four replicas in two consecutive epochs."""
    with tempfile.TemporaryDirectory(prefix="onnx-ops-canary-") as folder:
        site = SimulatedSite(Path(folder), seed)
        with site.installed():
            replicas = [site.add() for _ in range(4)]
            site.publish(1, 0)
            site.publish(2, percent)
            site.clock.run(2 * EPOCH_S)
            names, mixed = [], 0
            for _ in range(2):
                site.clock.run(EPOCH_S - site.clock.now % EPOCH_S + 1.0)
                site.confirm()
                site.clock.run(12.0)
                met = [
                    {
                        site.random.choice(replicas).server.answer(
                            b"user-%d" % user, lambda _: False, 0.0
                        )
                        for _ in range(requests)
                    }
                    for user in range(users)
                ]
                mixed += sum(len(each) > 1 for each in met)
                names.append([CANDIDATE in each for each in met])
                site.clock.run(EPOCH_S / 2)
    share, bound = percent / 100, 3 * np.sqrt(percent / 100 * (1 - percent / 100) / users)
    shown = [float(np.mean(each)) for each in names]
    correlation, most = float(np.corrcoef(np.array(names))[0, 1]), 4 / np.sqrt(users)
    what = f"{users:,} users, {requests} requests each, {percent} %"
    return [
        Claim(
            gate="users",
            what=f"{what}: users that meet both versions in one of two epochs",
            bound="0",
            figure=f"{mixed}",
            is_met=not mixed,
        ),
        Claim(
            gate="users",
            what=f"{what}: share of the candidate, in two epochs",
            bound=f"{share:g} ± {bound:.4f}",
            figure=", ".join(f"{each:.4f}" for each in shown),
            is_met=all(abs(each - share) <= bound for each in shown),
        ),
        Claim(
            gate="users",
            what=f"{what}: correlation with the next epoch",
            bound=f"0 ± {most:.3f}",
            figure=f"{correlation:.4f}",
            is_met=abs(correlation) <= most,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=100, help="rollouts of each kind (100)")
    parser.add_argument(
        "--epochs", type=int, default=0, help="epochs of each (60, of worse candidates 100)"
    )
    parser.add_argument("--seed", type=int, help="repeat the worlds of an earlier run")
    parser.add_argument(
        "--world", action="append", default=[], help="part of the names of the worlds to run (all)"
    )
    options = parser.parse_args()
    begin_run(options.seed)
    claims, rows = [], []
    for number, (name, world) in enumerate(WORLDS.items()):
        if not options.world or any(part in name for part in options.world):
            epochs = options.epochs or (100 if world.is_worse else 60)
            claim, row = prove_world(number, name, world, options.rollouts, epochs)
            claims.append(claim)
            rows.append(row)
    if not options.world or "users" in options.world:
        claims += [
            claim for percent in (10, 50) for claim in prove_users(derive_seed(percent), percent)
        ]
    head = (
        "",
        "rollouts x epochs",
        "rolled back",
        "median epoch",
        "epochs counted",
        "units, candidate",
        "stable",
    )
    table("10 % canary over replicas, a look every 200 requests", head, rows)
    summary(claims)
    return 0 if all(claim.is_met for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
