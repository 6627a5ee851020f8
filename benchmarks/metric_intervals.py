"""Measure how often the bounds of the intervals of metrics are wrong.

    python -m benchmarks.metric_intervals [--only METRIC …] [--worlds N] [--seed N] [--out FILE]

Each metric has a population of rows, in which the true values are known. For each number of rows,
samples are drawn from it, and the intervals of the product are compared with the true value of the
candidate and with the true change from the baseline. Each of the four bounds should be wrong in at
most 5 % of the samples. Prints the rows of a Markdown table after each metric.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.truth.draws import begin_run, derive_seed, make_generator
from benchmarks.truth.metric_worlds import BASELINE, Population, World
from benchmarks.truth.metric_worlds import WORLDS as ROW_WORLDS
from benchmarks.truth.vision_worlds import VISION_WORLDS
from onnx_ops.domain.evidence import Interval, ScoreComparison
from onnx_ops.statistics.scores import CANDIDATE, build_metric_statistic, score

WORLDS = {**ROW_WORLDS, **VISION_WORLDS}

ROWS = (50, 200, 500, 2000)
RESAMPLES = 400
"""Fewer resamples than the product's 2,000; rates change by at most half a point."""

BOUNDS = ("value low", "value high", "change low", "change high")


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The true value of the candidate, and its change from the baseline.

    `change` is a difference, or a ratio if lower values are better.
    """

    value: float
    change: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(WORLDS), help="some of the metrics")
    parser.add_argument("--worlds", type=int, default=400, help="samples of each cell")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of a sample")
    parser.add_argument("--seed", type=int, help="repeat the samples of an earlier run")
    parser.add_argument("--out", type=Path, help="append each cell to this file, as JSON")
    options = parser.parse_args()
    seed = begin_run(options.seed)
    for name in options.only or WORLDS:
        cells = []
        for cell in measure(name, options.rows, options.worlds):
            cells.append(cell)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"seed": seed, **cell}) + "\n")
        print(*map(format_cell, cells), sep="\n", flush=True)


def measure(name: str, rows: list[int], worlds: int) -> Iterator[Mapping[str, object]]:
    """Yield counts of wrong bounds for each number of rows, without and with groups."""
    world, number = WORLDS[name], list(WORLDS).index(name)
    for grouped in (False, True):
        population = world.make_population(make_generator(number, grouped), grouped=grouped)
        truth = find_truth(world, population)
        for count in rows:
            wrong: Counter[str] = Counter()
            random = make_generator(number, grouped, count)
            for trial in range(worlds):
                sample = population.draw(random, count)
                wrong.update(find_wrong(world, sample, truth, derive_seed(number, count, trial)))
            yield {
                "metric": name,
                "grouped": grouped,
                "rows": count,
                "worlds": worlds,
                "value": truth.value,
                "change": truth.change,
                **{key: wrong[key] for key in (*BOUNDS, "no value", "no change")},
            }


def find_truth(world: World, population: Population) -> Truth:
    """Return the truth, computed on all rows of the population."""
    values = {}
    for name, answers in population.answers.items():
        side = build_metric_statistic(world.definition, population.label, answers)
        values[name] = float(side.statistic(np.ones((1, len(population.label))))[0])
    mine, theirs = values[CANDIDATE], values[BASELINE]
    higher = world.definition.higher_is_better
    return Truth(value=mine, change=mine - theirs if higher else mine / theirs)


def find_wrong(world: World, sample: Population, truth: Truth, seed: int) -> list[str]:
    """Return the wrong bounds of one sample, and its missing intervals."""
    entries: dict[str, ScoreComparison] = {
        entry.against: entry
        for entry in score(
            world.definition,
            sample.label,
            sample.answers,
            seed=seed,
            resamples=RESAMPLES,
            group=sample.group,
        )
    }
    other = entries.get(BASELINE)
    change = None if other is None else other.difference or other.ratio
    return [
        *compare("value", entries[CANDIDATE].candidate, truth.value),
        *compare("change", change, truth.change),
    ]


def compare(kind: str, interval: Interval | None, true: float) -> list[str]:
    if interval is None:
        return [f"no {kind}"]
    wrong = {f"{kind} low": interval.low > true, f"{kind} high": interval.high < true}
    return [bound for bound, is_wrong in wrong.items() if is_wrong]


def format_cell(cell: Mapping[str, object]) -> str:
    worlds = int(str(cell["worlds"]))
    rates = (f"{100 * int(str(cell[key])) / worlds:.1f}" for key in (*BOUNDS, "no change"))
    unit = "groups" if cell["grouped"] else "rows"
    return f"| {cell['metric']} | {cell['rows']} | {unit} | {' | '.join(rates)} |"


if __name__ == "__main__":
    main()
