"""What must hold within one `rollout`, and between it and what its endpoint provider can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from onnx_ops.config.document import Finding, Loc
from onnx_ops.config.draft import Draft
from onnx_ops.config.words import did_you_mean, listing
from onnx_ops.domain.pipeline import Deploy
from onnx_ops.domain.rollout_policy import DAY, RolloutPolicy
from onnx_ops.domain.target import Target

Capabilities = Callable[[Deploy], frozenset[str]]
"""What the endpoint plugin of an entry, and the source that counts its requests, can do for it."""

Unservable = Callable[[Deploy, Target], str]
"""Why the endpoint plugin of an entry cannot run models as they were measured on a target; empty if it can."""

_WHOLE = 1e-9
_LACKS = {
    "split": "divide traffic",
    "sticky": "keep a user on one version",
    "shadow": "compare answers on copies of requests",
    "outcomes": "collect clients' outcomes",
    "cold_starts": "measure a cold start before traffic",
    "exceedances": "count requests over any latency",
}


def rollout_findings(draft: Draft) -> Iterator[Finding]:
    for loc, entry in draft.deploy:
        where = (*loc, "rollout")
        for rule in (_shares, _order, _strategy, _needs_steps, _needs_judgement, _minimums, _pauses, _times):
            yield from rule(where, entry.rollout)


def capability_findings(draft: Draft, providers: Sequence[str], capabilities: Capabilities) -> Iterator[Finding]:
    """Policies that their provider cannot keep. Providers that are not installed are not asked."""
    for loc, entry in draft.deploy:
        if entry.provider not in providers:
            continue
        able = capabilities(entry)
        for need, key in entry.rollout.needs().items():
            if need not in able:
                alone = capabilities(replace(entry, metrics={}))
                who = f"source '{entry.metrics['source']}'" if need in alone else f"provider '{entry.provider}'"
                message = f"{who} cannot {_LACKS[need]}; it can: {listing(sorted(able)) or 'nothing'}"
                yield Finding(loc=(*loc, "rollout", *key), message=message)


def serves_all(_: Deploy, __: Target) -> str:
    return ""


def unservable_findings(
    draft: Draft, targets: Mapping[str, Target], providers: Sequence[str], unservable: Unservable
) -> Iterator[Finding]:
    """Endpoints that would not run models as they were measured. Providers that are not installed are not asked."""
    for loc, entry in draft.deploy:
        if entry.provider not in providers or entry.target not in targets:
            continue
        if why := unservable(entry, targets[entry.target]):
            message = f"provider '{entry.provider}' cannot serve what target '{entry.target}' measures: {why}"
            yield Finding(loc=(*loc, "target"), message=message)


def staging_findings(draft: Draft) -> Iterator[Finding]:
    """Rollouts that wait for each other, for endpoints that are not there, or longer than can be told."""
    entries = {entry.endpoint: entry for _, entry in draft.deploy}
    for loc, entry in draft.deploy:
        policy, where = entry.rollout, (*loc, "rollout")
        if policy.soak and not policy.after:
            yield Finding(loc=(*where, "soak"), message="'soak' needs 'after', e.g. after: [staging]")
        for index, name in enumerate(policy.after):
            message = ""
            if name not in entries:
                message = f"no endpoint '{name}' in this file{did_you_mean(name, sorted(entries))}"
            elif entry.endpoint in _before(name, entries):
                message = f"'{entry.endpoint}' and '{name}' would wait for each other"
            elif policy.soak > entries[name].rollout.keep_previous:
                message = f"'soak' is longer than '{name}' keeps its previous version; raise its 'keep_previous'"
            if message:
                yield Finding(loc=(*where, "after", index), message=message)


def _before(name: str, entries: Mapping[str, Deploy]) -> set[str]:
    """The endpoint and all that it waits for, however indirectly."""
    found, rest = set[str](), [name]
    while rest:
        one = rest.pop()
        if one in entries and one not in found:
            found.add(one)
            rest += entries[one].rollout.after
    return found


def _shares(where: Loc, policy: RolloutPolicy) -> Iterator[Finding]:
    shares: list[tuple[Loc, float]] = [(("steps", index), share) for index, share in enumerate(policy.steps)]
    if policy.shadow:
        shares.append((("shadow", "fraction"), policy.shadow.fraction))
    if policy.ab:
        shares.append((("ab", "split"), policy.ab.split))
    for key, share in shares:
        if abs(share * 100 - round(share * 100)) > _WHOLE:
            yield Finding(loc=(*where, *key), message=f"{share * 100:g}% is not a whole percentage")


def _order(where: Loc, policy: RolloutPolicy) -> Iterator[Finding]:
    steps = policy.steps
    if steps[0] <= 0 or any(later <= earlier for earlier, later in pairwise(steps)):
        yield Finding(loc=(*where, "steps"), message="the steps must grow, from more than 0%")
    if steps[-1] != 1:
        yield Finding(loc=(*where, "steps"), message=f"the last step must be 100%, not {steps[-1] * 100:g}%")
    if policy.ab and len(steps) > 1 and policy.ab.split <= steps[-2]:
        message = f"the A/B test follows the step of {steps[-2] * 100:g}%, so its split must be larger"
        yield Finding(loc=(*where, "ab", "split"), message=message)


def _strategy(where: Loc, policy: RolloutPolicy) -> Iterator[Finding]:
    message = ""
    match policy.strategy:
        case "all-at-once" if len(policy.steps) > 1 or policy.ab or policy.shadow:
            message = "all-at-once has one step, 100%, and neither 'shadow' nor 'ab'"
        case "canary" if len(policy.steps) < 2:
            message = "canary needs several steps, e.g. steps: [10%, 50%, 100%]"
        case "ab" if not policy.ab:
            message = "ab needs 'ab', e.g. ab: {duration: 7 d}"
        case "shadow" if not policy.shadow:
            message = "shadow needs 'shadow', e.g. shadow: {fraction: 20%}"
        case _:
            return
    yield Finding(loc=(*where, "strategy"), message=message)


def _needs_steps(where: Loc, policy: RolloutPolicy) -> Iterator[Finding]:
    seen: set[str] = set()
    for index, rail in enumerate(policy.guardrails):
        if rail.name in seen:
            yield Finding(loc=(*where, "guardrails", index), message=f"guardrail '{rail.name}' is named twice")
        if rail.slower is not None and rail.name == "errors":
            message = "'slower' is about latency; errors have 'ratio'"
            yield Finding(loc=(*where, "guardrails", index, "slower"), message=message)
        for key in ("ratio", "max"):
            if getattr(rail, key) is not None and (rail.name == "cold_start") is (key == "ratio"):
                message = "'max' is about cold_start" if key == "max" else "cold_start has 'max' or 'slower'"
                yield Finding(loc=(*where, "guardrails", index, key), message=message)
        if rail.max is not None and rail.slower is not None:
            message = "'max' stands instead of 'slower'; give one of them"
            yield Finding(loc=(*where, "guardrails", index, "slower"), message=message)
        seen.add(rail.name)
    if policy.trials:
        return
    for key in ("guardrails", "slo"):
        if policy.slo if key == "slo" else seen - {"cold_start"}:
            message = f"'{key}' is judged on real traffic before 100%; add steps, e.g. steps: [10%, 100%]"
            yield Finding(loc=(*where, key), message=message)


def _needs_judgement(where: Loc, policy: RolloutPolicy) -> Iterator[Finding]:
    if policy.judged:
        return
    given = (("min_requests", policy.min_requests), ("bake", policy.bake), ("pause", policy.pause))
    timed = (("step_timeout", policy.step_timeout != DAY),)
    for key, value in (*given, *timed):
        if value:
            message = f"'{key}' is for steps that are judged; add e.g. guardrails: [errors]"
            yield Finding(loc=(*where, key), message=message)


def _minimums(where: Loc, policy: RolloutPolicy) -> Iterator[Finding]:
    count, trials = len(policy.min_requests), len(policy.trials)
    if policy.judged and count and not trials:
        message = "'min_requests' is for steps before 100%; a shadow has its own"
        yield Finding(loc=(*where, "min_requests"), message=message)
    elif count > 1 and count != trials:
        message = f"numbers: {count}, steps before 100%: {trials}; give one number, or one for each step"
        yield Finding(loc=(*where, "min_requests"), message=message)


def _pauses(where: Loc, policy: RolloutPolicy) -> Iterator[Finding]:
    known = [round(share * 100) for share in policy.trials]
    for index, share in enumerate(policy.pause):
        if policy.judged and round(share * 100) not in known:
            steps = listing(f"{percent}%" for percent in known) or "none"
            message = f"{share * 100:g}% is no step before 100%; those are {steps}"
            yield Finding(loc=(*where, "pause", index), message=message)


def _times(where: Loc, policy: RolloutPolicy) -> Iterator[Finding]:
    if policy.bake is not None and policy.bake >= policy.step_timeout:
        yield Finding(loc=(*where, "bake"), message="'bake' must be shorter than 'step_timeout'")
    if policy.ab and not policy.ab.metric.strip():
        yield Finding(loc=(*where, "ab", "metric"), message="a metric's name is not blank")
