"""The choice of a variant for each target.

Imports no numerical library, since a run without work needs this module too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from onnx_ops.domain.decision import Decision, GateResult, TargetObjective, Verdict, combine_verdicts
from onnx_ops.domain.evidence import Interval, SchedulingMeasurement
from onnx_ops.domain.pipeline import EXPORT
from onnx_ops.domain.release import Choice

LATENCY = TargetObjective()

ERROR_LEVEL = 0.05
"""Chance that one variant exactly at the limit passes."""

_FAMILY_LEVEL = 0.043
"""Shared by several variants: `ERROR_LEVEL` times `_SURELY_WORSE`, less a tenth for targets that answer a few rows
differently, each of which is a further chance (`benchmarks/truth/choice.py`)."""

_SURELY_WORSE = 0.95
"""Variants with larger p-values are not counted, as they cannot be chosen by mistake. The level is lowered by the same
factor: Zhao, Small and Su 2019, Journal of the American Statistical Association 114:1291-1304."""

_AS_FAST = 0.9
"""Share of the highest rate from which a way to run requests counts as equally fast."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A passing variant. A smaller `key` is better; `place` in the file breaks ties."""

    decision: Decision
    key: Interval | None
    place: int

    @property
    def estimate(self) -> float:
        return math.inf if self.key is None else self.key.estimate

    @property
    def bytes(self) -> float:
        standing = self.decision.standing
        return standing.size_bytes if standing and standing.size_bytes else math.inf


def choose(decisions: Sequence[Decision], policy: TargetObjective = LATENCY) -> Choice:
    """Choose the passing variant to serve on one target, by the objective.

    Where latency or cost is preferred, a passing fp32 stays unless a variant beats it with confidence. Variants whose
    intervals overlap that of the best are tied with it; of these the one with the fewest bytes is chosen, then the
    first in the order of the pipeline file.
    """
    targets = {decision.target for decision in decisions}
    if len(targets) != 1:
        raise ValueError(f"a choice is made for one target, not for {sorted(targets)}")
    target = targets.pop()
    decided, undecided = _correct_for_family(decisions)
    passing = [d for d in decided if d.verdict is Verdict.PASS]
    if not passing:
        verdict = Verdict.INCONCLUSIVE if undecided else combine_verdicts(d.verdict for d in decisions)
        refused = [d for d in decisions if d.variant not in undecided]
        shared: dict[tuple[Verdict, str], list[str]] = {}  # variants with the same reason, the export first
        for decision in sorted(refused, key=lambda d: d.variant != EXPORT):
            shared.setdefault((decision.verdict, decision.reason), []).append(decision.variant)
        failures = [f"{', '.join(names)} {verdict.value}: {why}" for (verdict, why), names in shared.items()]
        reason = "; ".join((*([_describe_undecided(undecided)] if undecided else []), *failures))
        return Choice(target=target, variant=None, verdict=verdict, reason=reason, objective=policy.objective)
    loaded = policy.objective == "cost" and all(d.standing and d.standing.load for d in passing)
    candidates = [_Candidate(d, _compute_key(d, policy, loaded=loaded), place) for place, d in enumerate(passing)]
    export = next((c for c in candidates if c.decision.variant == EXPORT), None)
    if policy.objective in ("latency", "cost") and export is not None:
        winners = [
            c
            for c in candidates
            if c is not export
            and (
                c.key.high < export.key.low
                if loaded and c.key and export.key
                else c.decision.faster_than_export is True
            )
        ]
        candidates = winners or [export]
    best = min(candidates, key=lambda c: (c.estimate, c.bytes, c.place))
    # Unmeasured candidates are equal to each other only.
    tied = [
        c for c in candidates if c is best or (c.key.low <= best.key.high if c.key and best.key else c.key is best.key)
    ]
    chosen = min(tied, key=lambda c: (c.bytes, c.place))
    others = [c for c in tied if c is not chosen]
    reason = _describe_choice(chosen, export, policy, loaded=loaded)
    if others:
        is_smallest = all(chosen.bytes < c.bytes for c in others)
        why = "it has the fewest bytes" if is_smallest else "it comes first in the file"
        reason += f"; tied with {', '.join(c.decision.variant for c in others)} within the noise, and {why}"
    reason += f"; {_describe_undecided(undecided)}" if undecided else ""
    return Choice(
        target=target,
        variant=chosen.decision.variant,
        verdict=Verdict.PASS,
        reason=reason,
        objective=policy.objective,
        tied=tuple(c.decision.variant for c in others),
    )


def _correct_for_family(decisions: Sequence[Decision]) -> tuple[list[Decision], dict[str, float]]:
    """Return the decisions that also pass as one of several, and the levels of those that do not.

    Of six variants exactly at the limit one passes by chance in a quarter of all releases. Their p-values are therefore
    compared with the limits of Holm 1979 (Scandinavian Journal of Statistics 6:65-70). A passing export comes first, at
    the full level, since the others are derived from it. One that does not pass is one of the family.
    """
    p_values: dict[str, float] = {}
    for decision in decisions:
        if enforced := [r.p_value for r in decision.results if r.p_value is not None and not r.advisory]:
            p_values[decision.variant] = max(enforced)
    if any(d.variant == EXPORT and d.verdict is Verdict.PASS for d in decisions):
        p_values.pop(EXPORT, None)
    open_ = sorted((p_value, variant) for variant, p_value in p_values.items() if p_value <= _SURELY_WORSE)
    passed: set[str] = set()
    level = ERROR_LEVEL
    for place, (p_value, variant) in enumerate(open_):
        level = ERROR_LEVEL if len(open_) == 1 else _FAMILY_LEVEL / (len(open_) - place)
        if p_value > level:
            break
        passed.add(variant)
    undecided = {
        d.variant: level
        for d in decisions
        if d.verdict is Verdict.PASS and d.variant in p_values and d.variant not in passed and len(open_) > 1
    }
    return [d for d in decisions if d.variant not in undecided], undecided


def estimate_prospects(result: GateResult, tried: int) -> tuple[float, float, float] | None:
    """Return the chances of variants with known true changes, measured like this one.

    None for a result that is not about a change, or whose change is exact.

    Returns:
        (chance that a variant without a change passes as one of `tried`, the same chance for a change of twice the
            limit, chance that the latter fails).
    """
    if result.p_value is None or result.estimate is None or result.low is None or result.high is None:
        return None
    if not result.bound or " vs " not in result.metric:
        return None
    normal = NormalDist()
    end = result.low if result.bound < 0 else result.high
    error = abs(result.estimate - end) / normal.inv_cdf(1 - ERROR_LEVEL)
    if error <= 0:
        return None  # an exact change, as between equal models, says nothing of others
    away = abs(result.bound) / error
    strict = normal.inv_cdf(1 - (ERROR_LEVEL if tried <= 1 else _FAMILY_LEVEL / tried))
    passes, wrongly = normal.cdf(away - strict), normal.cdf(-away - strict)
    return passes, wrongly, normal.cdf(away - normal.inv_cdf(1 - ERROR_LEVEL))


def _describe_undecided(undecided: Mapping[str, float]) -> str:
    passes = "passes" if len(undecided) == 1 else "pass"
    return (
        f"{', '.join(undecided)} {passes} the metric gate alone, but one of so many variants passes by chance "
        f"too often (p ≤ {min(undecided.values()):.2g} is required): more rows decide it"
    )


def _compute_key(decision: Decision, policy: TargetObjective, *, loaded: bool) -> Interval | None:
    standing = decision.standing
    match policy.objective:
        case "size":
            return Interval.point(float(standing.size_bytes)) if standing and standing.size_bytes else None
        case "accuracy":
            change = standing.change if standing else None
            return change and Interval(estimate=-change.estimate, low=-change.high, high=-change.low)
        case "cost" if loaded and standing:
            return standing.load
        case _:
            if decision.variant == EXPORT:
                return Interval.point(1.0)
            if standing and standing.ratio:
                return standing.ratio
            return None if decision.latency_ratio is None else Interval.point(decision.latency_ratio)


def _describe_choice(chosen: _Candidate, export: _Candidate | None, policy: TargetObjective, *, loaded: bool) -> str:
    name, standing = chosen.decision.variant, chosen.decision.standing
    alone = "" if export else f"; {EXPORT} does not pass"
    if chosen.key is None:
        return f"{name} passes; {policy.objective} was not measured{alone}"
    match policy.objective:
        case "size":
            return f"{name} passes, and of what passes it is the smallest, {chosen.bytes / 1e3:.4g} kB{alone}"
        case "accuracy":
            metric = standing.metric if standing else "the task metric"
            change = f"{-100 * chosen.estimate:+.2g} points against {EXPORT}"
            return f"{name} passes with the best {metric}" + ("" if name == EXPORT else f", {change}") + alone
        case "cost":
            seconds = None if standing is None else standing.seconds
            if standing and standing.load and loaded:
                seconds = standing.load.estimate
            cost = "at the lowest cost of a request"
            if seconds is not None and policy.price is not None:
                cost = f"a million requests cost {1e6 * seconds * policy.price / 3600:.3g}"
            return f"{name} passes, {cost}{_describe_ratio(chosen)}{alone}"
        case _:
            return f"{name} passes{_describe_ratio(chosen)}{alone}"


def _describe_ratio(chosen: _Candidate) -> str:
    if chosen.decision.variant == EXPORT:
        return " and no passing variant is faster with confidence"
    ratio = chosen.decision.latency_ratio
    return "" if ratio is None else f", {ratio:.3g}x the latency of {EXPORT}"


def choose_scheduling(measured: Sequence[SchedulingMeasurement], *, independent: bool) -> tuple[int, bool]:
    """Return how many requests a server should run at once (0: as many as it can), and whether in batches.

    Among the configurations that are as fast as the fastest one, the one with the most threads is chosen: a thread
    reads and answers requests while the others run, which is not measured.

    Args:
        measured: empty if the server runs the model on its event loop, or if it could not be measured.
        independent: whether outputs do not depend on the other rows of a batch.
    """
    if not measured:
        return 0, independent
    single = min(way.rows for way in measured)
    allowed = [way for way in measured if independent or way.rows == single]
    fastest = max(way.rows_per_s for way in allowed)
    equal = [way for way in allowed if way.rows_per_s >= _AS_FAST * fastest]
    threads = max(way.threads for way in equal)
    is_batched = any(way.rows > single for way in equal) or all(way.rows == single for way in measured)
    return (0 if threads == max(way.threads for way in measured) else threads), independent and is_batched
