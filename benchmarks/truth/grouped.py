"""Errors of the accuracy gate at its limit, on rows in groups.

Shown are the error rates with and without the key of the groups, and the rates of warnings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.truth.claims import Claim, at_least, at_most, table
from benchmarks.truth.draws import make_generator
from onnx_ops.domain.evidence import PairedCounts
from onnx_ops.statistics.grouping import compute_effect_of_sums, detect_grouping
from onnx_ops.statistics.intervals import change_p_value
from onnx_ops.statistics.variants.choice import ERROR_LEVEL

LIMIT = 0.01
BOUND = 0.055
FALSE_ALARMS = 0.02
"""Largest share of sets of independent rows with a warning."""
WARNED = 0.10
"""Error rate without the key above which there must be a warning."""

WORLDS = (
    (50, 1, 0.0), (2000, 1, 0.0), (50, 40, 0.0), (50, 5, 0.3), (50, 10, 0.1), (50, 40, 0.02),
    (100, 20, 0.05), (50, 10, 0.2), (50, 10, 0.5), (50, 40, 0.05), (50, 40, 0.1),
    (50, 40, 0.5), (100, 20, 0.1), (100, 20, 0.5), (200, 10, 0.1), (200, 10, 0.5), (400, 2, 0.5),
    (400, 5, 0.2), (400, 5, 0.3), (1000, 4, 0.3), (1000, 10, 0.5), (2000, 5, 0.5),
)  # fmt: skip
"""Groups, rows of each, and the correlation of two rows of a group.

Where sizes differ, the rows are the mean of the drawn sizes, of which those above 40 become 40.
"""
WON = (0.002, 0.01, 0.05)
"""Share of rows that only the candidate gets right.

The share of rows that only the baseline gets right is larger by the limit.
"""
WRONG = 0.1
"""Share of rows that both models get wrong."""


AGAIN = 0.05
"""Error rate above which a setting is tried once more.

The second trial has other draws, and `MORE` times as many. It alone counts.
"""
MORE = 10

INPUTS, ALIKE = 8, 0.3
"""Numbers of a row that a model reads, and their correlation in a group.

The rows of one group are alike, as those of one patient are.
"""

_WARNED_ROWS = 200_000
"""Number of rows of a world that are searched for signs."""

_AT_ONCE = 1_000_000
"""Approximate maximum number of rows in one draw."""


def prove(*, quick: bool, trials: int | None = None) -> list[Claim]:
    many = 60 if quick else trials or 2000
    rows, hidden = [], np.zeros(3, int)
    worst = dict.fromkeys(("PASS", "FAIL"), (0.0, 0, 1, ""))
    for groups, size, rho in WORLDS:
        rates = np.zeros((2, 2))
        for number, (won, equal) in enumerate(
            (won, equal) for won in WON for equal in (True, False)
        ):
            random = make_generator(groups, size, round(100 * rho), number)
            tried, found = many, _verdicts(random, groups, size, rho, won, equal, many)
            if found[1].max() > AGAIN * many and not quick:
                tried = MORE * many
                found = _verdicts(random, groups, size, rho, won, equal, tried)
            rates = np.maximum(rates, found / tried)
            name = (
                f"{groups} x {size}, rho {rho:g}, won {won:g}, {'equal' if equal else 'mixed'} "
                "sizes"
            )
            for side, verdict in enumerate(worst):
                worst[verdict] = max(
                    worst[verdict], (found[1, side] / tried, int(found[1, side]), tried, name)
                )
        alarms, warned = (0, 0), 0
        if rates[0].max() > WARNED:
            warned = 15 if quick else int(np.clip(_WARNED_ROWS // (groups * size), 20, 300))
            alarms = _alarms(groups, size, rho, warned)
            hidden += [*alarms, warned]
        rows.append(_describe_world(groups, size, rho, rates, alarms, warned))
    verdicts = ("wrong PASS", "wrong FAIL", "with the key: PASS", "FAIL")
    head = ("groups x rows", "rho", *verdicts, "no key: warned", "by errors alone")
    again = "" if quick else f" (above {100 * AGAIN:g} % with the key: {MORE * many} fresh ones)"
    table(
        f"metric, rows in groups, true drop equal to the limit of {100 * LIMIT:g} pp, "
        f"worst of 6 x {many}{again}",
        head,
        rows,
    )
    return [*_claim_rates(worst), *_claim_warnings(hidden, 200 if quick else 1000)]


def _describe_world(
    groups: int, size: int, rho: float, rates: Any, alarms: tuple[int, int], warned: int
) -> tuple[str, ...]:
    """Return the cells of a world.

    These are the rates of verdicts, and the rates of warnings where there were trials.
    """
    shares = (f"{100 * rate:.1f} %" for rate in (*rates[0], *rates[1]))
    warnings = (f"{100 * count / warned:.0f} %" if warned else "" for count in alarms)
    return f"{groups} x {size}", f"{rho:g}", *shares, *warnings


def _claim_rates(worst: Mapping[str, tuple[float, int, int, str]]) -> Iterator[Claim]:
    """Yield the claims on wrong verdicts with the key.

    `worst` holds the rate, events, trials and world of the worst rate, by verdict.
    """
    for verdict, (_, events, tried, name) in worst.items():
        what = f"wrong {verdict} with the key, worst of {6 * len(WORLDS)}: {name}"
        yield at_most("groups", what, events, tried, BOUND, worst_of=6 * len(WORLDS))


def _claim_warnings(hidden: Any, null: int) -> Iterator[Claim]:
    """Yield the claims on warnings.

    `hidden` counts the warnings of both kinds, and their trials. `null` is the number of trials
    with independent rows.
    """
    what = f"warned in worlds that err in more than {100 * WARNED:g} % without the key"
    for how, count in zip(("", ", by errors alone"), hidden, strict=False):
        yield at_least("groups", what + how, int(count), int(hidden[2]), 0.9)
    false, _ = _alarms(1000, 1, 0.0, null)
    yield at_most("groups", "warned although rows are independent", false, null, FALSE_ALARMS)


def _verdicts(
    random: np.random.Generator,
    groups: int,
    size: int,
    rho: float,
    won: float,
    equal: bool,
    trials: int,
) -> Any:
    """Return how often the gate passes and fails, without the key and with it."""
    found = np.zeros((2, 2), int)
    at_once = max(1, _AT_ONCE // (groups * size))
    for start in range(0, trials, at_once):
        sets = min(at_once, trials - start)
        sizes = np.full((sets, groups), size)
        if not equal:
            sizes = np.clip(random.geometric(1 / size, (sets, groups)), 1, 40)
        group = np.repeat(np.arange(sizes.size), sizes.ravel())
        change = shared(random, group, rho, [won + LIMIT, 1 - 2 * won - LIMIT, won]) - 1
        begins = np.cumsum(sizes.ravel()) - sizes.ravel()
        sums, changed = (
            np.add.reduceat(values, begins).reshape(sets, groups)
            for values in (change, np.abs(change))
        )
        effects = compute_effect_of_sums(sums, sizes, changed.sum(axis=1))
        for n, sum_, changes, effect in zip(
            sizes.sum(axis=1), sums.sum(axis=1), changed.sum(axis=1), effects, strict=True
        ):
            for key, divisor in enumerate((1.0, float(effect))):
                counts = _counts(
                    int(n), int(changes - sum_) // 2, int(changes + sum_) // 2, divisor
                )
                # The p-value agrees with the interval, and is quicker to compute.
                chance = change_p_value(counts, -LIMIT)
                found[key] += [chance < ERROR_LEVEL, chance > 1 - ERROR_LEVEL]
    return found


def shared(random: np.random.Generator, group: Any, rho: float, shares: list[float]) -> Any:
    """Draw the kind of each row, as a number.

    Two rows of one group are of one kind by more than chance, with correlation rho.
    """
    borders = np.cumsum(shares)[:-1]
    own, common = (_kinds(random, count, borders) for count in (len(group), int(group.max()) + 1))
    return np.where(random.random(len(group), dtype=np.float32) < rho**0.5, common[group], own)


def _kinds(random: np.random.Generator, count: int, borders: Any) -> Any:
    drawn = random.random(count, dtype=np.float32)
    return sum(((drawn > border).astype(np.int64) for border in borders), np.zeros(count, np.int64))


def _counts(n: int, lost: int, gained: int, effect: float) -> PairedCounts:
    return PairedCounts(
        metric="accuracy", against="fp32", n=n, both=n - lost - gained,
        only_baseline=lost, only_candidate=gained, change_effect=effect,
    )  # fmt: skip


def _alarms(groups: int, size: int, rho: float, trials: int) -> tuple[int, int]:
    """Count how often rows in the order of their groups look grouped.

    The second value counts how often they do by their errors alone. The errors of both models
    depend on the group, and so do the inputs.
    """
    group = np.repeat(np.arange(groups), size)
    found = np.zeros(2, int)
    for trial in range(trials):
        random = make_generator(groups, size, round(100 * rho), trial, 1)
        right = shared(random, group, rho, [WRONG, 1 - WRONG])
        change = shared(random, group, rho, [0.01 + LIMIT, 0.98 - LIMIT, 0.01]) - 1
        mine = np.where(change, change > 0, right).astype(float)
        own, common = (random.standard_normal((count, INPUTS)) for count in (len(group), groups))
        inputs = {"x": ALIKE**0.5 * common[group] + (1 - ALIKE) ** 0.5 * own}
        signs = detect_grouping(inputs, {}, [mine, change.astype(float)], None, trial)
        found += [bool(signs), any("rows err" in sign for sign in signs)]
    return int(found[0]), int(found[1])
