"""Latency: is one model slower or faster than another on a noisy machine, and does it keep an absolute limit?

Block medians of runs in turns, freed of what a probe tells about the machine's speed at each run."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.decision import Verdict
from onnx_ops.errors import MeasurementError
from onnx_ops.statistics import special

LOOKS = (5, 6, 8, 11, 15, 20, 28, 40)
"""Session pairs after which the samples may be looked at."""

ALPHA = 0.05
"""One-sided error rate of a whole comparison."""

_SHARE = 4
"""Part of the error rate that each look's interval may spend. Looks at the same samples err together, and all but the
last carry `DRIFT`: `benchmarks.truth.latency` counts how often all of them together err."""

DRIFT = 0.035
"""How far the log ratio of the pairs that are not yet measured may lie from that of the others."""

LARGEST_CORRELATION = 0.75
"""Of neighbouring pairs. Forty of them cannot tell more from a trend."""

_FEWEST_CORRELATED = 7
"""Pairs from which on their correlation is estimated."""

_ERRORS = 1.5
"""Standard errors by which a correlation is taken to be larger than measured, times the correlation: independent pairs
pay nothing for it. By too small a correlation one limit in fifteen was missed where pairs vary by as much as it."""

_USUAL_SD, _SPELLS_SD = 0.015, 0.028
"""Memory layout makes sessions vary by 1 to 1.5 %, each on its own. More is the work of spells of the machine, which
last: until pairs can show whether they are correlated, they count as if they were."""

_TREND_ALPHA = 0.01

_EXACT_UP_TO = 50

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

PARTS = 20
"""Points of the curve of run time over probe, of each model."""

FEWEST_PER_PART = 10

_TICK_NS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Latency of B over latency of A. `low` and `high` are one-sided bounds; 0 and infinity where there is none.

    `rest` is the factor by which what is not yet measured of a run may move them: 1 after the last look.
    """

    verdict: Verdict
    ratio: float
    low: float
    high: float
    pairs: int
    rest: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantileComparison:
    """A quantile against a limit, in its unit. `needed` runs let it pass if no further run exceeds the limit."""

    verdict: Verdict
    quantile: float
    low: float
    high: float
    runs: int
    exceeding: int
    needed: int


def hodges_lehmann(x: npt.ArrayLike, alpha_one_sided: float) -> tuple[float, float, float]:
    """Centre of a symmetric distribution with a distribution-free confidence bound on each side.

    Hodges and Lehmann 1963; Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, 3rd ed., §3.2-3.3: the
    median of the Walsh averages, and those of them that the signed-rank test does not reject. The test's
    distribution is exact up to 50 values and normal above.

    Args:
        x: shape (n,), n >= 1.
        alpha_one_sided: error rate of each bound.

    Returns:
        (estimate, low, high); the bounds are infinite where n is too small for that error rate.
    """
    values = np.asarray(x, dtype=np.float64)
    first, second = np.triu_indices(len(values))
    walsh = np.sort((values[first] + values[second]) / 2)
    rank = _signed_rank_quantile(len(values), alpha_one_sided)
    estimate = float(np.median(walsh))
    if rank == 0:
        return estimate, -math.inf, math.inf
    return estimate, float(walsh[rank - 1]), float(walsh[-rank])


@functools.cache
def _signed_rank_quantile(n: int, alpha: float) -> int:
    """Largest c with P(T < c) <= alpha, T being Wilcoxon's signed-rank statistic of n values."""
    if n > _EXACT_UP_TO:
        mean, variance = n * (n + 1) / 4, n * (n + 1) * (2 * n + 1) / 24
        return max(0, math.floor(mean + 0.5 + float(special.ndtri(alpha)) * math.sqrt(variance)))
    density = np.ones(1)
    for rank in range(1, n + 1):
        without, along = np.pad(density, (0, rank)), np.pad(density, (rank, 0))
        density = (without + along) / 2
    return int(np.searchsorted(np.cumsum(density), alpha, side="right"))


def session_interval(log_ratios: Sequence[Sequence[float]], alpha_one_sided: float) -> tuple[float, float, float]:
    """Estimate and bounds of the log ratio over session pairs.

    The blocks of one session pair share what its two sessions happened to get (memory layout, core), so a pair
    counts once, by its median. Treating blocks as independent makes one bound in five miss where one in twenty
    may. Below six pairs the signed-rank distribution has no point as rare as a look needs; Student's interval
    takes its place there.

    Returns:
        (estimate, low, high) of log(B / A); infinite bounds for a single pair.

    Raises:
        ValueError: there is no pair.
    """
    values = np.array([np.median(pair) for pair in log_ratios if len(pair)])
    if not len(values):
        raise ValueError("no session pair was measured")
    if len(values) < 2:
        return float(values[0]), -math.inf, math.inf
    if _signed_rank_quantile(len(values), alpha_one_sided):
        return hodges_lehmann(values, alpha_one_sided)
    centre = float(values.mean())
    quantile = -float(special.stdtrit(len(values) - 1, alpha_one_sided))
    half = quantile * float(values.std(ddof=1)) / math.sqrt(len(values))
    return centre, centre - half, centre + half


def run_interval(log_ratios: Sequence[Sequence[float]], alpha: float = ALPHA) -> tuple[float, float, float]:
    """`session_interval` of one look, for pairs that follow one another on a machine that has spells.

    With the correlation r of neighbours, n pairs tell as much as n (1 - r) / (1 + r) independent ones: the interval is
    wider by the root of that, and by what Student's distribution is wider for so few. r is estimated without the bias
    that small samples have (Marriott and Pope 1954, Biometrika 41:390).

    Args:
        log_ratios: of the blocks, one sequence for each session pair, in the order of measuring; at least one.
        alpha: one-sided error rate over all looks.

    Raises:
        ValueError: there is no pair.
    """
    estimate, low, high = session_interval(log_ratios, alpha / _SHARE)
    factor = _widening([float(np.median(pair)) for pair in log_ratios if len(pair)], alpha / _SHARE)
    return estimate, estimate - factor * (estimate - low), estimate + factor * (high - estimate)


def _widening(values: Sequence[float], alpha: float) -> float:
    """By how much an interval for independent values is too narrow for these, which follow one another."""
    n, centred = len(values), np.asarray(values) - np.mean(values)
    squares = float(centred @ centred)
    if n < 2 or not squares > 0:
        return 1.0
    spells = (math.sqrt(squares / (n - 1)) - _USUAL_SD) / (_SPELLS_SD - _USUAL_SD)
    assumed = LARGEST_CORRELATION * min(max(spells, 0.0), 1.0)
    if n < _FEWEST_CORRELATED:
        return math.sqrt((1 + assumed) / (1 - assumed))
    assumed *= max(0.0, 1 - n / LOOKS[-1])
    r = max((n * float(centred[1:] @ centred[:-1]) / squares + 1) / (n - 3), 0.0)
    r = min(r + _ERRORS * r * math.sqrt(max(0.0, 1 - r * r) / n), LARGEST_CORRELATION)
    few, all_of_them = special.stdtrit([max(n * (1 - r) / (1 + r) - 1, 1.0), n - 1], alpha)
    r = max(r, assumed)
    return math.sqrt((1 + r) / (1 - r)) * float(few / all_of_them)


def find_trend(log_ratios: Sequence[Sequence[float]]) -> float | None:
    """Change of the log ratio from the first pair to the last, where it is surely a trend of B beside A; else None.

    What slows A and B alike is in no pair. The slope is that of least squares, tested as if residuals were as many as
    their correlation leaves.
    """
    values = np.array([np.median(pair) for pair in log_ratios if len(pair)])
    n = len(values)
    if n < _FEWEST_CORRELATED or not np.isfinite(values).all():
        return None
    time = np.arange(n) - (n - 1) / 2
    slope = float(time @ values) / float(time @ time)
    rest = values - values.mean() - slope * time
    error = math.sqrt(float(rest @ rest) / (n - 2) / float(time @ time)) * _widening(
        [float(x) for x in rest], _TREND_ALPHA / 2
    )
    surely = abs(slope) > -float(special.stdtrit(n - 2, _TREND_ALPHA / 2)) * error
    return slope * (n - 1) if surely and slope else None


def compare(log_ratios: Sequence[Sequence[float]], *, tolerance: float, alpha: float = ALPHA) -> Comparison:
    """PASS if B is surely less than `1 + tolerance` times as slow as A, FAIL if it surely is more: by `run_interval`.

    What the rest of a run would bring, its first pairs do not tell. Before the last look a verdict must also hold if
    each bound lay further out by `DRIFT`, times the share of the run that is missing.

    Args:
        log_ratios: of the blocks, one sequence for each session pair, in the order of measuring; at least one.
        tolerance: allowed slow-down as a fraction; 0 asks whether B is faster.
        alpha: one-sided error rate over all looks.

    Raises:
        ValueError: there is no pair.
    """
    ratio, low, high = (_exp(v) for v in run_interval(log_ratios, alpha))
    pairs = sum(1 for p in log_ratios if len(p))
    rest, limit = _exp(DRIFT * max(0.0, 1 - pairs / LOOKS[-1])), 1 + tolerance
    verdict = Verdict.PASS if high * rest < limit else Verdict.FAIL if low / rest > limit else Verdict.INCONCLUSIVE
    return Comparison(verdict=verdict, ratio=ratio, low=low, high=high, pairs=pairs, rest=rest)


def estimate_pairs_needed(
    log_ratios: Sequence[Sequence[float]], tolerance: float, *, alpha: float = ALPHA
) -> int | None:
    """Pairs in one run after which the interval would lie on one side of the limit if the ratio stays what it is.

    None where the limit is so near that a hundred times the longest run would not do.
    """
    estimate, low, high = session_interval(log_ratios, alpha / _SHARE)
    distance = math.log1p(tolerance) - estimate
    pairs = [float(np.median(pair)) for pair in log_ratios if len(pair)]
    half = (high - estimate if distance > 0 else estimate - low) * _widening(pairs, alpha / _SHARE)
    if not abs(distance) * 100 > half:
        return None
    needed = len(pairs) * (half / distance) ** 2
    return max(LOOKS[-1], math.ceil(needed)) if needed <= 100 * LOOKS[-1] else None


def explain_withheld_verdict(
    log_ratios: Sequence[Sequence[float]],
    self_log_ratios: Sequence[Sequence[float]],
    tolerance: float,
    *,
    alpha: float = ALPHA,
) -> str | None:
    """Why no verdict may be given on this host, or None.

    A model against itself has the ratio 1. By as much as it was measured otherwise, the interval of B may be wrong as
    well: where it would reach the limit then, nothing is decided. How wide the self-test's own interval is does not
    matter: the noise of the host is in the interval of B too.
    """
    if sum(1 for pair in self_log_ratios if len(pair)) < LOOKS[0]:
        return "the noise of the host was not measured"
    found = compare(log_ratios, tolerance=tolerance, alpha=alpha)
    itself = session_interval(self_log_ratios, alpha)[0]
    off, limit = _exp(abs(itself)), 1 + tolerance
    off *= found.rest
    stands = {Verdict.PASS: found.high * off < limit, Verdict.FAIL: found.low / off > limit}
    if stands.get(found.verdict, True):
        return None
    return f"biased host: a model against itself has the ratio {_exp(itself):.4g}, which would move the interval as far"


def should_continue(
    log_ratios: Sequence[Sequence[float]],
    self_log_ratios: Sequence[Sequence[float]],
    tolerances: Sequence[float],
    *,
    alpha: float = ALPHA,
) -> bool:
    """Whether to measure on to the next look: a limit is undecided, or the host too biased for it, and looks remain.

    Args:
        log_ratios: all session pairs so far.
        self_log_ratios: those of the baseline against itself.
        tolerances: every limit to decide; 0 stands for "faster than".
        alpha: one-sided error rate over all looks.
    """
    pairs = len(log_ratios)
    if pairs >= LOOKS[-1]:
        return False
    if pairs not in LOOKS:
        return True
    undecided = any(
        compare(log_ratios, tolerance=tolerance, alpha=alpha).verdict is Verdict.INCONCLUSIVE
        for tolerance in tolerances
    )
    return undecided or any(
        explain_withheld_verdict(log_ratios, self_log_ratios, t, alpha=alpha) is not None for t in tolerances if t > 0
    )


def get_next_look(pairs: int) -> int:
    """Session pairs at the look that follows `pairs`; the last look if none does."""
    return LOOKS[min(bisect.bisect_right(LOOKS, pairs), len(LOOKS) - 1)]


def compare_latency_quantile(
    samples_ns: npt.ArrayLike, q: float, limit_s: float, *, confidence: float = 0.95
) -> QuantileComparison:
    """`compare_quantile` of single runs: samples in nanoseconds, limit and result in seconds."""
    return compare_quantile(np.asarray(samples_ns, dtype=np.float64) / 1e9, q, limit_s, confidence=confidence)


def compare_quantile(samples: npt.ArrayLike, q: float, limit: float, *, confidence: float = 0.95) -> QuantileComparison:
    """Quantile `q` of independent samples against an upper limit, by the binomial distribution of its exceedances.

    The bounds are order statistics (Conover, Practical Nonparametric Statistics, 3rd ed., §3.2), so nothing is
    assumed about the shape of the distribution. Fewer samples than could ever pass (299 for the 99th percentile at
    95 %, 5 for the median) are INCONCLUSIVE.

    Args:
        samples: shape (runs,), in any unit.
        q: between 0 and 1.
        limit: in the unit of the samples.
        confidence: of each one-sided bound.
    """
    values = np.sort(np.asarray(samples, dtype=np.float64))
    runs = len(values)
    exceeding = int((values > limit).sum())
    below = special.bdtr(np.arange(runs), runs, q) if runs else np.empty(0)
    upper = int(np.searchsorted(below, confidence))
    lower = int(np.searchsorted(below, 1 - confidence, side="right"))
    high = float(values[upper]) if upper < runs else math.inf
    low = float(values[lower - 1]) if 0 < lower <= runs else 0.0
    verdict = Verdict.INCONCLUSIVE
    if runs >= compute_samples_needed(q, confidence=confidence):
        verdict = Verdict.PASS if high <= limit else Verdict.FAIL if low > limit else verdict
    return QuantileComparison(
        verdict=verdict,
        quantile=float(np.quantile(values, q)) if runs else math.nan,
        low=low,
        high=high,
        runs=runs,
        exceeding=exceeding,
        needed=compute_samples_needed(q, exceeding=exceeding, confidence=confidence),
    )


def compute_samples_needed(q: float, *, exceeding: int = 0, confidence: float = 0.95) -> int:
    """Fewest runs at which `exceeding` of them above the limit still show that quantile `q` keeps it."""
    short, enough = exceeding, exceeding + 1
    while special.bdtr(exceeding, enough, 1 - q) > 1 - confidence:
        short, enough = enough, 2 * enough
    while enough - short > 1:
        middle = (short + enough) // 2
        if special.bdtr(exceeding, middle, 1 - q) > 1 - confidence:
            short = middle
        else:
            enough = middle
    return enough


def _exp(value: float) -> float:
    """Not numpy's, whose last digit is another one with AVX-512: evidence is judged alike on every machine."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def compute_block_logs(
    nanoseconds: npt.ArrayLike, preempted: npt.ArrayLike, probe: npt.ArrayLike | None = None
) -> Floats:
    """Log of the median run of each block, up to a constant that all models share.

    Medians are of the runs that were not preempted; of all runs in a block without one. A single run that kept its
    core tells more than ten that did not: with runs of 2 ms at a load of three a core, pairs varied by 6.7 %, and by
    9.4 % where three such runs were asked for. Where a probe was timed around each run, what it says about the run is
    taken off first: `_explained`.

    Args:
        nanoseconds: shape (heats, blocks, models, runs).
        preempted: the same shape, whether the run lost its core.
        probe: the same shape, in any unit; how long a piece of work that is always the same took around the run. None,
            or values that are not positive, not finite or all alike, tell nothing.

    Returns:
        Shape (heats, blocks, models). Only differences between models mean something.

    Raises:
        MeasurementError: a block has no positive duration, so that there is no ratio.
    """
    times = np.asarray(nanoseconds, dtype=np.float64)
    lost = np.asarray(preempted, dtype=bool)
    kept = ~lost | lost.all(axis=-1, keepdims=True)
    if not (np.nanmedian(np.where(kept, times, np.nan), axis=-1) > 0).all():
        raise MeasurementError(
            "a block of runs took no measurable time", remedy="Time more rows in one request: `benchmark.batch`."
        )
    logs = np.log(np.maximum(times, _TICK_NS))
    slowness = None if probe is None else _slowness(np.asarray(probe, dtype=np.float64))
    if slowness is not None:
        logs = logs - _explained(logs, kept, slowness)
    return np.asarray(np.nanmedian(np.where(kept, logs, np.nan), axis=-1), dtype=np.float64)


def _slowness(probe: Floats) -> Floats | None:
    """Log of each probe, less what is usual after that model beside the others; None if it tells nothing.

    A model that leaves cold caches or a lower clock behind slows the probes after it, always; that is its own doing,
    and must not excuse its runs. What is usual is read off runs of the same round, most of which meet the machine in
    the same state: over all runs, a slow spell that one model had a little more of would pass for it.
    """
    if not probe.size or not (np.isfinite(probe) & (probe > 0)).all():
        return None
    logs = np.log(probe)
    beside = np.median(logs[:, :, :, np.newaxis] - logs[:, :, np.newaxis], axis=(0, 1, 4))
    return logs - beside.mean(axis=1)[:, np.newaxis] if np.ptp(logs) > 0 else None


def _explained(logs: Floats, kept: Flags, slowness: Floats) -> Floats | float:
    """What a run takes on a machine that slow, as the mean over the models' own curves: the same for all of them.

    A curve is a model's median run over its median probe in parts of equally many runs, straight in between.
    """
    curves = []
    for model in range(logs.shape[2]):
        counts = kept[:, :, model]
        x, y = slowness[:, :, model][counts], logs[:, :, model][counts]
        parts = min(PARTS, len(x) // FEWEST_PER_PART)
        if parts < 2:
            return 0.0
        order = np.argsort(x, kind="stable")
        pieces = np.array_split(order, parts)
        nodes = [float(np.median(x[piece])) for piece in pieces]
        curves.append(np.interp(slowness, nodes, [float(np.median(y[piece])) for piece in pieces]))
    return np.asarray(np.mean(curves, axis=0), dtype=np.float64)
