"""Comparisons of latency on a noisy machine, and tests of absolute latency limits."""

from __future__ import annotations

import bisect
import functools
import importlib.util
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import numpy.typing as npt
import scipy

from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.evidence import Interval
from onnx_ops.errors import MeasurementError
from onnx_ops.statistics.intervals import find_least

FULL_RUN = 40
"""Number of session pairs of a full run.

A comparison that is undecided after a full run continues only if pairs up to the last look may
decide it.
"""

LOOKS = (5, 6, 8, 11, 15, 20, 28, FULL_RUN, 56, 80, 113, 160, 226, 320)
"""Numbers of session pairs after which the samples are evaluated."""

ALPHA = 0.05
"""One-sided error rate of a comparison over all looks."""

_SHARE, _LATE_SHARE = 5, 8
"""Divisors of `ALPHA` for the error rate of a look before and after a full run.

The rate of a look is `ALPHA` / `_SHARE`, and `ALPHA` / `_LATE_SHARE` from a full run on. The errors
of different looks are correlated, since they share samples. Looks before a full run also allow for
`DRIFT`. `benchmarks.truth.latency` measures the total error rate.
"""

DRIFT = 0.035
"""Allowed difference of the log ratio between the measured and the later pairs."""

LARGEST_CORRELATION = 0.75
"""Maximum assumed correlation of neighbouring pairs.

Forty pairs cannot distinguish a larger correlation from a trend.
"""

_FEWEST_CORRELATED = 7
"""Minimum number of pairs for an estimate of the correlation."""

_ERRORS = 1.5
"""Number of standard errors that are added to an estimated correlation.

They are multiplied by the correlation, so that nothing is added for independent pairs. Without this
addition, one limit in fifteen was missed where pairs vary by as much as the limit.
"""

_USUAL_SD, _SPELLS_SD = 0.015, 0.028
"""Standard deviations of sessions without and with slow phases of the machine.

Memory layout makes sessions vary independently by 1 to 1.5 %. A larger variation comes from slow
phases of the machine, which last for several sessions. Pairs are treated as correlated until enough
pairs allow an estimate of the correlation.
"""

_TREND_ALPHA = 0.01
"""Two-sided error rate of the test of a trend."""

_EXACT_UP_TO = 50
"""Number of values up to which the signed-rank distribution is exact."""

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

PARTS = 20
"""Maximum number of points of each model's curve of run time over probe time."""

FEWEST_PER_PART = 10
"""Minimum number of runs for one of these points."""

_TICK_NS = 1.0
"""Minimum run time before its logarithm is taken, in nanoseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Interval):
    """Ratio of the latencies of B and A in `n` session pairs, with one-sided bounds.

    The bounds are 0 and infinity if a single pair was measured. `rest` is the factor by which the
    missing pairs of a full run may move the bounds; it is 1 after a full run.
    """

    verdict: Verdict
    n: int
    rest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantileComparison(Interval):
    """A quantile of `n` runs, compared with a limit.

    `exceeding` runs are above the limit. `needed` is the smallest number of runs that can lead to a
    PASS with this number of runs above the limit.
    """

    verdict: Verdict
    n: int
    exceeding: int
    needed: int


def load_functions() -> None:
    """Import SciPy's special functions before the first measurement needs them.

    SciPy then reads every name of NumPy, which would import NumPy's compiler of Fortran and its
    test tools. They are half of the import's 0.15 s, so their import waits until they are used.
    """
    for name in ("f2py", "testing"):
        _postpone_import(np, name)
    scipy.special.ndtri(0.5)


def _postpone_import(package: ModuleType, name: str) -> None:
    """Set a submodule that is imported when one of its attributes is used."""
    path = f"{package.__name__}.{name}"
    spec = None if path in sys.modules else importlib.util.find_spec(path)
    if spec is None or spec.loader is None:
        return
    spec.loader = importlib.util.LazyLoader(spec.loader)
    sys.modules[path] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    setattr(package, name, module)


def hodges_lehmann(x: npt.ArrayLike, alpha_one_sided: float) -> tuple[float, float, float]:
    """Return the Hodges-Lehmann centre with a bound on each side.

    The centre is the median of the Walsh averages. The bounds are the outermost averages that the
    signed-rank test does not reject. Sources: Hodges and Lehmann 1963; Hollander, Wolfe and
    Chicken, Nonparametric Statistical Methods, 3rd ed., §3.2-3.3. The test's distribution is exact
    up to 50 values and normal above.

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
    """Return the lower quantile of Wilcoxon's signed-rank statistic T.

    It is the largest c with P(T < c) <= alpha.
    """
    if n > _EXACT_UP_TO:
        mean, variance = n * (n + 1) / 4, n * (n + 1) * (2 * n + 1) / 24
        return max(
            0, math.floor(mean + 0.5 + float(scipy.special.ndtri(alpha)) * math.sqrt(variance))
        )
    density = np.ones(1)
    for rank in range(1, n + 1):
        without, along = np.pad(density, (0, rank)), np.pad(density, (rank, 0))
        density = (without + along) / 2
    return int(np.searchsorted(np.cumsum(density), alpha, side="right"))


def session_interval(
    log_ratios: Sequence[Sequence[float]], alpha_one_sided: float
) -> tuple[float, float, float]:
    """Return the log ratio over session pairs with its bounds.

    The blocks of a session pair share the memory layout and core of its sessions. A pair therefore
    contributes one value, the median of its blocks. In simulations with blocks as independent
    samples, up to 24 % of the verdicts at the limit were wrong
    (docs/adr/0006-statistics-first-version.md). With few pairs, the signed-rank distribution cannot
    reach the error rate (below seven pairs that of a look). Student's interval is used instead.

    Returns:
        (estimate, low, high) of log(B / A); the bounds of a single pair are infinite.

    Raises:
        ValueError: there is no session pair.
    """
    values = _take_medians(log_ratios)
    if not len(values):
        raise ValueError("no session pair was measured")
    if len(values) < 2:
        return float(values[0]), -math.inf, math.inf
    if _signed_rank_quantile(len(values), alpha_one_sided):
        return hodges_lehmann(values, alpha_one_sided)
    centre = float(values.mean())
    quantile = -float(scipy.special.stdtrit(len(values) - 1, alpha_one_sided))
    half = quantile * float(values.std(ddof=1)) / math.sqrt(len(values))
    return centre, centre - half, centre + half


def run_interval(log_ratios: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return the `session_interval` of one look, widened for correlated pairs.

    With a correlation r of neighbours, n pairs are equivalent to n (1 - r) / (1 + r) independent
    pairs. The interval is therefore wider by the square root of (1 + r) / (1 - r), and by the wider
    Student distribution of fewer pairs. The estimate of r is corrected for its small-sample bias
    (Marriott and Pope 1954, Biometrika 41:390).
    """
    values = _take_medians(log_ratios)
    alpha = ALPHA / (_SHARE if len(values) < FULL_RUN else _LATE_SHARE)
    estimate, low, high = session_interval(log_ratios, alpha)
    factor = _compute_widening(values, alpha)
    return estimate, estimate - factor * (estimate - low), estimate + factor * (high - estimate)


def _take_medians(log_ratios: Sequence[Sequence[float]]) -> Floats:
    return np.array([np.median(pair) for pair in log_ratios if len(pair)], dtype=np.float64)


def _compute_widening(values: Floats, alpha: float) -> float:
    """Return the factor by which the interval of consecutive values must be widened.

    The factor is relative to the interval of independent values.
    """
    n, centred = len(values), values - np.mean(values)
    squares = float(centred @ centred)
    if n < 2 or not squares > 0:
        return 1.0
    spells = (math.sqrt(squares / (n - 1)) - _USUAL_SD) / (_SPELLS_SD - _USUAL_SD)
    assumed = LARGEST_CORRELATION * min(max(spells, 0.0), 1.0)
    if n < _FEWEST_CORRELATED:
        return math.sqrt((1 + assumed) / (1 - assumed))
    assumed *= max(0.0, 1 - n / FULL_RUN)
    r = max((n * float(centred[1:] @ centred[:-1]) / squares + 1) / (n - 3), 0.0)
    r = min(r + _ERRORS * r * math.sqrt(max(0.0, 1 - r * r) / n), LARGEST_CORRELATION)
    few, all_of_them = scipy.special.stdtrit([max(n * (1 - r) / (1 + r) - 1, 1.0), n - 1], alpha)
    r = max(r, assumed)
    return math.sqrt((1 + r) / (1 - r)) * float(few / all_of_them)


def find_trend(log_ratios: Sequence[Sequence[float]]) -> float | None:
    """Return the significant change of the log ratio over the run, or None.

    A slow-down of both A and B cancels out in each pair. The slope comes from least squares. Its
    test uses the effective number of residuals, given their correlation.
    """
    values = _take_medians(log_ratios)
    n = len(values)
    if n < _FEWEST_CORRELATED or not np.isfinite(values).all():
        return None
    time = np.arange(n) - (n - 1) / 2
    slope = float(time @ values) / float(time @ time)
    residuals = values - values.mean() - slope * time
    widening = _compute_widening(residuals, _TREND_ALPHA / 2)
    error = math.sqrt(float(residuals @ residuals) / (n - 2) / float(time @ time)) * widening
    is_significant = abs(slope) > -float(scipy.special.stdtrit(n - 2, _TREND_ALPHA / 2)) * error
    return slope * (n - 1) if is_significant and slope else None


def compare(log_ratios: Sequence[Sequence[float]], *, tolerance: float) -> Comparison:
    """Compare B with A by the log ratios of their latencies.

    The verdict is PASS if the ratio is below `1 + tolerance` with confidence, and FAIL if it is
    above with confidence. The bounds are those of `run_interval`. The first pairs of a run do not
    predict the rest. Before `FULL_RUN`, each bound is therefore moved outwards by `DRIFT` times the
    missing share of the run. The bound must still support the verdict.

    Args:
        log_ratios: log ratios of the blocks, one sequence for each session pair, in the order of
            measurement; at least one.
        tolerance: allowed slow-down as a fraction; 0 tests whether B is faster.
    """
    ratio, low, high = (_exp(v) for v in run_interval(log_ratios))
    pairs = sum(1 for p in log_ratios if len(p))
    rest, limit = _exp(DRIFT * max(0.0, 1 - pairs / FULL_RUN)), 1 + tolerance
    verdict = (
        Verdict.PASS
        if high * rest < limit
        else Verdict.FAIL
        if low / rest > limit
        else Verdict.INCONCLUSIVE
    )
    return Comparison(estimate=ratio, low=low, high=high, verdict=verdict, n=pairs, rest=rest)


def estimate_pairs_needed(log_ratios: Sequence[Sequence[float]], tolerance: float) -> int | None:
    """Return the number of pairs at which a run with the same ratio would decide.

    Return None if a hundred full runs would not be enough.
    """
    distance, half = _measure_distance(log_ratios, tolerance)
    if not distance * 100 > half:
        return None
    needed = sum(1 for pair in log_ratios if len(pair)) * (half / distance) ** 2
    return max(FULL_RUN, math.ceil(needed)) if needed <= 100 * FULL_RUN else None


def explain_withheld_verdict(
    log_ratios: Sequence[Sequence[float]],
    self_log_ratios: Sequence[Sequence[float]],
    tolerance: float,
) -> str | None:
    """Return why no verdict is possible on this host, or None.

    The true ratio of a model to itself is 1. The interval of B may be shifted by as much as the
    measured ratio of the baseline to itself. The verdict is withheld if this shift would make the
    interval reach the limit. The width of the baseline's interval does not matter, since the
    interval of B already contains the noise of the host.
    """
    if sum(1 for pair in self_log_ratios if len(pair)) < LOOKS[0]:
        return f"the noise of the host was measured with fewer than {LOOKS[0]} pairs"
    comparison = compare(log_ratios, tolerance=tolerance)
    self_estimate = session_interval(self_log_ratios, ALPHA)[0]
    bias, limit = _exp(abs(self_estimate)), 1 + tolerance
    bias *= comparison.rest
    stands = {
        Verdict.PASS: comparison.high * bias < limit,
        Verdict.FAIL: comparison.low / bias > limit,
    }
    if stands.get(comparison.verdict, True):
        return None
    ratio = _exp(self_estimate)
    return (
        f"biased host: a model against itself has the ratio {ratio:.4g}, "
        "and an interval moved by this ratio reaches the limit"
    )


def should_continue(
    log_ratios: Sequence[Sequence[float]],
    self_log_ratios: Sequence[Sequence[float]],
    tolerances: Sequence[float],
) -> bool:
    """Return whether to measure up to the next look.

    Return True between two looks. At a look, return True if looks remain, and a limit is
    undecided or the host is too biased to decide it. After a full run, the pairs up to the last
    look must also be able to decide (see `_may_decide`).

    Args:
        self_log_ratios: log ratios of the baseline to itself.
        tolerances: every limit to decide; 0 means "faster than".
    """
    pairs = len(log_ratios)
    if pairs >= LOOKS[-1]:
        return False
    if pairs not in LOOKS:
        return True
    undecided = (
        tolerance
        for tolerance in tolerances
        if compare(log_ratios, tolerance=tolerance).verdict is Verdict.INCONCLUSIVE
        or (tolerance > 0 and explain_withheld_verdict(log_ratios, self_log_ratios, tolerance))
    )
    if pairs < FULL_RUN:
        return any(True for _ in undecided)
    return any(_may_decide(log_ratios, tolerance) for tolerance in undecided)


def _may_decide(log_ratios: Sequence[Sequence[float]], tolerance: float) -> bool:
    """Return whether the pairs up to the last look may decide a limit.

    The result is True if the present estimate needs at most twice as many pairs. This number is
    uncertain by a factor of two. The result is also True if the models can still be equally fast.
    Lasting noise can move the estimate by the whole limit.
    """
    needed = estimate_pairs_needed(log_ratios, tolerance)
    if needed is not None and needed <= 2 * LOOKS[-1]:
        return True
    distance, half = _measure_distance(log_ratios, tolerance)
    equal = math.log1p(tolerance)
    return distance + half >= equal > 0 and len(log_ratios) * (half / equal) ** 2 <= LOOKS[-1]


def _measure_distance(
    log_ratios: Sequence[Sequence[float]], tolerance: float
) -> tuple[float, float]:
    """Return the distances of the log ratio from its limit and from its bound.

    The bound is the one on the same side as the limit.
    """
    estimate, low, high = run_interval(log_ratios)
    distance = math.log1p(tolerance) - estimate
    return abs(distance), high - estimate if distance > 0 else estimate - low


def get_next_look(pairs: int) -> int:
    """Return the number of session pairs at the first look after `pairs`.

    Return the last look if there is no later one.
    """
    return LOOKS[min(bisect.bisect_right(LOOKS, pairs), len(LOOKS) - 1)]


def compare_latency_quantile(
    samples_ns: npt.ArrayLike, q: float, limit_s: float
) -> QuantileComparison:
    """Compare a quantile of run times in nanoseconds with a limit in seconds.

    The estimate and the bounds of the result are in seconds.
    """
    return compare_quantile(np.asarray(samples_ns, dtype=np.float64) / 1e9, q, limit_s)


def compare_quantile(
    samples: npt.ArrayLike, q: float, limit: float, *, confidence: float = 0.95
) -> QuantileComparison:
    """Compare quantile `q` of independent samples with an upper limit.

    The test is the binomial test of the number of samples above the limit. The bounds are order
    statistics. Both assume no distribution (Conover, Practical Nonparametric Statistics, 3rd ed.,
    §3.2). Samples that are too few to pass (below 299 for the 99th percentile at 95 %, below 5 for
    the median) are INCONCLUSIVE.

    Args:
        samples: shape (runs,), in any unit.
        limit: in the unit of the samples.
        confidence: of each one-sided bound.
    """
    values = np.sort(np.asarray(samples, dtype=np.float64))
    runs = len(values)
    exceeding = int((values > limit).sum())
    below = scipy.special.bdtr(np.arange(runs), runs, q) if runs else np.empty(0)
    upper = int(np.searchsorted(below, confidence))
    lower = int(np.searchsorted(below, 1 - confidence, side="right"))
    high = float(values[upper]) if upper < runs else math.inf
    low = float(values[lower - 1]) if 0 < lower <= runs else 0.0
    verdict = Verdict.INCONCLUSIVE
    if runs >= compute_samples_needed(q, confidence=confidence):
        verdict = Verdict.PASS if high <= limit else Verdict.FAIL if low > limit else verdict
    return QuantileComparison(
        verdict=verdict,
        estimate=float(np.quantile(values, q)) if runs else math.nan,
        low=low,
        high=high,
        n=runs,
        exceeding=exceeding,
        needed=compute_samples_needed(q, exceeding=exceeding, confidence=confidence),
    )


def compute_samples_needed(q: float, *, exceeding: int = 0, confidence: float = 0.95) -> int:
    """Return the smallest number of runs that pass if `exceeding` runs are too slow."""
    return find_least(
        lambda runs: bool(scipy.special.bdtr(exceeding, runs, 1 - q) <= 1 - confidence),
        above=exceeding,
    )


def _exp(value: float) -> float:
    """Return exp(value) with the same digits on every machine.

    NumPy's last digit differs with AVX-512. Evidence must have the same verdict on every machine.
    """
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def compute_block_logs(
    nanoseconds: npt.ArrayLike, preempted: npt.ArrayLike, probe: npt.ArrayLike | None = None
) -> Floats:
    """Return the log of each block's median run time, up to a shared constant.

    Medians are of the runs that were not preempted, or of all runs if every run of a block was
    preempted. One run that was not preempted is more exact than ten preempted ones. With runs of 2
    ms and three threads per core, pairs varied by 6.7 %. They varied by 9.4 % where at least three
    runs without preemption were required. If a probe was timed around each run, the part of the run
    time that the probe explains is subtracted first (`_explain_by_probe`).

    Args:
        nanoseconds: shape (rounds, blocks, models, runs).
        preempted: the same shape, whether the run lost its core.
        probe: the same shape, in any unit; duration of a fixed piece of work around the run, or
            None. It has an effect only if all values are positive and finite, and some differ.

    Returns:
        Shape (rounds, blocks, models). Only differences between models have a meaning.

    Raises:
        MeasurementError: the median run time of a block is 0.
    """
    times = np.asarray(nanoseconds, dtype=np.float64)
    lost = np.asarray(preempted, dtype=bool)
    usable = ~lost | lost.all(axis=-1, keepdims=True)
    if not (np.nanmedian(np.where(usable, times, np.nan), axis=-1) > 0).all():
        raise MeasurementError(
            "a block of runs took no measurable time",
            remedy="Time more rows in one request: `benchmark.batch` of a pipeline, or `--batch N` "
            "of `onnx-ops judge`.",
        )
    logs = np.log(np.maximum(times, _TICK_NS))
    slowness = None if probe is None else _measure_slowness(np.asarray(probe, dtype=np.float64))
    if slowness is not None:
        logs = logs - _explain_by_probe(logs, usable, slowness)
    return np.asarray(np.nanmedian(np.where(usable, logs, np.nan), axis=-1), dtype=np.float64)


def _measure_slowness(probe: Floats) -> Floats | None:
    """Return the log of each probe time, minus the usual value after the same model.

    Return None if the probe has no information. A model that leaves cold caches or a lower clock
    always slows the probes after its runs. This effect must not reduce the run times of that model.
    The usual value comes from runs of the same round, most of which run while the machine is in the
    same state. If it came from all runs, a slow phase that affected one model slightly more would
    look like an effect of that model.
    """
    if not probe.size or not (np.isfinite(probe) & (probe > 0)).all():
        return None
    logs = np.log(probe)
    beside = np.median(logs[:, :, :, np.newaxis] - logs[:, :, np.newaxis], axis=(0, 1, 4))
    return logs - beside.mean(axis=1)[:, np.newaxis] if np.ptp(logs) > 0 else None


def _explain_by_probe(logs: Floats, usable: Flags, slowness: Floats) -> Floats | float:
    """Return the part of the log run time that the machine's slowness explains.

    It is the mean of one curve per model; 0 if a model has too few runs. The runs of a model are
    sorted by slowness and split into parts of nearly equal size. The curve connects the parts
    linearly: x is the median slowness of a part, y its median log run time.
    """
    curves = []
    for model in range(logs.shape[2]):
        chosen = usable[:, :, model]
        x, y = slowness[:, :, model][chosen], logs[:, :, model][chosen]
        parts = min(PARTS, len(x) // FEWEST_PER_PART)
        if parts < 2:
            return 0.0
        pieces = np.array_split(np.argsort(x, kind="stable"), parts)
        nodes = [float(np.median(x[piece])) for piece in pieces]
        curves.append(np.interp(slowness, nodes, [float(np.median(y[piece])) for piece in pieces]))
    return np.asarray(np.mean(curves, axis=0), dtype=np.float64)
