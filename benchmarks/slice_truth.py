"""Error rates of the gate on slices, in simulated releases whose truth is known.

Each release has 20 slices of rows with a true loss in each, and is judged by the rule of the gate.
Three rates are reported. How often is any slice accused although no slice loses more than the
limit? How often does the gate fail if one slice of 200 rows loses ten points? How often does the
gate pass although one slice loses twice the limit?

Run `python -m benchmarks.slice_truth [--quick] [--page docs/slices.md]`; it takes some minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.truth import page
from benchmarks.truth.claims import Claim, at_least, at_most, summary, table
from benchmarks.truth.draws import begin_run, make_generator
from benchmarks.truth.evidence import evidence
from benchmarks.truth.grouped import shared
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.evidence import Interval, PairedCounts, ScoreComparison, SliceMeasurement
from onnx_ops.domain.gate import SlicesGate
from onnx_ops.measure.paired_rows import count_pairs
from onnx_ops.statistics.intervals import UNSEEN_CHANGES, find_heavy_rows, ratio_interval
from onnx_ops.statistics.rules.common import judge_gate

SLICES = 20
TRIALS = 2000
RMSE_TRIALS = 150
"""Releases of a kind that is judged by rmse, whose intervals take a hundred times as long."""
FAMILY = 0.05
WRONG = 0.1
"""Share of rows that both models get wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Releases of one kind.

    `rows` are the rows of a slice. `won` is the share of rows that only the candidate gets right.
    `losses` are the true losses of the first slices in multiples of the limit; the other slices
    lose nothing. `group` is the number of rows of a group, and `rho` the correlation of the changes
    of two of its rows. `metric` is accuracy, or rmse with errors of the tail `tail` (Student's t).
    """

    rows: int
    limit: float
    won: float = 0.0
    losses: tuple[float, ...] = ()
    group: int = 1
    rho: float = 0.0
    metric: str = "accuracy"
    tail: float = np.inf

    @property
    def cells(self) -> tuple[str, ...]:
        """The properties of the world in a table."""
        groups = f"{self.rows // self.group} x {self.group}, rho {self.rho:g}"
        spread = f"{100 * self.won:g} %" if self.metric == "accuracy" else f"tail t({self.tail:g})"
        some = f", {len(self.losses)} at the limit" if 1 < len(self.losses) < SLICES else ""
        return (
            self.metric + some,
            groups if self.group > 1 else str(self.rows),
            f"{100 * self.limit:g} %",
            spread,
        )


def list_family_worlds() -> list[World]:
    """Return worlds in which no slice loses more than the limit, and some are at it."""
    sizes = (
        (60, 0.05),
        (100, 0.05),
        (100, 0.10),
        (200, 0.02),
        (200, 0.05),
        (500, 0.01),
        (1000, 0.02),
    )
    at_limit = (1.0,) * SLICES
    worlds = [
        World(rows=rows, limit=limit, won=won, losses=at_limit)
        for rows, limit in sizes
        for won in (0.0, 0.05)
    ]
    worlds += [
        World(rows=rows, limit=0.05, won=0.02, losses=at_limit, group=group, rho=rho)
        for rows, group, rho in (
            (100, 2, 0.5), (200, 5, 0.0), (200, 5, 0.3), (500, 10, 0.2), (500, 20, 0.5),
            (1000, 20, 0.1),
        )
    ]  # fmt: skip
    half = (1.0,) * (SLICES // 2)
    worlds.append(World(rows=200, limit=0.02, won=0.01, losses=half))
    return worlds + [
        World(rows=rows, limit=0.1, losses=at_limit, metric="rmse", tail=tail)
        for rows in (60, 200)
        for tail in (np.inf, 5.0)
    ]


POWER = tuple(
    World(rows=200, limit=limit, won=won, losses=(0.1 / limit,))
    for limit in (0.01, 0.02, 0.03, 0.05)
    for won in (0.0, 0.005)
)
"""Worlds in which one slice of 200 rows loses ten points."""

DOUBLE = (
    World(rows=400, limit=0.05, won=0.0, losses=(2.0,)),
    World(rows=400, limit=0.05, won=0.02, losses=(2.0,)),
    World(rows=1000, limit=0.02, won=0.005, losses=(2.0,)),
    World(rows=1000, limit=0.05, won=0.01, losses=(2.0,), group=10, rho=0.1),
    World(rows=1000, limit=0.2, losses=(2.0,), metric="rmse"),
)
"""Worlds in which one slice loses twice the limit."""


def draw_slice(
    world: World, loss: float, random: np.random.Generator
) -> PairedCounts | ScoreComparison:
    """Return the comparison of the models in a slice whose true loss is this share."""
    if world.metric == "rmse":
        return _draw_losses(world, loss, random)
    lost = world.won + loss
    if world.group == 1:
        counts = random.multinomial(
            world.rows, [lost, world.won, WRONG, 1 - lost - world.won - WRONG]
        )
        return PairedCounts(
            metric="accuracy",
            against="fp32",
            n=world.rows,
            both=int(counts[3]),
            only_baseline=int(counts[0]),
            only_candidate=int(counts[1]),
        )
    group = np.arange(world.rows) // world.group
    kinds = shared(random, group, world.rho, [lost, 1 - lost - world.won, world.won]) - 1
    wrong = (kinds == 0) & (random.random(world.rows) < WRONG)
    baseline, candidate = (kinds <= 0) & ~wrong, (kinds >= 0) & ~wrong
    return count_pairs("accuracy", "fp32", baseline, candidate, group)


def _draw_losses(world: World, loss: float, random: np.random.Generator) -> ScoreComparison:
    """Return the comparison of two models by rmse; their errors are correlated.

    It is that of `statistics.scores`, without the intervals of single models, which take longer.
    """

    def draw() -> Any:
        drawn = random.standard_normal(world.rows)
        if np.isinf(world.tail):
            return drawn
        return drawn / np.sqrt(random.chisquare(world.tail, world.rows) / world.tail)

    own, other = draw(), draw()
    mine = ((1 + loss) * (0.9 * own + (1 - 0.81) ** 0.5 * other)) ** 2
    ratio = ratio_interval(mine, own**2, UNSEEN_CHANGES)
    return ScoreComparison(
        metric="rmse",
        against="fp32",
        n=world.rows,
        ratio=Interval(
            estimate=ratio.estimate**0.5, low=max(ratio.low, 0.0) ** 0.5, high=ratio.high**0.5
        ),
        effective=find_heavy_rows(mine)[0],
    )


def _measure(name: str, entry: PairedCounts | ScoreComparison) -> SliceMeasurement:
    if isinstance(entry, PairedCounts):
        return SliceMeasurement(slice=name, rows=entry.n, metrics=(entry,))
    return SliceMeasurement(slice=name, rows=entry.n, scores=(entry,))


def judge_world(world: World, number: int, trials: int) -> Counter[Verdict]:
    """Return the verdicts of the gate on simulated releases."""
    gate = (
        SlicesGate(name=world.metric, max_drop=world.limit)
        if world.metric == "accuracy"
        else SlicesGate(name=world.metric, max_increase=world.limit)
    )
    verdicts: Counter[Verdict] = Counter()
    losses = (*world.losses, *([0.0] * (SLICES - len(world.losses))))
    random = make_generator(number)
    for _ in range(trials):
        slices = [
            _measure(f"s={index}", draw_slice(world, loss * world.limit, random))
            for index, loss in enumerate(losses)
        ]
        (result,) = judge_gate(gate, evidence(slices=tuple(slices)))
        verdicts[result.verdict] += 1
    return verdicts


def _prove(
    title: str, worlds: Sequence[World], trials: int, start: int
) -> tuple[list[list[str]], list[Counter[Verdict]]]:
    """Judge the worlds, print their rates, and return the rows of the table."""
    rows, counts = [], []
    for number, world in enumerate(worlds, start):
        begun = time.perf_counter()
        tried = trials if world.metric == "accuracy" else min(trials, RMSE_TRIALS)
        verdicts = judge_world(world, number, tried)
        shares = (
            f"{100 * verdicts[v] / tried:.1f} %"
            for v in (Verdict.FAIL, Verdict.PASS, Verdict.INCONCLUSIVE)
        )
        rows.append([*world.cells, *shares])
        counts.append(verdicts)
        print(*rows[-1], f"({time.perf_counter() - begun:.0f} s)", sep="  ", flush=True)
    table(title, HEAD, rows)
    return rows, counts


HEAD = ("metric", "rows of a slice", "limit", "won", "FAIL", "PASS", "INCONCLUSIVE")


def main() -> int:
    """Run all worlds, and write the tables into the page if one is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="60 releases of each kind")
    parser.add_argument("--seed", type=int, help="seed of the worlds; default: a new one")
    parser.add_argument("--page", type=Path, help="page to write the tables into")
    options = parser.parse_args()
    begin_run(options.seed)
    trials = 60 if options.quick else TRIALS
    family = list_family_worlds()
    family_rows, family_counts = _prove("no slice beyond the limit", family, trials, 0)
    power_rows, power_counts = _prove("one slice loses ten points", POWER, trials, 100)
    double_rows, double_counts = _prove("one slice loses twice the limit", DOUBLE, trials, 200)
    claims: list[Claim] = [
        at_most(
            "slices",
            f"any slice accused: {', '.join(world.cells)}",
            counts[Verdict.FAIL],
            counts.total(),
            FAMILY,
            worst_of=len(family),
        )
        for world, counts in zip(family, family_counts, strict=True)
    ]
    claims += [
        at_least(
            "slices", f"found: {', '.join(w.cells)}", counts[Verdict.FAIL], counts.total(), 0.9
        )
        for w, counts in zip(POWER, power_counts, strict=True)
        if (w.limit, w.won) in ((0.01, 0.0), (0.01, 0.005), (0.02, 0.0), (0.03, 0.0))
    ]
    claims += [
        at_most(
            "slices", f"passed: {', '.join(w.cells)}", counts[Verdict.PASS], counts.total(), FAMILY
        )
        for w, counts in zip(DOUBLE, double_counts, strict=True)
    ]
    summary(claims)
    if options.page:
        for name, rows in (("family", family_rows), ("power", power_rows), ("double", double_rows)):
            page.fill(options.page, name, page.markdown(HEAD, rows))
    return 0 if all(claim.is_met for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
