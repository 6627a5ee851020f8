"""What rollouts promise where requests are not independent: users who stick, retry, come in bunches; slow hours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from benchmarks.truth.claims import Claim, at_least, at_most, table
from benchmarks.truth.rollout_users import Users
from benchmarks.truth.rollout_world import Result, Rollouts, World
from onnx_ops.domain.rollout_policy import Guardrail, RolloutPolicy, ServiceLevel, SplitTest

RAILS = (Guardrail(name="errors"), Guardrail(name="latency_p50"), Guardrail(name="latency_p99"))
NEVER = 10**9
CANARY = RolloutPolicy(steps=(0.1, 1.0), guardrails=RAILS, min_requests=(NEVER,), step_timeout=1e9)
STEPS = RolloutPolicy(steps=(0.1, 0.5, 1.0), guardrails=RAILS, min_requests=(1000, 3000), step_timeout=1e9)
SPLIT = replace(CANARY, guardrails=RAILS[:1])
ANYWHERE = (RAILS[0], Guardrail(name="latency"))
TEST = RolloutPolicy(ab_test=SplitTest(duration=1e9), min_requests=(1,), step_timeout=1e9)
HEAD = ("rolled back", "canary requests")

_AT_ONCE = 200
"""Rollouts whose users are held in memory."""
_SOME = Users(count=2000, skew=0.8)
_KINDS: Mapping[str, Users] = {
    "all errors by 2 % of users": Users(failing=0.02),
    "payload by user, sd .5": Users(spread=0.5),
    "payload by user, sd 1": Users(spread=1.0),
}
AGAIN, MORE = 0.04, 10
_NULLS: Mapping[str, Users] = {
    **{f"retries {r:g}": replace(_SOME, retried=r) for r in (0.5, 0.8)},
    **{f"bunches of {n}": replace(_SOME, bunch=n) for n in (3, 5, 10)},
    "AR(1) .9, no keys": Users(correlated=0.9),
    "day and night, no keys": Users(daily=True),
    "day and night, users": replace(_SOME, daily=True, spread=0.5),
    "heavy tails, no keys": Users(tails=2),
    "heavy tails, users": replace(_SOME, tails=2, spread=0.5),
    "50 cold first requests": Users(cold=50),
}


def prove(trials: int, *, quick: bool) -> list[Claim]:
    """Every promise; prints a table for each kind."""
    looks = 40 if quick else 100
    return [
        *_alike(_sticky(quick), "sticky users", trials, looks, quick),
        *_alike(_NULLS, "null canary", trials, looks, quick),
        *_power(trials, quick),
        *_distribution(trials, looks, quick),
        *_routing(trials, looks, quick),
        *_split_tests(trials, quick),
        *_levels(trials, quick),
        *_blind(trials, looks, quick),
    ]


def _sticky(quick: bool) -> Mapping[str, Users]:
    crowds = [(count, skew) for count in (200, 2000, 20_000) for skew in (0.8, 1.1)]
    return {
        f"{count:,} users, Zipf {skew:g}, {name}": replace(users, count=count, skew=skew)
        for count, skew in (crowds[1:3] if quick else crowds)
        for name, users in _KINDS.items()
    }


def _run(
    users: Users, policy: RolloutPolicy, trials: int, looks: int, *, requests: int = 200, blind: bool = False
) -> Result:
    world = World(policy=policy, users=users, looks=looks, requests=requests, blind=blind)
    parts = [
        Rollouts(world, min(_AT_ONCE, trials - done), seed=looks + requests + done).run()
        for done in range(0, trials, _AT_ONCE)
    ]
    return Result(ends=[e for part in parts for e in part.ends], exposed=[n for part in parts for n in part.exposed])


def _told(name: str, result: Result, end: str = "rolled back") -> tuple[str, str, str]:
    return name, f"{100 * result.count(end) / len(result.ends):.1f} %", result.median(end)


def _alike(worlds: Mapping[str, Users], kind: str, trials: int, looks: int, quick: bool) -> Iterable[Claim]:
    rows = []
    for name, users in worlds.items():
        result = _run(users, CANARY, trials, looks)
        rows.append(_told(name, result))
        back = result.count("rolled back")
        yield at_most(kind, f"{name}: rolled back", back, trials, 0.05, quick=quick)
    table(f"{kind}: two versions alike, 10 % canary, a look every 200 requests", ("", *HEAD), rows)


def _power(trials: int, quick: bool) -> Iterable[Claim]:
    rows = []
    sticky = replace(_SOME, spread=0.5)
    for name, users, least in (
        ("errors .1 -> 1 %, no keys", Users(errors=0.001, worse=10), 0.95),
        ("latency x 1.2, no keys", Users(times=1.2), 0.9),
        ("errors .1 -> 1 %, 2,000 users", replace(sticky, errors=0.001, worse=10), 0.0),
        ("errors 1 -> 30 %, 2,000 users", replace(sticky, worse=30), 0.99),
        ("all requests fail, 2,000 users", replace(sticky, worse=100), 0.99),
        ("latency x 1.2, 2,000 users", replace(sticky, times=1.2), 0.0),
        ("latency x 1.5, 2,000 users", replace(sticky, times=1.5), 0.0),
        ("latency x 2, 2,000 users", replace(sticky, times=2.0), 0.0),
    ):
        result = _run(users, STEPS, trials, 200)
        rows.append(_told(name, result))
        if least:
            back = result.count("rolled back")
            yield at_least("power", f"10/50/100 %: {name}: rolled back", back, trials, least, quick=quick)
    table("a worse candidate, 10/50/100 %, a look every 200 requests", ("", *HEAD), rows)


def _distribution(trials: int, looks: int, quick: bool) -> Iterable[Claim]:
    """Guardrail `latency`, which looks at the whole distribution."""
    rows = []
    for name, users in {**_sticky(quick), **_NULLS}.items():
        result = _run(users, replace(CANARY, guardrails=ANYWHERE), trials, looks)
        rows.append(_told(name, result))
        back = result.count("rolled back")
        yield at_most("whole distribution", f"{name}: rolled back", back, trials, 0.05, quick=quick)
    table("guardrail latency: two versions alike, 10 % canary", ("", *HEAD), rows)
    compared = []
    for name, users, least in (
        ("80th to 90th percentile x 1.2, no keys", Users(between=1.2), 0.9),
        ("80th to 90th percentile x 1.5, no keys", Users(between=1.5), 0.95),
        ("80th to 90th percentile x 1.5, 2,000 users", replace(_SOME, spread=0.5, between=1.5), 0.0),
        ("all x 1.2, no keys", Users(times=1.2), 0.9),
        ("all x 1.5, 2,000 users", replace(_SOME, spread=0.5, times=1.5), 0.0),
    ):
        result, other = (_run(users, replace(STEPS, guardrails=rails), trials, 200) for rails in (ANYWHERE, RAILS))
        compared.append((*_told(name, result), *_told("", other)[1:]))
        if least:
            back = result.count("rolled back")
            yield at_least("whole distribution", f"{name}: rolled back", back, trials, least, quick=quick)
    table("a slower candidate, 10/50/100 %", ("", *HEAD, "p50 and p99: rolled back", "requests"), compared)


def _routing(trials: int, looks: int, quick: bool) -> Iterable[Claim]:
    rows = []
    crowds = [(0, 0.0), (200, 1.1), (2000, 1.1), (20_000, 0.8), (20_000, 1.1)]
    for count, skew in crowds[1:3] if quick else crowds:
        name = f"{count:,} users, Zipf {skew:g}" if count else "no keys"
        users = Users(count=count, skew=skew)
        found = _run(users, SPLIT, trials, looks).count("paused")
        wrong = Rollouts(World(policy=SPLIT, users=users, looks=looks, routed=2.0), trials, 9).run().count("paused")
        rows.append((name, f"{100 * found / trials:.1f} %", f"{100 * wrong / trials:.1f} %"))
        yield at_most("split", f"{name}: 10 % asked and sent: paused", found, trials, 0.01, quick=quick)
    table("sample ratio, by user", ("", "10 % sent: paused", "20 % sent: paused"), rows)


def _split_tests(trials: int, quick: bool) -> Iterable[Claim]:
    rows = []
    looks = 20 if quick else 75
    crowds = [(1000, (10.0, 90.0)), (5000, (1.0, 9.0)), (1000, (1.0, 9.0)), (300, (1.0, 9.0))]
    for count, beta in crowds[2:] if quick else crowds:
        name = f"{count:,} users, Beta({beta[0]:g}, {beta[1]:g})"
        cells = []
        for times in (1.0, 0.9, 1.2):
            result = _run(Users(count=count, beta=beta, success=times), TEST, trials, looks, requests=400)
            worse, better = result.count("rolled back"), result.count("finished")
            cells.append(f"{100 * worse / trials:.1f} / {100 * better / trials:.1f} %")
            if times == 1:
                yield at_most("A/B", f"{name}, alike: decided", worse + better, trials, 0.05, quick=quick)
            elif times < 1:
                yield at_most("A/B", f"{name}, 10 % worse: called better", better, trials, 0.01, quick=quick)
        rows.append((name, *cells))
    head = (f"{400 * looks:,} outcomes: called worse / better", "alike", "success x .9", "success x 1.2")
    table("A/B, users with success rates of their own", head, rows)


def _levels(trials: int, quick: bool) -> Iterable[Claim]:
    """How often a service level is certified; a cell that errs in more than `AGAIN` has `MORE` times as many trials."""
    rows = []
    crowds = [(0, 1), (0, 3), (0, 10), (2000, 1), (2000, 3), (2000, 10), (20_000, 3), (20_000, 10), (200, 10)]
    for count, bunch in crowds[2:5] if quick else crowds:
        name = f"{count:,} users, bunches of {bunch}" if count else f"no keys, bunches of {bunch}"
        cells = []
        for rate, errors in ((0.02, 0.02), (0.01, 0.02), (0.02, 0.002)):
            policy = replace(
                STEPS, steps=(0.1, 1.0), guardrails=(), slo=ServiceLevel(error_rate=rate), min_requests=(1,)
            )
            users = Users(count=count, skew=0.8, bunch=bunch, errors=errors)
            many, shown = trials, _run(users, policy, trials, 50).count("finished")
            if errors >= rate and shown > AGAIN * trials and not quick:
                many = MORE * trials
                shown = _run(users, policy, many, 50).count("finished")
            cells.append(f"{100 * shown / many:.1f} %")
            if errors >= rate:
                what = f"{name}: {100 * errors:g} % certified as below {100 * rate:g} %"
                yield at_most("service level", what, shown, many, 0.05, quick=quick)
        rows.append((name, *cells))
    table("service level shown", ("", "at the limit", "twice the limit", "a tenth of it"), rows)


def _blind(trials: int, looks: int, quick: bool) -> Iterable[Claim]:
    """A source without user keys, judged by the variation between intervals."""
    rows = []
    worlds = {
        "independent": Users(),
        **{f"bunches of {n}": Users(count=20_000, bunch=n) for n in (3, 5, 10)},
        **{f"retries {r:g}": Users(count=20_000, retried=r) for r in (0.5, 0.8)},
        "2,000 sticky users, payload sd .5": replace(_SOME, spread=0.5),
        "errors .1 -> 1 %": Users(errors=0.001, worse=10),
    }
    for name, users in worlds.items():
        result = _run(users, CANARY, trials, looks, blind=True)
        rows.append(_told(name, result))
        if name.startswith(("independent", "bunches")):
            back = result.count("rolled back")
            yield at_most("without user keys", f"{name}: rolled back", back, trials, 0.05, quick=quick)
    table("a source without user keys, 10 % canary", ("", *HEAD), rows)
