"""Rows in groups: how often the accuracy gate errs at its limit, with and without the key, and who is warned."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.truth.claims import Claim, at_least, at_most, table
from onnx_ops.analysis.agreement import change_p_value
from onnx_ops.analysis.choice import ERROR_LEVEL
from onnx_ops.analysis.grouping import design_effect, grouping_signs
from onnx_ops.domain.evidence import PairedCounts

LIMIT = 0.01
BOUND = 0.055
FALSE_ALARMS = 0.02
"""Share of sets of independent rows."""
WARNED = 0.10
"""Worlds whose error without the key exceeds it must be warned of."""

WORLDS = (
    (50, 1, 0.0), (2000, 1, 0.0), (50, 40, 0.0), (50, 5, 0.3), (50, 10, 0.1), (50, 40, 0.02),
    (100, 20, 0.05), (50, 10, 0.2), (50, 10, 0.5), (50, 40, 0.05), (50, 40, 0.1),
    (50, 40, 0.5), (100, 20, 0.1), (100, 20, 0.5), (200, 10, 0.1), (200, 10, 0.5), (400, 2, 0.5), (400, 5, 0.2),
    (400, 5, 0.3), (1000, 4, 0.3), (1000, 10, 0.5), (2000, 5, 0.5),
)  # fmt: skip
"""Groups, rows of each (a mean where sizes differ, at most 40), correlation of two rows of a group."""
WON = (0.002, 0.01, 0.05)
"""Share of rows that only the candidate gets right; the share that only the baseline does is larger by the limit."""
WRONG = 0.1
"""Share of rows that both models get wrong."""


def prove(*, quick: bool, trials: int | None = None) -> list[Claim]:
    many, warned = (60, 15) if quick else (trials or 1000, 60)
    rows, claims, hidden = [], [], [0, 0]
    worst = {"PASS": (0, ""), "FAIL": (0, "")}
    for groups, size, rho in WORLDS:
        rates = np.zeros((2, 2), int)
        for number, (won, equal) in enumerate((won, equal) for won in WON for equal in (True, False)):
            random = np.random.default_rng([groups, size, round(100 * rho), number])
            found = np.array([_verdicts(random, groups, size, rho, won, equal) for _ in range(many)]).sum(axis=0)
            rates = np.maximum(rates, found)
            name = f"{groups} x {size}, rho {rho:g}, won {won:g}, {'equal' if equal else 'mixed'} sizes"
            for side, verdict in enumerate(worst):
                worst[verdict] = max(worst[verdict], (int(found[1, side]), name))
        error = rates[0].max() / many
        alarms = _alarms(groups, size, rho, warned)
        if error > WARNED:
            hidden[0] += alarms
            hidden[1] += warned
        shares = (f"{100 * rate / many:.1f} %" for rate in (*rates[0], *rates[1]))
        rows.append((f"{groups} x {size}", f"{rho:g}", *shares, f"{100 * alarms / warned:.0f} %"))
    head = ("groups x rows", "rho", "wrong PASS", "wrong FAIL", "with the key: PASS", "FAIL", "warned without it")
    table(
        f"metric, rows in groups, true drop equal to the limit of {100 * LIMIT:g} pp, worst of 6 x {many}", head, rows
    )
    for verdict, (events, name) in worst.items():
        what = f"wrong {verdict} with the key, worst of {6 * len(WORLDS)}: {name}"
        claims.append(at_most("groups", what, events, many, BOUND + (0 if quick else _luck(many)), quick=quick))
    what = f"warned in worlds that err in more than {100 * WARNED:g} % without the key"
    claims.append(at_least("groups", what, hidden[0], hidden[1], 0.9, quick=quick))
    null = 200 if quick else 1000
    alarms = _alarms(1000, 1, 0.0, null)
    claims.append(at_most("groups", "warned although rows are independent", alarms, null, FALSE_ALARMS, quick=quick))
    return claims


def _luck(trials: int) -> float:
    """What the worst of a hundred settings may lie above the rate that all have: 2.3 standard errors."""
    return float(round(2.3 * (BOUND * (1 - BOUND) / trials) ** 0.5, 4))


def _verdicts(
    random: np.random.Generator, groups: int, size: int, rho: float, won: float, equal: bool
) -> list[list[bool]]:
    """Whether it passes and fails, without the key and with it."""
    sizes = np.full(groups, size) if equal else np.clip(random.geometric(1 / size, groups), 1, 40)
    group = np.repeat(np.arange(groups), sizes)
    change = shared(random, group, rho, [won + LIMIT, 1 - 2 * won - LIMIT, won]) - 1
    found = []
    for effect in (1.0, design_effect(change.astype(float), group)):
        chance = change_p_value(_counts(change, effect), -LIMIT)  # it agrees with the interval, and is quicker
        found.append([chance < ERROR_LEVEL, chance > 1 - ERROR_LEVEL])
    return found


def shared(random: np.random.Generator, group: Any, rho: float, shares: list[float]) -> Any:
    """Numbers of kinds of rows; two of one group are of one kind by more than chance, with correlation rho."""
    own = random.choice(len(shares), len(group), p=shares)
    common = random.choice(len(shares), int(group.max()) + 1, p=shares)[group]
    return np.where(random.random(len(group)) < rho**0.5, common, own)


def _counts(change: Any, effect: float) -> PairedCounts:
    lost, gained = int((change < 0).sum()), int((change > 0).sum())
    return PairedCounts(
        metric="accuracy", against="fp32", n=len(change), both=len(change) - lost - gained, only_baseline=lost,
        only_candidate=gained, change_effect=effect,
    )  # fmt: skip


def _alarms(groups: int, size: int, rho: float, trials: int) -> int:
    """How often rows in the order of their groups look grouped; errors of both models go by group too."""
    group = np.repeat(np.arange(groups), size)
    alarms = 0
    for trial in range(trials):
        random = np.random.default_rng([groups, size, round(100 * rho), trial])
        right = shared(random, group, rho, [WRONG, 1 - WRONG])
        change = shared(random, group, rho, [0.01 + LIMIT, 0.98 - LIMIT, 0.01]) - 1
        mine = np.where(change, change > 0, right).astype(float)
        alarms += bool(grouping_signs({}, {}, [mine, change.astype(float)], None, trial))
    return alarms
