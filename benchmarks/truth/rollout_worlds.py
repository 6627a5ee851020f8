"""What rollouts promise where requests are not independent.

There are few clients, users who retry or fail, and slow hours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from benchmarks.truth.claims import Claim, table
from benchmarks.truth.rollout_trials import Trials
from benchmarks.truth.rollout_users import Users
from benchmarks.truth.rollout_world import Rates, Result, World
from onnx_ops.domain.rollout_policy import Guardrail, RolloutPolicy, ServiceLevel, SplitTest

RAILS = (Guardrail(name="errors"), Guardrail(name="latency_p50"), Guardrail(name="latency_p99"))
NEVER = 10**9
CANARY = RolloutPolicy(steps=(0.1, 1.0), guardrails=RAILS, min_requests=(NEVER,), step_timeout=1e9)
STEPS = RolloutPolicy(
    steps=(0.1, 0.5, 1.0), guardrails=RAILS, min_requests=(1000, 3000), step_timeout=1e9
)
CLIENTS = RolloutPolicy(
    steps=(0.1, 0.5, 1.0), guardrails=RAILS[:1], min_requests=(300, 1000), step_timeout=1e9
)
SPLIT = replace(CANARY, guardrails=RAILS[:1])
ANYWHERE = (RAILS[0], Guardrail(name="latency"))
TEST = RolloutPolicy(ab_test=SplitTest(duration=1e9), min_requests=(1,), step_timeout=1e9)
HEAD = ("rolled back", "canary requests")

_SOME = Users(count=2000, skew=0.8)
_COUNTS = (1, 2, 3, 5, 10, 20, 50)
_EPOCHS = 500
"""Number of epochs in which one client is very likely to show a failure.

A tenth of these epochs is the candidate's.
"""
_KINDS: Mapping[str, Users] = {
    "all errors by 2 % of users": Users(failing=0.02),
    "payload by user, sd .5": Users(spread=0.5),
    "payload by user, sd 1": Users(spread=1.0),
}
_NULLS: Mapping[str, Users] = {
    **{f"retries {r:g}": replace(_SOME, retried=r) for r in (0.5, 0.8)},
    **{f"bunches of {n}": replace(_SOME, bunch=n) for n in (3, 5, 10)},
    "AR(1) .9, no keys": Users(correlated=0.9),
    "day and night, no keys": Users(daily=True),
    "day and night, users": replace(_SOME, daily=True, spread=0.5),
    "heavy tails, no keys": Users(tails=2),
    "heavy tails, users": replace(_SOME, tails=2, spread=0.5),
    "50 cold first requests": Users(cold=50),
    "outages of 30 %, no keys": Users(outages=0.07),
    "outages of 30 %, users": replace(_SOME, outages=0.07),
    "half of all requests by one user": replace(_SOME, heavy=0.5, spread=0.5),
    **{
        f"{count} clients, {100 * share:g} % begin to fail by their own fault": Users(
            count=count, skew=0.5, faulty=share
        )
        for count in (1, 3, 10, 50)
        for share in ((1.0,) if count == 1 else (0.3, 1.0))
    },
}


def prove(trials: Trials) -> list[Claim]:
    """Return every promise, and print a table for each kind."""
    return [
        *_clients(trials),
        *_alike(_sticky(trials), "users", trials),
        *_alike(_NULLS, "null canary", trials),
        *_crowded_cells(trials),
        *_power(trials),
        *_distribution(trials),
        *_routing(trials),
        *_split_tests(trials),
        *_levels(trials),
        *_blind(trials),
    ]


def _sticky(trials: Trials) -> Mapping[str, Users]:
    crowds = [(count, skew) for count in (200, 2000, 20_000) for skew in (0.8, 1.1)]
    return {
        f"{count:,} users, Zipf {skew:g}, {name}": replace(users, count=count, skew=skew)
        for count, skew in (crowds[1:3] if trials.quick else crowds)
        for name, users in _KINDS.items()
    }


def _tell(name: str, result: Result, end: str = "rolled back") -> tuple[str, str, str]:
    return name, f"{100 * result.count(end) / len(result.ends):.1f} %", result.median(end)


def _clients(trials: Trials) -> Iterable[Claim]:
    """Try few clients with keys, with 10/50/100 % of the traffic.

    The steps need at least 300 and 1,000 requests. The guardrail is that of errors.
    """
    rows = []
    for count in _COUNTS[:: 2 if trials.quick else 1]:
        name = f"{count} client{'s' * (count > 1)}"
        null = trials.run(
            World(policy=CLIENTS, users=Users(count=count, skew=0.5, errors=0.005), looks=_EPOCHS)
        )
        yield trials.at_most(
            "few clients", f"{name}, alike: rolled back", null, "rolled back", 0.05
        )
        cells = [f"{100 * null.count('rolled back') / len(null.ends):.1f} %", null.quantile(0.5)]
        for share in (0.3, 1.0):
            users = Users(count=count, skew=0.5, errors=0.005, worse=200 * share)
            result = trials.run(World(policy=CLIENTS, users=users, looks=_EPOCHS))
            what = f"{name}, {100 * share:g} % of requests fail"
            yield trials.at_most("few clients", f"{what}: reaches 100 %", result, "finished", 0.0)
            yield trials.at_least(
                "few clients", f"{what}: rolled back", result, "rolled back", 0.99
            )
            cells.append(
                f"{result.count('finished')} / {result.quantile(0.5)} / {result.quantile(0.99)}"
            )
        rows.append((name, *cells))
    failing = "finished / median epoch / 99 %"
    head = ("users by Zipf's law, exponent .5", "alike: rolled back", "epochs to 100 %")
    table(
        "few clients, 10/50/100 %", (*head, f"30 % fail: {failing}", f"all fail: {failing}"), rows
    )


def _alike(worlds: Mapping[str, Users], kind: str, trials: Trials) -> Iterable[Claim]:
    rows = []
    for name, users in worlds.items():
        result = trials.run(World(policy=CANARY, users=users, looks=trials.looks))
        rows.append(_tell(name, result))
        yield trials.at_most(kind, f"{name}: rolled back", result, "rolled back", 0.05)
    table(f"{kind}: two versions alike, 10 % canary, a look every 200 requests", ("", *HEAD), rows)


def _crowded_cells(trials: Trials) -> Iterable[Claim]:
    """Try crowded cells, and rates that are hardly seen.

    Millions of users share 16,000 cells, each of which is one unit.
    """
    rows = []
    few = trials.with_trials(10 if trials.quick else 60)
    looks = 10 if trials.quick else 40
    crowd = Users(count=16_000, spread=0.2)
    for name, users, least in (
        ("alike", crowd, 0.0),
        ("errors 1 -> 1.2 %", replace(crowd, worse=1.2), 0.9),
        ("latency x 1.2", replace(crowd, times=1.2), 0.9),
    ):
        result = few.run(World(policy=CANARY, users=users, looks=looks, requests=50_000))
        rows.append(_tell(f"16,000 cells, 50,000 requests an epoch, {name}", result))
        if least:
            yield few.at_least(
                "crowds", f"16,000 cells, {name}: rolled back", result, "rolled back", least
            )
        else:
            yield few.at_most(
                "crowds", f"16,000 cells, {name}: rolled back", result, "rolled back", 0.05
            )
    for name, mine in (("1e-6 -> 1e-6", 1e-6), ("1e-6 -> 1e-4", 1e-4)):
        world = World(policy=SPLIT, rates=_fail(mine, 1e-6), looks=50, requests=1_000_000)
        result = trials.run(world)
        rows.append(_tell(f"a million requests an epoch, errors {name}", result))
        if mine > 1e-6:
            yield trials.at_least(
                "crowds", f"errors {name}: rolled back", result, "rolled back", 0.99
            )
        else:
            yield trials.at_most(
                "crowds", f"errors {name}: rolled back", result, "rolled back", 0.05
            )
    table("crowds, 10 % canary", ("", *HEAD), rows)


def _fail(mine: float, theirs: float) -> Rates:
    return lambda _: ((mine,), (theirs,))


def _power(trials: Trials) -> Iterable[Claim]:
    rows = []
    spread = replace(_SOME, spread=0.5)
    for name, users, least in (
        ("errors .1 -> 1 %, no keys", Users(errors=0.001, worse=10), 0.95),
        ("latency x 1.2, no keys", Users(times=1.2), 0.9),
        ("errors .1 -> 1 %, 2,000 users", replace(spread, errors=0.001, worse=10), 0.95),
        (
            "errors .1 -> 1 %, all by 2 % of 2,000 users",
            replace(spread, errors=0.001, worse=10, failing=0.02),
            0.0,
        ),
        ("errors 1 -> 30 %, 2,000 users", replace(spread, worse=30), 0.99),
        ("all requests fail, 2,000 users", replace(spread, worse=100), 0.99),
        ("latency x 1.2, 2,000 users", replace(spread, times=1.2), 0.0),
        ("latency x 1.5, 2,000 users", replace(spread, times=1.5), 0.8),
        ("latency x 2, 2,000 users", replace(spread, times=2.0), 0.99),
        (
            "latency x 1.5, half of all requests by one user",
            replace(spread, times=1.5, heavy=0.5),
            0.0,
        ),
        (
            "errors .1 -> 1 %, half of all requests by one user",
            replace(spread, errors=0.001, worse=10, heavy=0.5),
            0.0,
        ),
        ("latency x 1.5, 10 clients", replace(spread, count=10, times=1.5), 0.0),
    ):
        result = trials.run(World(policy=STEPS, users=users, looks=200))
        fixed = trials.run(World(policy=CANARY, users=users, looks=trials.looks))
        rows.append((*_tell(name, result), *_tell("", fixed)[1:]))
        if least:
            yield trials.at_least(
                "power", f"10/50/100 %: {name}: rolled back", result, "rolled back", least
            )
    head = ("", *HEAD, f"fixed 10 %, {trials.looks} epochs", "canary requests")
    table("a worse candidate, 10/50/100 %, a look every 200 requests", head, rows)


def _distribution(trials: Trials) -> Iterable[Claim]:
    """Try the guardrail `latency`, which compares the whole distribution."""
    rows = []
    for name, users in {**_sticky(trials), **_NULLS}.items():
        policy = replace(CANARY, guardrails=ANYWHERE)
        result = trials.run(World(policy=policy, users=users, looks=trials.looks))
        rows.append(_tell(name, result))
        yield trials.at_most(
            "whole distribution", f"{name}: rolled back", result, "rolled back", 0.05
        )
    table("guardrail latency: two versions alike, 10 % canary", ("", *HEAD), rows)
    compared = []
    for name, users, least in (
        ("80th to 90th percentile x 1.2, no keys", Users(between=1.2), 0.0),
        ("80th to 90th percentile x 1.5, no keys", Users(between=1.5), 0.95),
        (
            "80th to 90th percentile x 1.5, 2,000 users",
            replace(_SOME, spread=0.5, between=1.5),
            0.0,
        ),
        ("all x 1.2, no keys", Users(times=1.2), 0.9),
        ("all x 1.5, 2,000 users", replace(_SOME, spread=0.5, times=1.5), 0.8),
    ):
        result, other = (
            trials.run(World(policy=replace(STEPS, guardrails=rails), users=users, looks=200))
            for rails in (ANYWHERE, RAILS)
        )
        compared.append((*_tell(name, result), *_tell("", other)[1:]))
        if least:
            yield trials.at_least(
                "whole distribution", f"{name}: rolled back", result, "rolled back", least
            )
    table(
        "a slower candidate, 10/50/100 %",
        ("", *HEAD, "p50 and p99: rolled back", "requests"),
        compared,
    )


def _routing(trials: Trials) -> Iterable[Claim]:
    rows = []
    crowds = [(0, 0.0), (10, 0.5), (200, 1.1), (2000, 1.1), (20_000, 0.8), (20_000, 1.1)]
    for count, skew in crowds[2:4] if trials.quick else crowds:
        name = f"{count:,} users, Zipf {skew:g}" if count else "no keys"
        users = Users(count=count, skew=skew)
        right, wrong = (
            trials.run(World(policy=SPLIT, users=users, looks=trials.looks, routed=routed))
            for routed in (1.0, 2.0)
        )
        rows.append((name, _tell("", right, "paused")[1], _tell("", wrong, "paused")[1]))
        yield trials.at_most("split", f"{name}: 10 % asked and sent: paused", right, "paused", 0.01)
        if count != 10:
            yield trials.at_least(
                "split", f"{name}: 10 % asked, 20 % sent: paused", wrong, "paused", 0.9
            )
    table("sample ratio, by unit", ("", "10 % sent: paused", "20 % sent: paused"), rows)


def _split_tests(trials: Trials) -> Iterable[Claim]:
    rows = []
    looks = 20 if trials.quick else 75
    crowds = [
        (1000, (10.0, 90.0)),
        (5000, (1.0, 9.0)),
        (1000, (1.0, 9.0)),
        (300, (1.0, 9.0)),
        (30, (1.0, 9.0)),
    ]
    for count, beta in crowds[2:4] if trials.quick else crowds:
        name = f"{count:,} users, Beta({beta[0]:g}, {beta[1]:g})"
        cells = []
        for times in (1.0, 0.9, 1.2):
            users = Users(count=count, beta=beta, success=times)
            result = trials.run(World(policy=TEST, users=users, looks=looks, requests=400))
            worse, better = result.count("rolled back"), result.count("finished")
            share = 100 / len(result.ends)
            cells.append(f"{worse * share:.1f} / {better * share:.1f} %")
            if times == 1:
                yield trials.at_most(
                    "A/B", f"{name}, alike: decided", result, ("rolled back", "finished"), 0.05
                )
            elif times < 1:
                yield trials.at_most(
                    "A/B", f"{name}, 10 % worse: called better", result, "finished", 0.01
                )
        rows.append((name, *cells))
    for count in (3, 10):
        result = trials.run(
            World(policy=TEST, users=Users(count=count, beta=(1.0, 9.0)), looks=looks, requests=400)
        )
        yield trials.at_most(
            "A/B", f"{count} users: decided", result, ("rolled back", "finished"), 0.0
        )
    head = (
        f"{400 * looks:,} outcomes: called worse / better",
        "alike",
        "success x .9",
        "success x 1.2",
    )
    table("A/B, users with individual success rates", head, rows)


def _levels(trials: Trials) -> Iterable[Claim]:
    """Try how often a service level of 2 % is shown within 150 epochs.

    The candidate gets 20 requests in each epoch.
    """
    rows = []
    for name, users in (
        ("no keys", Users()),
        ("no keys, bursts of 3", Users(bunch=3)),
        ("no keys, bursts of 10", Users(bunch=10)),
        ("2,000 users, bursts of 10", replace(_SOME, bunch=10)),
        ("3 users", Users(count=3, skew=0.5)),
    ):
        cells = []
        for errors in (0.02, 0.04, 0.002):
            result = trials.run(
                World(policy=_level(), users=replace(users, errors=errors), looks=150)
            )
            cells.append(_tell("", result, "finished")[1])
            if errors == 0.02:
                yield trials.at_most(
                    "service level", f"{name}: 2 % shown to be below 2 %", result, "finished", 0.05
                )
        rows.append((name, *cells))
    for often, share in ((1 / 15, 0.3), (1 / 30, 0.6), (1 / 50, 1.0)):
        users = Users(errors=0.0, outages=often, outage=share)
        result = trials.run(World(policy=_level(), users=users, looks=150))
        name = (
            f"no errors, but an outage of {100 * share:g} % in one of {1 / often:.0f} epochs (2 "
            "% in all)"
        )
        rows.append((name, _tell("", result, "finished")[1], "", ""))
        if share == 0.3:
            yield trials.at_most("service level", f"{name}: shown", result, "finished", 0.05)
    table(
        "service level of 2 % shown",
        ("errors", "at the limit", "twice the limit", "a tenth of it"),
        rows,
    )


def _level() -> RolloutPolicy:
    return replace(
        STEPS, steps=(0.1, 1.0), guardrails=(), slo=ServiceLevel(error_rate=0.02), min_requests=(1,)
    )


def _blind(trials: Trials) -> Iterable[Claim]:
    """Try a source that counts neither units nor users.

    It is judged by the variation between intervals.
    """
    rows = []
    worlds = {
        "independent": Users(),
        **{f"bunches of {n}": Users(count=20_000, bunch=n) for n in (3, 5, 10)},
        **{f"retries {r:g}": Users(count=20_000, retried=r) for r in (0.5, 0.8)},
        "2,000 sticky users, payload sd .5": replace(_SOME, spread=0.5),
        "errors .1 -> 1 %": Users(errors=0.001, worse=10),
    }
    for name, users in worlds.items():
        result = trials.run(World(policy=CANARY, users=users, looks=trials.looks, blind=True))
        rows.append(_tell(name, result))
        if name.startswith(("independent", "bunches")):
            yield trials.at_most(
                "without units", f"{name}: rolled back", result, "rolled back", 0.05
            )
    table("a source that counts no units, 10 % canary", ("", *HEAD), rows)
