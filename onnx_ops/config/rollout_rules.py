"""Rules about the rollouts of a pipeline file.

The rules check each `rollout`, the dependencies between rollouts, and whether the endpoint's
provider supports the rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from onnx_ops.config.document import Issue, Loc
from onnx_ops.config.messages import did_you_mean, quote_names
from onnx_ops.config.rules import Draft
from onnx_ops.domain.pipeline import Deploy
from onnx_ops.domain.rollout_policy import DAY, DEFAULT_EPOCH_S, DEFAULT_UNITS, RolloutPolicy
from onnx_ops.domain.target import Target

Capabilities = Callable[[Deploy], frozenset[str]]
"""Function that returns the capabilities of an entry.

The entry's endpoint plugin and its metrics source determine them. `ABILITIES` describes the ones
that a rollout can need.
"""

Unservable = Callable[[Deploy, Target], str]
"""Function that returns why an endpoint plugin cannot run a target's models.

The plugin must run them as they were measured on the target. The result is empty if it can.
"""

Uncounted = Callable[[Deploy], str]
"""Function that returns why an entry's metrics source counts no requests.

The result is empty if the source counts them.
"""

_TOLERANCE = 1e-9
"""Tolerance for the floating-point error of a share, in percentage points."""

ABILITIES = {
    "split": "divide traffic",
    "sticky": "keep a user on one version",
    "shadow": "compare answers on copies of requests",
    "feedback": "collect clients' feedback",
    "cold_starts": "measure a cold start before traffic",
    "exceedances": "count the requests above a given latency",
}


def check_rollouts(draft: Draft) -> Iterator[Issue]:
    """Yield rollouts that contradict themselves or each other."""
    for loc, entry in draft.deploy:
        for rule in (_check_steps, _check_strategy, _check_guardrails, _check_judgement):
            yield from rule((*loc, "rollout"), entry.rollout)
    yield from _check_dependencies(draft)


def check_providers(
    draft: Draft,
    targets: Mapping[str, Target],
    providers: Sequence[str],
    capabilities: Capabilities,
    unservable: Unservable,
    uncounted: Uncounted,
) -> Iterator[Issue]:
    """Yield policies, metrics sources and targets that a provider does not support.

    A provider supports a policy if it has the capabilities that the policy needs. It supports a
    target if it can run models as they were measured on the target. Only entries whose provider is
    among `providers` are checked.
    """
    for loc, declared in draft.deploy:
        entry = declared
        if entry.provider not in providers:
            continue
        if why := uncounted(entry):
            yield Issue((*loc, "metrics", "source"), why)
            # The remedy is to remove `metrics`. The policy is checked as if this were done.
            entry = replace(entry, metrics=None)
        able = capabilities(entry)
        for need, key in entry.rollout.needs().items():
            if need not in able:
                own = capabilities(replace(entry, metrics=None))
                plugin = (
                    f"source '{entry.metrics.source}'"
                    if entry.metrics is not None and need in own
                    else f"provider '{entry.provider}'"
                )
                message = (
                    f"{plugin} cannot {ABILITIES[need]}; "
                    f"capabilities here: {quote_names(sorted(able)) or 'none'}"
                )
                yield Issue((*loc, "rollout", *key), message)
        if entry.target in targets and (why := unservable(entry, targets[entry.target])):
            message = (
                f"provider '{entry.provider}' cannot serve the models of target "
                f"'{entry.target}': {why}"
            )
            yield Issue((*loc, "target"), message)


def _check_dependencies(draft: Draft) -> Iterator[Issue]:
    """Yield rollouts that wait for each other, or for endpoints that the file lacks.

    A rollout with `depends_on_soak` and without `depends_on` is also an issue.
    """
    entries = {entry.endpoint: entry for _, entry in draft.deploy}
    for loc, entry in draft.deploy:
        policy, where = entry.rollout, (*loc, "rollout")
        if policy.depends_on_soak and not policy.depends_on:
            yield Issue(
                (*where, "depends_on_soak"),
                "'depends_on_soak' needs 'depends_on', e.g. depends_on: [staging]",
            )
        for index, name in enumerate(policy.depends_on):
            message = ""
            if name not in entries:
                message = f"no endpoint '{name}' in this file{did_you_mean(name, sorted(entries))}"
            elif entry.endpoint in _find_predecessors(name, entries):
                message = (
                    f"'{entry.endpoint}' would wait for itself through '{name}'; remove this entry"
                )
            if message:
                yield Issue((*where, "depends_on", index), message)


def _find_predecessors(name: str, entries: Mapping[str, Deploy]) -> set[str]:
    """Return the endpoint and all endpoints that it waits for, also indirectly."""
    endpoints, pending = set[str](), [name]
    while pending:
        endpoint = pending.pop()
        if endpoint in entries and endpoint not in endpoints:
            endpoints.add(endpoint)
            pending += entries[endpoint].rollout.depends_on
    return endpoints


def _check_steps(where: Loc, policy: RolloutPolicy) -> Iterator[Issue]:
    """Yield problems of the shares of traffic.

    Each share must be a whole percentage, and the steps must grow to 100%. The split of an A/B test
    must exceed the last step before 100%.
    """
    steps = policy.steps
    for key, share in _list_shares(policy):
        if abs(share * 100 - round(share * 100)) > _TOLERANCE:
            yield Issue((*where, *key), f"{share * 100:g}% is not a whole percentage")
    if steps[0] <= 0 or any(later <= earlier for earlier, later in pairwise(steps)):
        yield Issue(
            (*where, "steps"),
            "the first step must be above 0%, and each later step larger than the one before",
        )
    if steps[-1] != 1:
        yield Issue((*where, "steps"), f"the last step must be 100%, not {steps[-1] * 100:g}%")
    if policy.ab_test and len(steps) > 1 and policy.ab_test.split <= steps[-2]:
        message = (
            f"the A/B test follows the step of {steps[-2] * 100:g}%, so its split must be larger, "
            f"not {policy.ab_test.split * 100:g}%"
        )
        yield Issue((*where, "ab_test", "split"), message)


def _list_shares(policy: RolloutPolicy) -> Iterator[tuple[Loc, float]]:
    """Yield the location of every share of traffic, and the share."""
    for index, share in enumerate(policy.steps):
        yield ("steps", index), share
    if policy.shadow:
        yield ("shadow", "fraction"), policy.shadow.fraction
    if policy.ab_test:
        yield ("ab_test", "split"), policy.ab_test.split


def _check_strategy(where: Loc, policy: RolloutPolicy) -> Iterator[Issue]:
    """Yield a strategy that other keys of the rollout contradict."""
    match policy.strategy:
        case "all-at-once" if len(policy.steps) > 1 or policy.ab_test or policy.shadow:
            message = "strategy all-at-once has one step, 100%, and neither 'shadow' nor 'ab_test'"
        case "canary" if len(policy.steps) < 2:
            message = "strategy canary needs several steps, e.g. steps: [10%, 50%, 100%]"
        case "ab_test" if not policy.ab_test:
            message = "strategy ab_test needs 'ab_test', e.g. ab_test: {duration: 7 d}"
        case "shadow" if not policy.shadow:
            message = "strategy shadow needs 'shadow', e.g. shadow: {fraction: 20%}"
        case _:
            return
    yield Issue((*where, "strategy"), message)


def _check_guardrails(where: Loc, policy: RolloutPolicy) -> Iterator[Issue]:
    seen: set[str] = set()
    for index, rail in enumerate(policy.guardrails):
        if rail.name in seen:
            yield Issue((*where, "guardrails", index), f"guardrail '{rail.name}' is named twice")
        if rail.max_latency_increase is not None and rail.name == "errors":
            message = (
                "'max_latency_increase' is for latency guardrails; 'errors' takes 'odds_ratio'"
            )
            yield Issue((*where, "guardrails", index, "max_latency_increase"), message)
        for key in ("odds_ratio", "max"):
            if getattr(rail, key) is not None and (rail.name == "cold_start") is (
                key == "odds_ratio"
            ):
                message = (
                    "'max' is for guardrail 'cold_start' only"
                    if key == "max"
                    else "guardrail 'cold_start' takes 'max' or 'max_latency_increase'"
                )
                yield Issue((*where, "guardrails", index, key), message)
        if rail.max is not None and rail.max_latency_increase is not None:
            message = "'max' replaces 'max_latency_increase'; keep one of them"
            yield Issue((*where, "guardrails", index, "max_latency_increase"), message)
        seen.add(rail.name)
    if policy.trials:
        return
    for key in ("guardrails", "slo"):
        if policy.slo if key == "slo" else seen - {"cold_start"}:
            message = (
                f"'{key}' is judged on real traffic before 100%; add steps, e.g. steps: [10%, 100%]"
            )
            yield Issue((*where, key), message)


def _check_judgement(where: Loc, policy: RolloutPolicy) -> Iterator[Issue]:
    """Yield settings of judged steps that do not fit the steps, or are unused."""
    if policy.min_step_duration is not None and policy.min_step_duration >= policy.step_timeout:
        yield Issue(
            (*where, "min_step_duration"), "'min_step_duration' must be shorter than 'step_timeout'"
        )
    if policy.epoch >= policy.step_timeout:
        yield Issue((*where, "epoch"), "'epoch' must be shorter than 'step_timeout'")
    count, trials = len(policy.min_requests), len(policy.trials)
    if policy.is_analyzed and count and not trials:
        yield Issue(
            (*where, "min_requests"),
            "'min_requests' is for steps before 100%; for shadow traffic, set "
            "'shadow.min_requests'",
        )
    elif count > 1 and count != trials:
        message = f"expected one number, or one per step before 100% ({trials}), got {count}"
        yield Issue((*where, "min_requests"), message)
    yield from (
        _check_approvals(where, policy) if policy.is_analyzed else _list_unused(where, policy)
    )


def _check_approvals(where: Loc, policy: RolloutPolicy) -> Iterator[Issue]:
    """Yield entries of `approval_steps` that are not steps before 100%."""
    trials = [round(share * 100) for share in policy.trials]
    for index, share in enumerate(policy.approval_steps):
        if round(share * 100) not in trials:
            steps = quote_names(f"{percent}%" for percent in trials) or "none"
            message = f"{share * 100:g}% is not a step before 100%; known steps: {steps}"
            yield Issue((*where, "approval_steps", index), message)


def _list_unused(where: Loc, policy: RolloutPolicy) -> Iterator[Issue]:
    """Yield settings for judged steps, in a rollout that judges no step."""
    given = {
        "min_requests": policy.min_requests,
        "min_step_duration": policy.min_step_duration,
        "approval_steps": policy.approval_steps,
    }
    changed = {
        "step_timeout": policy.step_timeout != DAY,
        "epoch": policy.epoch != DEFAULT_EPOCH_S,
        "min_units": policy.min_units != DEFAULT_UNITS,
    }
    for key, value in (given | changed).items():
        if not value:
            continue
        yield Issue(
            (*where, key),
            f"'{key}' is for steps that are judged; leave it out, or add e.g. guardrails: [errors]",
        )
