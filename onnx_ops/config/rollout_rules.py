"""Rules within one `rollout`, and between it, other rollouts of the file and its endpoint provider's capabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from onnx_ops.config.document import Issue, Loc
from onnx_ops.config.messages import did_you_mean, quote_names
from onnx_ops.config.rules import Draft
from onnx_ops.domain.pipeline import Deploy
from onnx_ops.domain.rollout_policy import DAY, RolloutPolicy
from onnx_ops.domain.target import Target

Capabilities = Callable[[Deploy], frozenset[str]]
"""Returns the capabilities of an entry's endpoint plugin and metrics source."""

Unservable = Callable[[Deploy, Target], str]
"""Returns why the endpoint plugin of an entry cannot run models as a target measured them; empty if it can."""

_TOLERANCE = 1e-9
ABILITIES = {
    "split": "divide traffic",
    "sticky": "keep a user on one version",
    "shadow": "compare answers on copies of requests",
    "outcomes": "collect clients' outcomes",
    "cold_starts": "measure a cold start before traffic",
    "exceedances": "count requests over any latency",
}


def check_rollouts(draft: Draft) -> Iterator[Issue]:
    """Yield rollouts that contradict themselves or each other."""
    for loc, entry in draft.deploy:
        for rule in (_check_steps, _check_guardrails, _check_judgement):
            yield from rule((*loc, "rollout"), entry.rollout)
    yield from _check_dependencies(draft)


def check_providers(
    draft: Draft,
    targets: Mapping[str, Target],
    providers: Sequence[str],
    capabilities: Capabilities,
    unservable: Unservable,
) -> Iterator[Issue]:
    """Yield policies that an installed provider cannot keep, and targets whose models it cannot run as measured."""
    for loc, entry in draft.deploy:
        if entry.provider not in providers:
            continue
        able = capabilities(entry)
        for need, key in entry.rollout.needs().items():
            if need not in able:
                own = capabilities(replace(entry, metrics={}))
                plugin = f"source '{entry.metrics['source']}'" if need in own else f"provider '{entry.provider}'"
                message = f"{plugin} cannot {ABILITIES[need]}; it can: {quote_names(sorted(able)) or 'nothing'}"
                yield Issue((*loc, "rollout", *key), message)
        if entry.target in targets and (why := unservable(entry, targets[entry.target])):
            message = f"provider '{entry.provider}' cannot serve what target '{entry.target}' measures: {why}"
            yield Issue((*loc, "target"), message)


def _check_dependencies(draft: Draft) -> Iterator[Issue]:
    """Yield rollouts that wait for each other, for missing endpoints, or longer than can be known."""
    entries = {entry.endpoint: entry for _, entry in draft.deploy}
    for loc, entry in draft.deploy:
        policy, where = entry.rollout, (*loc, "rollout")
        if policy.soak and not policy.after:
            yield Issue((*where, "soak"), "'soak' needs 'after', e.g. after: [staging]")
        for index, name in enumerate(policy.after):
            message = ""
            if name not in entries:
                message = f"no endpoint '{name}' in this file{did_you_mean(name, sorted(entries))}"
            elif entry.endpoint in _find_predecessors(name, entries):
                message = f"'{entry.endpoint}' and '{name}' would wait for each other"
            elif policy.soak > entries[name].rollout.keep_previous:
                message = f"'soak' is longer than '{name}' keeps its previous version; raise its 'keep_previous'"
            if message:
                yield Issue((*where, "after", index), message)


def _find_predecessors(name: str, entries: Mapping[str, Deploy]) -> set[str]:
    """Return the endpoint and all that it waits for, however indirectly."""
    endpoints, pending = set[str](), [name]
    while pending:
        endpoint = pending.pop()
        if endpoint in entries and endpoint not in endpoints:
            endpoints.add(endpoint)
            pending += entries[endpoint].rollout.after
    return endpoints


def _check_steps(where: Loc, policy: RolloutPolicy) -> Iterator[Issue]:
    steps = policy.steps
    shares: list[tuple[Loc, float]] = [(("steps", index), share) for index, share in enumerate(steps)]
    if policy.shadow:
        shares.append((("shadow", "fraction"), policy.shadow.fraction))
    if policy.ab:
        shares.append((("ab", "split"), policy.ab.split))
    for key, share in shares:
        if abs(share * 100 - round(share * 100)) > _TOLERANCE:
            yield Issue((*where, *key), f"{share * 100:g}% is not a whole percentage")
    if steps[0] <= 0 or any(later <= earlier for earlier, later in pairwise(steps)):
        yield Issue((*where, "steps"), "the steps must grow, from more than 0%")
    if steps[-1] != 1:
        yield Issue((*where, "steps"), f"the last step must be 100%, not {steps[-1] * 100:g}%")
    if policy.ab and len(steps) > 1 and policy.ab.split <= steps[-2]:
        message = f"the A/B test follows the step of {steps[-2] * 100:g}%, so its split must be larger"
        yield Issue((*where, "ab", "split"), message)
    if policy.ab and not policy.ab.metric.strip():
        yield Issue((*where, "ab", "metric"), "a metric's name is not blank")
    match policy.strategy:
        case "all-at-once" if len(steps) > 1 or policy.ab or policy.shadow:
            message = "all-at-once has one step, 100%, and neither 'shadow' nor 'ab'"
        case "canary" if len(steps) < 2:
            message = "canary needs several steps, e.g. steps: [10%, 50%, 100%]"
        case "ab" if not policy.ab:
            message = "ab needs 'ab', e.g. ab: {duration: 7 d}"
        case "shadow" if not policy.shadow:
            message = "shadow needs 'shadow', e.g. shadow: {fraction: 20%}"
        case _:
            return
    yield Issue((*where, "strategy"), message)


def _check_guardrails(where: Loc, policy: RolloutPolicy) -> Iterator[Issue]:
    seen: set[str] = set()
    for index, rail in enumerate(policy.guardrails):
        if rail.name in seen:
            yield Issue((*where, "guardrails", index), f"guardrail '{rail.name}' is named twice")
        if rail.slower is not None and rail.name == "errors":
            message = "'slower' is about latency; errors have 'ratio'"
            yield Issue((*where, "guardrails", index, "slower"), message)
        for key in ("ratio", "max"):
            if getattr(rail, key) is not None and (rail.name == "cold_start") is (key == "ratio"):
                message = "'max' is about cold_start" if key == "max" else "cold_start has 'max' or 'slower'"
                yield Issue((*where, "guardrails", index, key), message)
        if rail.max is not None and rail.slower is not None:
            message = "'max' stands instead of 'slower'; give one of them"
            yield Issue((*where, "guardrails", index, "slower"), message)
        seen.add(rail.name)
    if policy.trials:
        return
    for key in ("guardrails", "slo"):
        if policy.slo if key == "slo" else seen - {"cold_start"}:
            message = f"'{key}' is judged on real traffic before 100%; add steps, e.g. steps: [10%, 100%]"
            yield Issue((*where, key), message)


def _check_judgement(where: Loc, policy: RolloutPolicy) -> Iterator[Issue]:
    if policy.bake is not None and policy.bake >= policy.step_timeout:
        yield Issue((*where, "bake"), "'bake' must be shorter than 'step_timeout'")
    count, known = len(policy.min_requests), [round(share * 100) for share in policy.trials]
    if policy.is_analyzed and count and not known:
        yield Issue((*where, "min_requests"), "'min_requests' is for steps before 100%; a shadow has its own")
    elif count > 1 and count != len(known):
        message = f"numbers: {count}, steps before 100%: {len(known)}; give one number, or one for each step"
        yield Issue((*where, "min_requests"), message)
    if policy.is_analyzed:
        for index, share in enumerate(policy.pause):
            if round(share * 100) not in known:
                steps = quote_names(f"{percent}%" for percent in known) or "none"
                yield Issue((*where, "pause", index), f"{share * 100:g}% is no step before 100%; those are {steps}")
        return
    given = {"min_requests": count, "bake": policy.bake, "pause": policy.pause}
    for key in (*(key for key, value in given.items() if value), *["step_timeout"] * (policy.step_timeout != DAY)):
        yield Issue((*where, key), f"'{key}' is for steps that are judged; add e.g. guardrails: [errors]")
