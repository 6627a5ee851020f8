"""The front of a search: the variants that nothing beats in everything at once, and the places that they get. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnx_ops.domain.search import Role, Slot, Trial
from onnx_ops.statistics.search import Known, eligible, fits, speed

SMALLER = 0.95
"""A second variant for its size alone must have at most this part of the other's bytes."""


def front(known: Known) -> tuple[int, ...]:
    """Numbers of the trials that keep the budget and that nothing else beats in metric, size and every time at once.

    fp32 is among what can beat them. A gain of the metric counts as no loss: it is chance.
    """
    points = [(n, _point(t, known)) for n, t in enumerate(known.trials) if eligible(t, known.budget) and t.ratios]
    names = sorted({name for t in known.trials for name in t.ratios})
    others = [(-1, (0.0, float(known.export_bytes), *(1.0 for _ in names))), *points]
    return tuple(n for n, point in points if not any(_beats(m, other, n, point) for m, other in others))


def _point(trial: Trial, known: Known) -> tuple[float, ...]:
    names = sorted({name for t in known.trials for name in t.ratios})
    times = (trial.ratios[name].estimate if name in trial.ratios else math.inf for name in names)
    return (max(0.0, trial.drop or 0.0), float(trial.size_bytes), *times)


def _beats(m: int, other: tuple[float, ...], n: int, point: tuple[float, ...]) -> bool:
    """Whether it is at least as good in everything, and better in something; of equals the first stays."""
    return all(a <= b for a, b in zip(other, point, strict=True)) and (other != point or m < n)


def assign(known: Known, name: str, roles: Sequence[Role], *, unfinished: str = "") -> tuple[Slot, ...]:
    """Which trial of the front each role gets; a role that another one's variant fills too stays empty.

    `unfinished` says why the search ended before everything was tried.
    """
    trials, places = known.trials, front(known)
    if not places:
        reason = f"{_nothing(known)}; not everything was tried: {unfinished}" if unfinished else _nothing(known)
        return tuple(Slot(role=role, reason=reason) for role in roles)
    fast = min(places, key=lambda n: (speed(trials[n]), n))
    taken: dict[Role, int] = {}
    slots = []
    for role in roles:
        place, why = _place(known, role, places, fast, rival="fast" in roles)
        other = next((r for r, n in taken.items() if n == place), None)
        if other is not None:
            place, why = None, f"{name}-{other} is the best for this too"
        if place is not None:
            taken[role] = place
        slots.append(Slot(role=role, trial=place, reason=why))
    return tuple(slots)


def _place(known: Known, role: Role, places: Sequence[int], fast: int, *, rival: bool) -> tuple[int | None, str]:
    """The trial for a role, or why there is none. `rival`: the fastest has a place of its own."""
    trials = known.trials
    fastest = trials[fast]
    quick = any(one.high < 1 for one in fastest.ratios.values())
    match role:
        case "fast":
            if quick:
                return fast, ""
            return None, f"nothing that keeps the budget is surely faster than fp32 (best: {speed(fastest):.3g}x)"
        case "small":
            least = min(places, key=lambda n: (trials[n].size_bytes, speed(trials[n]), n))
            beside = min(fastest.size_bytes, known.export_bytes) if quick and rival else known.export_bytes
            if trials[least].size_bytes <= SMALLER * beside or (quick and rival and least == fast):
                return least, ""
            return None, f"nothing that keeps the budget is notably smaller ({trials[least].size_bytes} bytes at best)"
        case "exact":
            best = min(places, key=lambda n: (max(0.0, trials[n].drop or 0.0), speed(trials[n]), n))
            lost, least_lost = (max(0.0, trials[n].drop or 0.0) for n in (fast, best))
            if not (quick and rival) or best == fast or lost - least_lost > known.budget.metric_drop / 4:
                return best, ""
            return (
                None,
                f"nothing on the front is notably more exact than the fastest (it loses {100 * lost:.2g} points)",
            )


def _nothing(known: Known) -> str:
    """Why the front is empty, told by the trial that came nearest."""
    measured = [t for t in known.trials if not t.failure and t.drop is not None]
    if not measured:
        why = next((t.failure for t in known.trials), "no recipe fits the model and its targets")
        return f"nothing could be built: {why}"
    kept = [t for t in measured if fits(t, known.budget)]
    if not kept:
        least = min(t.drop or 0.0 for t in measured)
        return f"nothing keeps the task metric: the least loss is {100 * least:.2g} points"
    if not any(eligible(t, known.budget) for t in kept):
        return "what keeps the task metric is larger, or slower at its 99th percentile, than the budget allows"
    return f"nothing that keeps the task metric is faster or smaller than fp32 (best: {min(map(speed, kept)):.3g}x)"
