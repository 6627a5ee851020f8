"""Pass rate of the metric gate for a model that is worse by exactly the limit."""

from __future__ import annotations

import functools

from benchmarks.truth.claims import Claim, table
from benchmarks.truth.draws import make_generator
from onnx_ops.domain.decision import Verdict
from onnx_ops.statistics.intervals import tango_interval
from onnx_ops.statistics.rules.metric import MetricLimit

LIMIT = 0.01
BOUND = 0.055
ROWS = (200, 500, 1000, 2000, 5000, 20_000)
WON = (0.002, 0.01, 0.03)
"""Share of rows that only the candidate gets right.

The share of rows that only the baseline gets right is larger by the limit.
"""

DRAWS, QUICK_DRAWS = 40_000, 8_000


def prove(*, quick: bool) -> list[Claim]:
    draws = QUICK_DRAWS if quick else DRAWS
    rows, rates = [], []
    for n in ROWS:
        for won in WON:
            passed, failed = _rates(n, won, draws)
            rows.append(
                (
                    str(n),
                    f"{100 * won:.1f} %",
                    f"{100 * (won + LIMIT):.1f} %",
                    *_percents(passed, failed),
                )
            )
            rates.append(passed)
    head = ("rows", "only candidate right", "only baseline right", "PASS", "FAIL")
    table(
        f"metric, true drop equal to the limit of {100 * LIMIT:g} pp, {draws} draws each",
        head,
        rows,
    )
    # The tolerance is three standard errors of the simulated share.
    error = 3 * (BOUND * (1 - BOUND) / draws) ** 0.5
    return [
        Claim(
            gate="metric",
            what=f"PASS at a true drop equal to the limit, worst of {len(rates)} settings",
            bound=f"≤ {100 * BOUND:g} %",
            figure=f"{100 * max(rates):.2f} % of {draws}",
            is_met=max(rates) <= BOUND + error,
        )
    ]


def _rates(n: int, won: float, draws: int) -> tuple[float, float]:
    """Return the shares of PASS and FAIL."""
    shares = [won + LIMIT, won, 1 - 2 * won - LIMIT]
    counts = make_generator(n, round(1e4 * won)).multinomial(n, shares, size=draws)
    verdicts = [_verdict(n, int(lost), int(gained)) for lost, gained, _ in counts]
    return verdicts.count(Verdict.PASS) / draws, verdicts.count(Verdict.FAIL) / draws


@functools.cache
def _verdict(n: int, only_baseline: int, only_candidate: int) -> Verdict:
    _, low, high = tango_interval(n, only_baseline, only_candidate)
    return MetricLimit(kind="max_drop", value=LIMIT, plain=False).verdict(low, high)


def _percents(*rates: float) -> tuple[str, ...]:
    return tuple(f"{100 * rate:.2f} %" for rate in rates)
