"""How well an odds ratio explains which version the events of an interval fell to.

Of the n requests of an interval the candidate answered c, and x of all n were events (errors, slow requests). Given
these margins, the number k of events on the candidate has Fisher's noncentral hypergeometric law, whose one parameter
is the odds ratio (Fisher 1935, J. R. Stat. Soc. 98:39-82). Neither the rate of events nor its drift from interval to
interval enters. Where requests are assigned at random and the versions do not differ, it is the law of k whatever
made the events happen, in bursts or not: the assignment alone is the experiment.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

Array: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]

GRID = np.geomspace(1.25, 12.0, 24)
"""Odds ratios, as multiples of the tolerated one, that a guardrail looks for; equal weights. A wider grid would spend
weight on ratios above 12, which are found within a handful of events by the grid's end."""
FINE_GRID = np.geomspace(1.02, 5.0, 24)
"""The same for success metrics, where small differences matter."""

_CELLS = 1 << 20
"""Numbers held at once."""


def log_likelihood(table: npt.ArrayLike, odds_ratios: npt.ArrayLike) -> Array:
    """Log probability of the events' distribution under each odds ratio, up to a constant in the odds ratio.

    The log probabilities of independent intervals add.

    Args:
        table: (..., 4) whole numbers: the candidate's events and requests, the stable version's events and requests.
        odds_ratios: (m,) positive.

    Returns:
        (..., m): log P(k | odds ratio) - log P(k | 1) for each interval. Zero where only one outcome was possible,
        as without events or with requests on one side only.

    Raises:
        ValueError: events are negative or exceed requests.
    """
    counts = np.asarray(table, dtype=np.int64)
    logs = np.log(np.asarray(odds_ratios, dtype=np.float64))
    rows = counts.reshape(-1, 4)
    if (rows < 0).any() or (rows[:, 0] > rows[:, 1]).any() or (rows[:, 2] > rows[:, 3]).any():
        raise ValueError("events are negative or exceed requests")
    found = np.zeros((len(rows), len(logs)))
    events = rows[:, 0] + rows[:, 2]
    low = np.maximum(0, events - rows[:, 3])
    width = np.minimum(rows[:, 1], events) - low + 1
    open_ = np.flatnonzero(width > 1)
    order = open_[np.argsort(width[open_], kind="stable")]
    start = 0
    while start < len(order):
        # Widths ascend, so the last row of a part that fits is its widest.
        fits = (np.arange(1, len(order) - start + 1) * width[order[start:]] <= _CELLS).sum()
        part = order[start : start + max(1, int(fits))]
        found[part] = _likelihood(rows[part], low[part], width[part], logs)
        start += len(part)
    return found.reshape(*counts.shape[:-1], len(logs))


def _likelihood(rows: Counts, low: Counts, width: Counts, logs: Array) -> Array:
    k = low[:, None] + np.arange(int(width.max()))
    outside = k - low[:, None] >= width[:, None]
    k = np.where(outside, low[:, None], k)
    canary, stable = rows[:, 1:2], rows[:, 3:4]
    rest = (rows[:, 0] + rows[:, 2])[:, None] - k
    weight = -(gammaln(k + 1) + gammaln(canary - k + 1) + gammaln(rest + 1) + gammaln(stable - rest + 1))
    weight[outside] = -np.inf
    distance = (k - rows[:, :1]).astype(np.float64)
    none = _log_sum(weight)
    found = np.empty((len(rows), len(logs)))
    for column, log in enumerate(logs):
        found[:, column] = none - _log_sum(weight + distance * log)
    return found


def _log_sum(values: Array) -> Array:
    top = values.max(axis=-1)
    return np.asarray(top + np.log(np.exp(values - top[:, None]).sum(axis=-1)))
