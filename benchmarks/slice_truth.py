"""Error rates of the gate on slices, in simulated releases whose truth is known.

Each release has 20 slices of rows with a true loss in each, and is judged by the rule of the gate.
Three rates are reported. How often is any slice accused although no slice loses more than the
limit? How often does the gate fail if one slice of 200 rows loses ten points? How often does the
gate pass although one slice loses twice the limit?

Run `python -m benchmarks.slice_truth [--quick] [--page docs/slice-error-rates.md]`; it takes some
minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
"""Releases of a world that is judged by rmse: intervals take 100 times as long."""
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
    def gate(self) -> SlicesGate:
        """Return the gate, whose minimum number of rows excludes no slice."""
        rows = min(self.rows, 50)
        if self.metric == "accuracy":
            return SlicesGate(name="accuracy", max_drop=self.limit, min_rows=rows)
        return SlicesGate(name=self.metric, max_increase=self.limit, min_rows=rows)

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the properties of the world as table cells."""
        groups = f"{self.rows // self.group} x {self.group}, rho {self.rho:g}"
        errors = "normal errors" if np.isinf(self.tail) else f"errors t({self.tail:g})"
        spread = f"{100 * self.won:g} %" if self.metric == "accuracy" else errors
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


POWER = (
    *(
        World(rows=200, limit=limit, won=won, losses=(0.1 / limit,))
        for limit in (0.01, 0.02, 0.03, 0.05)
        for won in (0.0, 0.005)
    ),
    World(rows=500, limit=0.01, won=0.005, losses=(10.0,), group=5, rho=0.1),
)
"""Worlds in which one slice loses ten points: of 200 rows, or of 100 groups."""

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
    verdicts: Counter[Verdict] = Counter()
    losses = (*world.losses, *([0.0] * (SLICES - len(world.losses))))
    random = make_generator(number)
    for _ in range(trials):
        slices = [
            _measure(f"s={index}", draw_slice(world, loss * world.limit, random))
            for index, loss in enumerate(losses)
        ]
        (result,) = judge_gate(world.gate, evidence(slices=tuple(slices)))
        verdicts[result.verdict] += 1
    return verdicts


def _prove(
    title: str, worlds: Sequence[World], trials: int, start: int
) -> tuple[list[list[str]], list[Counter[Verdict]]]:
    """Judge the worlds, print their rates, and return the table rows and the verdicts."""
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


PARTS: Mapping[str, tuple[Sequence[World], str]] = {
    "family": (list_family_worlds(), "no slice beyond the limit"),
    "power": (POWER, "one slice loses ten points"),
    "double": (DOUBLE, "one slice loses twice the limit"),
}
"""The worlds and the title of each table of the page."""


def _claim(
    part: str, worlds: Sequence[World], counts: Sequence[Counter[Verdict]]
) -> Iterator[Claim]:
    """Yield the promises on the verdicts of a part."""
    for world, verdicts in zip(worlds, counts, strict=True):
        what, tried = ", ".join(world.cells), verdicts.total()
        failed, passed = verdicts[Verdict.FAIL], verdicts[Verdict.PASS]
        if part == "family":
            accused = f"any slice accused: {what}"
            yield at_most("slices", accused, failed, tried, FAMILY, worst_of=len(worlds))
        elif part == "double":
            yield at_most("slices", f"passed: {what}", passed, tried, FAMILY)
        elif world.limit == 0.01 or (world.limit, world.won) == (0.02, 0.0):
            yield at_least("slices", f"found: {what}", failed, tried, 0.9)


HEAD = ("metric", "rows of a slice", "limit", "won", "FAIL", "PASS", "INCONCLUSIVE")


def main() -> int:
    """Run all worlds, and write the tables into the page if one is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="60 releases of each kind")
    parser.add_argument("--only", choices=PARTS, help="part to run; default: all")
    parser.add_argument("--seed", type=int, help="seed of the worlds; default: a new one")
    parser.add_argument("--page", type=Path, help="page to write the tables into")
    options = parser.parse_args()
    begin_run(options.seed)
    claims: list[Claim] = []
    for start, (name, (worlds, title)) in enumerate(PARTS.items()):
        if options.only in (None, name):
            rows, counts = _prove(title, worlds, 60 if options.quick else TRIALS, 100 * start)
            claims += _claim(name, worlds, counts)
            if options.page:
                page.fill(options.page, name, page.markdown(HEAD, rows))
    summary(claims)
    return 0 if all(claim.is_met for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
