"""Evidence from units whose version is drawn anew in each epoch.

It is valid at the end of every epoch. In a canary step, a coin decides which version serves a unit.
A unit is a cell of users in one epoch, or a request without a key. Only the coin is assumed to be
random; users, bursts, outages and drift may have any form. A unit has a badness y in [0, 1], the
share of its requests that were events. A unit has the badness y1 under the candidate, and y0 under
the stable version. Under the null hypothesis, y1 <= tau * y0 with tau >= 1. The candidate then
makes no unit more than tau times as bad.

With the candidate's share p, the coin Z (1: candidate), an increasing concave score h with h(0) =
0, and a fixed center m,

    1 + lambda * ((h(y1) / tau - m) * (1 - p) * Z - (h(y0) - m) * p * (1 - Z))

has a mean of at most 1, since each of the two cases has the weight p (1 - p). The product over
units is therefore an e-process at the ends of epochs. It reaches L with a chance of at most 1 / L
(Ville 1939). The product is the wealth of a gambler who bets on the coins (testing by betting:
Shafer 2021, J. R. Stat. Soc. A 184:407-431; bounded variables: Waudby-Smith and Ramdas 2024, J. R.
Stat. Soc. B 86:1-27; randomization as the only assumption: Fisher 1935, The Design of Experiments).
The evidence needs no estimate of a variance. Events of one user therefore cannot hide those of
others. One more failure under the candidate never lowers the evidence.

The evidence is the mean wealth of gamblers with different lambda, h and m, which is an e-process,
too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.rollout_observations import BADNESS_EDGES, GenerationUnits, UnitCounts
from onnx_ops.domain.rollout_policy import LATENCY_PLACES, LATENCY_QUANTILES
from onnx_ops.statistics.rollout.evidence import Array, Counts, log_mean_exp
from onnx_ops.statistics.rollout.guardrails import MISMATCH_LIMIT, compute_mismatch_evidence

RATIOS = (1.2, 1.5, 2.0, 3.0, 5.0, 8.0, 15.0, 40.0, 200.0)
"""Ratios of event rates that the gamblers expect, relative to the tolerated ratio."""
CLIPS = (1.0, 0.25, 0.0)
"""Scores h(y) = min(1, y / clip) of the gamblers.

They are the share of events, a score between both extremes, and whether there was any event.
"""
_BOLDEST = 0.97
"""Maximum share of the wealth that a gambler bets on one coin."""
_EDGES = np.array(BADNESS_EDGES)


def choose_centers(place: str) -> tuple[float, ...]:
    """Return the centers m for a place: one of `Guardrail.places`, or `refused`.

    They are 0 and, for latency, the stable version's share of slow requests. Units near the center
    hardly change the evidence, so that common events add little noise (half of all requests exceed
    the median). Evidence is valid for any fixed center.
    """
    quantile = {**LATENCY_QUANTILES, **LATENCY_PLACES}.get(place)
    return (0.0,) if quantile is None else (0.0, 1.0 - quantile)


@functools.cache
def make_log_factors(percent: int, tolerated: float, centers: tuple[float, ...]) -> Array:
    """Return the log of the factor that one unit multiplies each gambler's wealth by.

    Args:
        percent: the candidate's share of traffic, from 1 to 99.
        tolerated: tau.
        centers: values of m.

    Returns:
        (gamblers, 2, bins): for a unit of the candidate and a unit of the stable version, by bin of
        badness.
    """
    p, gamblers = percent / 100, []
    for clip in CLIPS:
        score = np.minimum(1.0, _EDGES / clip) if clip else (_EDGES > 0).astype(np.float64)
        for center in centers:
            # Below this limit, both factors of the bet stay positive: that of the stable version's
            # worst unit, and that of the candidate's best unit.
            limit = min(1 / (p * (1 - center)), 1 / ((1 - p) * center) if center else math.inf)
            for ratio in RATIOS:
                # For tau = 1 and m = 0, this is Kelly's bet for a candidate with `ratio` times as
                # many events as the stable version.
                bet = min((ratio - 1) / (p * ratio + 1 - p), _BOLDEST * limit)
                candidate = np.log1p(bet * (1 - p) * (score / tolerated - center))
                gamblers.append(np.stack([candidate, np.log1p(-bet * p * (score - center))]))
    return np.stack(gamblers)


def choose_percent(place: str, percents: Counts) -> Counts:
    """Return the candidate's shares of the units that a place compares.

    For latency, the version with less traffic is compared with as many cells of the other version,
    whose requests the control replica answers.
    """
    return percents if place in ("errors", "refused") else np.full_like(percents, 50)


def sum_log_factors(
    counts: npt.ArrayLike, place: str, percents: npt.ArrayLike, tolerated: float
) -> Array:
    """Return the log of the factor by which units multiply each gambler's wealth.

    If units show another split than the requested one, the observed share of the candidate
    replaces the requested share. The candidate does not cause a wrong split.

    Args:
        counts: (n, 2, bins) units of the candidate and the stable version by bin of badness.
        percents: (n,) the candidate's share of traffic, from 1 to 99.

    Returns:
        (n, gamblers)
    """
    units = np.asarray(counts, dtype=np.float64)
    shares = choose_percent(place, np.asarray(percents))
    (candidate, _), total = np.moveaxis(units.sum(axis=-1), -1, 0), units.sum(axis=(-2, -1))
    is_wrong = compute_mismatch_evidence(candidate, total, shares) >= MISMATCH_LIMIT
    shown = np.clip(np.rint(100 * candidate / np.maximum(total, 1)), 1, 99).astype(np.int64)
    shares = np.where(is_wrong, shown, shares)
    logs = np.empty((len(units), len(make_log_factors(50, tolerated, choose_centers(place)))))
    for share in np.unique(shares):
        factors = make_log_factors(int(share), tolerated, choose_centers(place))
        logs[shares == share] = np.tensordot(units[shares == share], factors, axes=([1, 2], [1, 2]))
    return logs


def measure_unit_evidence(splits: Sequence[GenerationUnits], place: str, tolerated: float) -> float:
    """Return log10 of the evidence that the candidate makes units too bad.

    The null hypothesis is that no unit is more than `tolerated` times as bad as under the stable
    version. Splits that give a version no traffic, or lack this place, are skipped. If no other
    split remains, the result is 0.
    """
    used = [split for split in splits if place in split.units and 0 < split.percent < 100]
    if not used:
        return 0.0
    counts = [to_array(split.units[place]) for split in used]
    logs = sum_log_factors(counts, place, [split.percent for split in used], tolerated)
    return float(log_mean_exp(logs.sum(axis=0))) / math.log(10)


def to_array(units: UnitCounts) -> Array:
    """Return the counts as (2, bins): candidate and stable version, by bin of badness."""
    counts = np.zeros((2, len(_EDGES)))
    for row, numbers in zip(counts, (units.candidate, units.stable), strict=True):
        row[: len(numbers)] = numbers
    return counts
