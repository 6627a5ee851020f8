"""The choice of the variant to serve on each target.

The module imports no numerical library, so it loads fast. A run without work needs it too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from onnx_ops.domain.decision import (
    Decision,
    GateResult,
    TargetObjective,
    Verdict,
    combine_verdicts,
)
from onnx_ops.domain.evidence import EXPORT, Interval, SchedulingMeasurement
from onnx_ops.domain.release import Choice

LATENCY = TargetObjective()

ERROR_LEVEL = 0.05
"""Probability that one variant exactly at the limit passes."""

_FAMILY_LEVEL = 0.043
"""Error level that several variants share.

It is `ERROR_LEVEL` times `_SURELY_WORSE`, less a tenth. The tenth allows for targets that answer a
few rows differently, each of which is a further chance to pass (`benchmarks/truth/choice.py`).
"""

_SURELY_WORSE = 0.95
"""Maximum p-value of a variant that the correction for several variants includes.

Variants with larger p-values cannot be chosen by mistake. The level is reduced by the same factor:
Zhao, Small and Su 2019, Journal of the American Statistical Association 114:1291-1304.
"""

_AS_FAST = 0.9
"""Share of the highest rate from which a configuration is treated as equally fast."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A passing variant; a smaller `key` is better.

    The size of the variant decides ties, then its `place`, the order in the pipeline file.
    """

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

    def rank_by_estimate(self) -> tuple[float, float, int]:
        return self.estimate, self.bytes, self.place

    def rank_by_size(self) -> tuple[float, int]:
        return self.bytes, self.place


def choose(decisions: Sequence[Decision], policy: TargetObjective = LATENCY) -> Choice:
    """Choose the passing variant to serve on one target, by the objective.

    The correction for several variants applies first. The result names a variant only if one
    passes. If latency or cost is preferred, a passing fp32 is chosen unless a variant beats it with
    confidence. Variants whose intervals overlap with that of the best variant are tied with it.
    Among tied variants, the one with the fewest bytes is chosen, then the first in the pipeline
    file.
    """
    target = _get_target(decisions)
    decided, undecided = _correct_for_family(decisions)
    passing = [d for d in decided if d.verdict is Verdict.PASS]
    if not passing:
        return _refuse_all(target, decisions, undecided, policy)
    loaded = policy.objective == "cost" and _were_loads_measured(passing)
    candidates = [
        _Candidate(d, _compute_key(d, policy, loaded=loaded), place)
        for place, d in enumerate(passing)
    ]
    export = next((c for c in candidates if c.decision.variant == EXPORT), None)
    tied = _find_tied(_drop_beaten(candidates, export, policy, loaded=loaded))
    chosen = min(tied, key=_Candidate.rank_by_size)
    others = [c for c in tied if c is not chosen]
    reasons = [_describe_choice(chosen, export, policy, loaded=loaded)]
    reasons += [_describe_tie(chosen, others, policy)] if others else []
    reasons += [_describe_undecided(undecided)] if undecided else []
    return Choice(
        target=target,
        variant=chosen.decision.variant,
        verdict=Verdict.PASS,
        reason="; ".join(reasons),
        objective=policy.objective,
        tied=tuple(c.decision.variant for c in others),
    )


def _get_target(decisions: Sequence[Decision]) -> str:
    targets = {decision.target for decision in decisions}
    if len(targets) != 1:
        raise ValueError(f"a choice is made for one target, not for {sorted(targets)}")
    return targets.pop()


def _refuse_all(
    target: str,
    decisions: Sequence[Decision],
    undecided: Mapping[str, float],
    policy: TargetObjective,
) -> Choice:
    """Return a choice of no variant, with the reasons why each variant was refused."""
    variants_by_reason: dict[tuple[Verdict, str], list[str]] = {}
    refused = [d for d in decisions if d.variant not in undecided]
    # The export comes first, since the other variants are derived from it.
    for decision in sorted(refused, key=lambda d: d.variant != EXPORT):
        variants_by_reason.setdefault((decision.verdict, decision.reason), []).append(
            decision.variant
        )
    reasons = [_describe_undecided(undecided)] if undecided else []
    reasons += [
        f"{', '.join(names)} {verdict.value}: {why}"
        for (verdict, why), names in variants_by_reason.items()
    ]
    return Choice(
        target=target,
        variant=None,
        verdict=Verdict.INCONCLUSIVE
        if undecided
        else combine_verdicts(d.verdict for d in decisions),
        reason="; ".join(reasons),
        objective=policy.objective,
    )


def _were_loads_measured(decisions: Sequence[Decision]) -> bool:
    """Return whether the time per request under load is known for all variants.

    Otherwise, the cost follows from the latency.
    """
    return all(d.standing and d.standing.load for d in decisions)


def _drop_beaten(
    candidates: list[_Candidate],
    export: _Candidate | None,
    policy: TargetObjective,
    *,
    loaded: bool,
) -> list[_Candidate]:
    """Return the variants that beat a passing export with confidence.

    If no variant does, return the export. If size or accuracy is preferred, or the export does not
    pass, return all candidates.
    """
    if policy.objective not in ("latency", "cost") or export is None:
        return candidates
    winners = [c for c in candidates if c is not export and _beats_export(c, export, loaded=loaded)]
    return winners or [export]


def _beats_export(candidate: _Candidate, export: _Candidate, *, loaded: bool) -> bool:
    if loaded and candidate.key and export.key:
        return candidate.key.high < export.key.low
    return candidate.decision.faster_than_export is True


def _find_tied(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Return the candidate with the best estimate, and all that are tied with it.

    A candidate is tied if its interval overlaps with that of the best one. The order of the
    candidates is preserved.
    """
    best = min(candidates, key=_Candidate.rank_by_estimate)

    def is_tied(c: _Candidate) -> bool:
        # Candidates without a measurement are tied only with each other.
        return c.key.low <= best.key.high if c.key and best.key else c.key is best.key

    return [c for c in candidates if c is best or is_tied(c)]


def _describe_tie(chosen: _Candidate, others: Sequence[_Candidate], policy: TargetObjective) -> str:
    names = ", ".join(c.decision.variant for c in others)
    if policy.objective == "size" and chosen.key:
        return f"as small as {names}, and it comes first in the file"
    is_smallest = all(chosen.bytes < c.bytes for c in others)
    why = (
        "it has the fewest bytes"
        if is_smallest
        else "of those with the fewest bytes, it comes first in the file"
    )
    if chosen.key is None:
        return f"not compared with {names}, and {why}"
    return f"tied with {names} within the noise, and {why}"


def _correct_for_family(decisions: Sequence[Decision]) -> tuple[list[Decision], dict[str, float]]:
    """Return the decisions that are valid after the correction, and levels by variant.

    A variant with a level passed its gates, but its p-value is above this level. If six variants
    are exactly at the limit, one passes by chance in a quarter of all releases. The p-values of the
    variants are therefore compared with the levels of Holm 1979 (Scandinavian Journal of Statistics
    6:65-70).
    """
    p_values = _collect_family(decisions)
    family = sorted(
        (p_value, variant) for variant, p_value in p_values.items() if p_value <= _SURELY_WORSE
    )
    if len(family) <= 1:
        return list(decisions), {}
    passed, level = _apply_holm(family)
    failed = set(p_values) - passed
    undecided = {
        d.variant: level for d in decisions if d.verdict is Verdict.PASS and d.variant in failed
    }
    return [d for d in decisions if d.variant not in undecided], undecided


def _collect_family(decisions: Sequence[Decision]) -> dict[str, float]:
    """Return the largest p-value of each variant's enforced gates.

    A passing export is left out. It is tested first, at the full level, since the other variants
    are derived from it. An export that does not pass is included.
    """
    p_values: dict[str, float] = {}
    for decision in decisions:
        enforced = [r.p_value for r in decision.results if r.p_value is not None and not r.advisory]
        if enforced:
            p_values[decision.variant] = max(enforced)
    if any(d.variant == EXPORT and d.verdict is Verdict.PASS for d in decisions):
        p_values.pop(EXPORT, None)
    return p_values


def _apply_holm(family: Sequence[tuple[float, str]]) -> tuple[set[str], float]:
    """Return the variants that pass, and the level of the first that fails.

    If all pass, it is the level of the last variant.

    Args:
        family: pairs of p-value and variant, the smallest p-value first.
    """
    passed: set[str] = set()
    level = _FAMILY_LEVEL
    for place, (p_value, variant) in enumerate(family):
        level = _FAMILY_LEVEL / (len(family) - place)
        if p_value > level:
            break
        passed.add(variant)
    return passed, level


def estimate_prospects(result: GateResult, tried: int) -> tuple[float, float, float] | None:
    """Return verdict probabilities of variants with a known true change.

    The estimates of these changes are assumed to have the spread of this measurement. Return None
    for a result without a p-value or an interval, and for a limit of 0. Return None too for a
    result that is not about a change of all rows, and for an exact change.

    Returns:
        Three probabilities. The first is that a variant without a change passes as one of `tried`
            variants. The others are that a variant with a change of twice the limit passes, and
            that it fails.
    """
    if (
        result.p_value is None
        or result.estimate is None
        or result.low is None
        or result.high is None
    ):
        return None
    if not result.bound or " vs " not in result.metric or result.slices:
        return None
    normal = NormalDist()
    end = result.low if result.bound < 0 else result.high
    error = abs(result.estimate - end) / normal.inv_cdf(1 - ERROR_LEVEL)
    if error <= 0:
        return None  # An exact change, such as that between equal models, has no spread.
    away = abs(result.bound) / error
    strict = normal.inv_cdf(1 - (ERROR_LEVEL if tried <= 1 else _FAMILY_LEVEL / tried))
    passes, wrongly = normal.cdf(away - strict), normal.cdf(-away - strict)
    return passes, wrongly, normal.cdf(away - normal.inv_cdf(1 - ERROR_LEVEL))


def _describe_undecided(undecided: Mapping[str, float]) -> str:
    passes = "passes" if len(undecided) == 1 else "pass"
    return (
        f"{', '.join(undecided)} {passes} alone, "
        "but not with the correction for several variants (p ≤ "
        f"{min(undecided.values()):.2g} is required): measure more rows"
    )


def _compute_key(decision: Decision, policy: TargetObjective, *, loaded: bool) -> Interval | None:
    """Return the value that the objective compares; None where it was not measured.

    Smaller values are better.
    """
    standing = decision.standing
    match policy.objective:
        case "size":
            return (
                Interval.point(float(standing.size_bytes))
                if standing and standing.size_bytes
                else None
            )
        case "accuracy":
            change = standing.change if standing else None
            return change and Interval(
                estimate=-change.estimate, low=-change.high, high=-change.low
            )
        case "cost" if loaded and standing:
            return standing.load
        case _:
            return _get_time_ratio(decision)


def _get_time_ratio(decision: Decision) -> Interval | None:
    """Return the ratio of the variant's time to the export's."""
    if decision.variant == EXPORT:
        return Interval.point(1.0)
    if decision.standing and decision.standing.ratio:
        return decision.standing.ratio
    # Older evidence, and evidence with too few pairs, contains only the estimate.
    return None if decision.latency_ratio is None else Interval.point(decision.latency_ratio)


def _describe_choice(
    chosen: _Candidate, export: _Candidate | None, policy: TargetObjective, *, loaded: bool
) -> str:
    name = chosen.decision.variant
    alone = "" if export else f"; {EXPORT} does not pass"
    if chosen.key is None:
        return f"{name} passes; {policy.objective} was not measured{alone}"
    match policy.objective:
        case "size":
            return f"{name} is the smallest variant that passes, {chosen.bytes / 1e3:.4g} kB{alone}"
        case "accuracy":
            return f"{name} passes {_describe_accuracy(chosen)}{alone}"
        case "cost":
            return (
                f"{name} passes, "
                f"{_describe_cost(chosen, policy, loaded=loaded)}"
                f"{_describe_ratio(chosen, loaded=loaded)}{alone}"
            )
        case _:
            return f"{name} passes{_describe_ratio(chosen, loaded=False)}{alone}"


def _describe_accuracy(chosen: _Candidate) -> str:
    standing = chosen.decision.standing
    metric = standing.metric if standing else "the task metric"
    if chosen.decision.variant == EXPORT:
        return f"with the best {metric}"
    # Smaller keys are better: a difference of shares or, for errors, a relative decrease.
    gain = -100 * chosen.estimate
    if gain == 0:
        return f"with the best {metric}, equal to that of {EXPORT}"
    if gain < 0:
        # The variant is tied with a more accurate one, or the export does not pass.
        return f"with {metric} {-gain:.2g}% worse than {EXPORT}"
    return f"with the best {metric}, {gain:.2g}% better than {EXPORT}"


def _describe_cost(chosen: _Candidate, policy: TargetObjective, *, loaded: bool) -> str:
    """Return the price of a million requests as a text, if it is known.

    It follows from the time of one request and the price of the machine.
    """
    standing = chosen.decision.standing
    seconds = None if standing is None else standing.seconds
    if standing and standing.load and loaded:
        seconds = standing.load.estimate
    if seconds is None or policy.price is None:
        return "at the lowest cost of a request"
    return f"a million requests cost {1e6 * seconds * policy.price / 3600:.3g}"


def _describe_ratio(chosen: _Candidate, *, loaded: bool) -> str:
    if chosen.decision.variant == EXPORT:
        better = "cheaper under load" if loaded else "faster"
        return f" and no passing variant is {better} with 95 % confidence"
    ratio = chosen.decision.latency_ratio
    return "" if ratio is None else f", {ratio:.3g}x the latency of {EXPORT}"


def choose_scheduling(
    measured: Sequence[SchedulingMeasurement], *, independent: bool
) -> tuple[int, bool]:
    """Return how many requests a server runs in parallel, and whether in batches.

    The number is 0 if the server should run as many requests as it can. Among the configurations
    that are as fast as the fastest one, the one with the most threads is chosen. While some threads
    run the model, the others read and answer requests, which the measurement does not include.

    Args:
        measured: empty if the server runs the model on its event loop, or if it could not be
            measured.
        independent: whether outputs do not depend on the other rows of a batch.
    """
    if not measured:
        return 0, independent
    single = min(way.rows for way in measured)
    fastest = _list_fastest([way for way in measured if independent or way.rows == single])
    threads = _count_threads(fastest)
    is_batching_slower = _has_batches(measured, single) and not _has_batches(fastest, single)
    return (
        0 if threads == _count_threads(measured) else threads
    ), independent and not is_batching_slower


def _list_fastest(measured: Sequence[SchedulingMeasurement]) -> list[SchedulingMeasurement]:
    """Return the configurations that are about as fast as the fastest one."""
    highest = max(way.rows_per_s for way in measured)
    return [way for way in measured if way.rows_per_s >= _AS_FAST * highest]


def _count_threads(ways: Sequence[SchedulingMeasurement]) -> int:
    return max(way.threads for way in ways)


def _has_batches(ways: Sequence[SchedulingMeasurement], single: int) -> bool:
    return any(way.rows > single for way in ways)
