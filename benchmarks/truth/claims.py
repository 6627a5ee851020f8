"""Promised bounds beside the counted values, and tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx_ops.statistics.intervals import clopper_pearson

_CHANCE = 0.005
"""Largest probability that a promise which holds is reported as missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One promise, in which `bound` and `figure` are texts in the same unit."""

    gate: str
    what: str
    bound: str
    figure: str
    is_met: bool

    @property
    def outcome(self) -> str:
        return "held" if self.is_met else "MISSED"


def at_most(
    gate: str, what: str, events: int, trials: int, bound: float, *, worst_of: int = 1
) -> Claim:
    """Return the claim that a rate does not exceed `bound`.

    Worlds are drawn anew in each run, and a rate at its bound is above it in half of them. The
    promise is missed where the confidence interval of the rate lies above the bound. This happens
    by chance in at most one of two hundred runs. A bound of 0 allows no event.

    Args:
        worst_of: number of settings of which this one is the worst; the interval allows for the
            choice (Bonferroni).
    """
    return _rate(
        gate,
        what,
        events,
        trials,
        f"≤ {100 * bound:g} %",
        _exceeds(events, trials, bound, worst_of),
    )


def at_least(gate: str, what: str, events: int, trials: int, bound: float) -> Claim:
    """Return the claim that a rate does not fall below `bound`.

    This is `at_most` of the events that did not happen.
    """
    missed = _exceeds(trials - events, trials, 1 - bound, 1)
    return _rate(gate, what, events, trials, f"≥ {100 * bound:g} %", missed)


def _exceeds(events: int, trials: int, bound: float, worst_of: int) -> bool:
    if not trials:
        return True
    lowest = clopper_pearson(events, trials, 1 - 2 * _CHANCE / worst_of)[1]
    return lowest > bound


def _rate(gate: str, what: str, events: int, trials: int, bound: str, missed: bool) -> Claim:
    if not trials:
        return Claim(gate=gate, what=what, bound=bound, figure="nothing was tried", is_met=False)
    rate, low, high = clopper_pearson(events, trials, 0.95)
    figure = f"{100 * rate:.2f} % [{100 * low:.2f}, {100 * high:.2f}], {events} of {trials}"
    return Claim(gate=gate, what=what, bound=bound, figure=figure, is_met=not missed)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print left-aligned columns under a title."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    print(f"\n{title}")
    for row in (head, *rows):
        print(
            "  "
            + "  ".join(
                cell.ljust(width) for cell, width in zip(row, widths, strict=True)
            ).rstrip(),
            flush=True,
        )


def summary(claims: Sequence[Claim]) -> None:
    rows = [(c.outcome, c.gate, c.what, c.bound, c.figure) for c in claims]
    table("promises", ("", "gate", "what", "bound", "measured (95 % interval)"), rows)
