"""Which variant a target gets. Imports no numbers library: a run with nothing to do asks it too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from onnx_ops.domain.decision import Decision, GateResult, TargetObjective, Verdict, combine_verdicts
from onnx_ops.domain.evidence import Interval
from onnx_ops.domain.pipeline import EXPORT
from onnx_ops.domain.release import Choice

LATENCY = TargetObjective()

ERROR_LEVEL = 0.05
"""Chance that one variant exactly at the limit passes."""

_FAMILY_LEVEL = 0.043
"""Shared by several variants: `ERROR_LEVEL` times `_SURELY_WORSE`, less a tenth for targets that answer a few rows
otherwise, each of which is a further chance (`benchmarks/truth/choice.py`)."""

_SURELY_WORSE = 0.95
"""Variants with p-values beyond it are left out of the count, as they cannot be chosen by mistake. The level is lowered
by the same factor: Zhao, Small and Su 2019, Journal of the American Statistical Association 114:1291-1304."""


@dataclass(frozen=True, slots=True)
class _Contender:
    """A variant that passes. `key` is what is preferred, less being better; its place in the file breaks ties."""

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
    """The variant to serve on one target: of those that pass, the best by what is preferred.

    Where latency or cost is preferred, a passing fp32 stands unless a variant beats it with confidence. Variants whose
    intervals overlap that of the best are tied with it; of those the one with the fewest bytes is chosen, then the
    first in the file.

    Args:
        decisions: of all variants on that target, in the order of the pipeline file.
        policy: what is preferred there.

    Raises:
        ValueError: there is no decision, or they are about several targets.
    """
    targets = {decision.target for decision in decisions}
    if len(targets) != 1:
        raise ValueError(f"a choice is made for one target, not for {sorted(targets)}")
    target = targets.pop()
    together, unsure = _as_family(decisions)
    passing = [d for d in together if d.verdict is Verdict.PASS]
    if not passing:
        verdict = Verdict.INCONCLUSIVE if unsure else combine_verdicts(d.verdict for d in decisions)
        refused = [d for d in decisions if d.variant not in unsure]
        reason = "; ".join(text for text in (_unsure(unsure), _blame(refused)) if text)
        return Choice(target=target, variant=None, verdict=verdict, reason=reason, prefer=policy.prefer)
    loaded = policy.prefer == "cost" and all(d.standing and d.standing.load for d in passing)
    contenders = [_Contender(d, _key(d, policy, loaded=loaded), place) for place, d in enumerate(passing)]
    export = next((c for c in contenders if c.decision.variant == EXPORT), None)
    if policy.prefer in ("latency", "cost") and export is not None:
        rivals = [c for c in contenders if c is not export and _beats(c, export, loaded=loaded)]
        contenders = rivals or [export]
    best = min(contenders, key=lambda c: (c.estimate, c.bytes, c.place))
    tied = [c for c in contenders if c is best or _overlaps(c.key, best.key)]
    chosen = min(tied, key=lambda c: (c.bytes, c.place))
    others = tuple(c.decision.variant for c in tied if c is not chosen)
    told = _praise(chosen, export, policy, loaded=loaded) + _tie(chosen, [c for c in tied if c is not chosen])
    told += f"; {_unsure(unsure)}" if unsure else ""
    return Choice(
        target=target,
        variant=chosen.decision.variant,
        verdict=Verdict.PASS,
        reason=told,
        prefer=policy.prefer,
        tied=others,
    )


def _as_family(decisions: Sequence[Decision]) -> tuple[list[Decision], dict[str, float]]:
    """The decisions without those that pass alone but not as one of several; of these the p-values that were asked.

    Of six variants exactly at the limit one passes by chance in a quarter of all releases. So their p-values are held
    against the limits of Holm 1979 (Scandinavian Journal of Statistics 6:65-70). A passing export comes first, at the
    full level: what is derived from it is asked only then. One that does not pass is one of the family.
    """
    doubts = {d.variant: doubt for d in decisions if (doubt := _doubt(d)) is not None}
    if any(d.variant == EXPORT and d.verdict is Verdict.PASS for d in decisions):
        doubts.pop(EXPORT, None)
    open_ = sorted((doubt, variant) for variant, doubt in doubts.items() if doubt <= _SURELY_WORSE)
    passed: set[str] = set()
    level = ERROR_LEVEL
    for place, (doubt, variant) in enumerate(open_):
        count = len(open_) - place
        level = ERROR_LEVEL if len(open_) == 1 else _FAMILY_LEVEL / count
        if doubt > level:
            break
        passed.add(variant)
    unsure = {
        d.variant: level
        for d in decisions
        if d.verdict is Verdict.PASS and d.variant in doubts and d.variant not in passed and len(open_) > 1
    }
    return [d for d in decisions if d.variant not in unsure], unsure


def estimate_prospects(result: GateResult, tried: int) -> tuple[float, float, float] | None:
    """What variants of a known change would meet, measured as this one; None of a result that is about no change.

    Returns:
        (chance that one without a change passes as one of `tried`, the same of one that changes by twice the limit,
        chance that the latter fails).
    """
    if result.p_value is None or result.estimate is None or result.low is None or result.high is None:
        return None
    if not result.bound or " vs " not in result.metric:
        return None
    normal = NormalDist()
    end = result.low if result.bound < 0 else result.high
    error = abs(result.estimate - end) / normal.inv_cdf(1 - ERROR_LEVEL)
    if error <= 0:
        return 1.0, 0.0, 1.0
    away = abs(result.bound) / error
    strict = normal.inv_cdf(1 - (ERROR_LEVEL if tried <= 1 else _FAMILY_LEVEL / tried))
    passes, wrongly = normal.cdf(away - strict), normal.cdf(-away - strict)
    return passes, wrongly, normal.cdf(away - normal.inv_cdf(1 - ERROR_LEVEL))


def _doubt(decision: Decision) -> float | None:
    """The largest p-value of what must hold of the task metric."""
    return max((r.p_value for r in decision.results if r.p_value is not None and not r.advisory), default=None)


def _unsure(unsure: Mapping[str, float]) -> str:
    if not unsure:
        return ""
    passes = "passes" if len(unsure) == 1 else "pass"
    return (
        f"{', '.join(unsure)} {passes} the metric gate alone, but one of so many variants passes by chance too often "
        f"(p ≤ {min(unsure.values()):.2g} is asked): more rows decide it"
    )


def _key(decision: Decision, policy: TargetObjective, *, loaded: bool) -> Interval | None:
    standing = decision.standing
    match policy.prefer:
        case "size":
            return _point(float(standing.size_bytes)) if standing and standing.size_bytes else None
        case "accuracy":
            change = standing.change if standing else None
            return change and Interval(estimate=-change.estimate, low=-change.high, high=-change.low)
        case "cost" if loaded and standing:
            return standing.load
        case _:
            if decision.variant == EXPORT:
                return _point(1.0)
            if standing and standing.ratio:
                return standing.ratio
            return None if decision.latency_ratio is None else _point(decision.latency_ratio)


def _beats(rival: _Contender, export: _Contender, *, loaded: bool) -> bool:
    if loaded and rival.key and export.key:
        return rival.key.high < export.key.low
    return rival.decision.faster_than_export is True


def _point(value: float) -> Interval:
    return Interval(estimate=value, low=value, high=value)


def _overlaps(one: Interval | None, best: Interval | None) -> bool:
    """Whether a contender may be as good as the best; of two that were not measured neither is better."""
    if one is None or best is None:
        return one is best
    return one.low <= best.high


def _blame(decisions: Sequence[Decision]) -> str:
    """Why no variant passes, the export first; variants that share a reason are named together."""
    shared: dict[tuple[Verdict, str], list[str]] = {}
    for decision in sorted(decisions, key=lambda d: d.variant != EXPORT):
        shared.setdefault((decision.verdict, decision.reason), []).append(decision.variant)
    return "; ".join(f"{', '.join(names)} {verdict.value}: {why}" for (verdict, why), names in shared.items())


def _praise(chosen: _Contender, export: _Contender | None, policy: TargetObjective, *, loaded: bool) -> str:
    name, standing = chosen.decision.variant, chosen.decision.standing
    alone = "" if export else f"; {EXPORT} does not pass"
    if chosen.key is None:
        return f"{name} passes; {policy.prefer} was not measured{alone}"
    match policy.prefer:
        case "size":
            return f"{name} passes, and of what passes it is the smallest, {chosen.bytes / 1e3:.4g} kB{alone}"
        case "accuracy":
            metric = standing.metric if standing else "the task metric"
            change = f"{-100 * chosen.estimate:+.2g} points against {EXPORT}"
            return f"{name} passes with the best {metric}" + ("" if name == EXPORT else f", {change}") + alone
        case "cost":
            return f"{name} passes, {_cost(chosen, policy, loaded=loaded)}{_faster(chosen)}{alone}"
        case _:
            return f"{name} passes{_faster(chosen)}{alone}"


def _faster(chosen: _Contender) -> str:
    if chosen.decision.variant == EXPORT:
        return " and no passing variant is faster with confidence"
    ratio = chosen.decision.latency_ratio
    return "" if ratio is None else f", {ratio:.3g}x the latency of {EXPORT}"


def _cost(chosen: _Contender, policy: TargetObjective, *, loaded: bool) -> str:
    standing = chosen.decision.standing
    seconds = None if standing is None else standing.load.estimate if loaded and standing.load else standing.seconds
    if seconds is None or policy.price is None:
        return "at the lowest cost of a request"
    return f"a million requests cost {1e6 * seconds * policy.price / 3600:.3g}"


def _tie(chosen: _Contender, others: Sequence[_Contender]) -> str:
    if not others:
        return ""
    names = ", ".join(c.decision.variant for c in others)
    why = "it has the fewest bytes" if all(chosen.bytes < c.bytes for c in others) else "it stands first in the file"
    return f"; tied with {names} inside the noise, and {why}"
