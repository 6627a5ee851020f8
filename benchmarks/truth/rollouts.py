"""What rollouts promise, compared with traffic whose truth is known."""

from __future__ import annotations

import itertools

import numpy as np
from scipy.special import ndtr, ndtri

from benchmarks.truth import rollout_worlds
from benchmarks.truth.claims import Claim, at_least, at_most, table
from benchmarks.truth.rollout_rivals import HEAD, draw, shown
from benchmarks.truth.rollout_trials import Trials
from benchmarks.truth.rollout_users import SLACK, SPREAD
from benchmarks.truth.rollout_world import Rates, Result, World
from benchmarks.truth.rollout_worlds import NEVER, RAILS
from onnx_ops.domain.rollout_policy import RolloutPolicy, ServiceLevel, SplitTest
from onnx_ops.statistics.rollout import evidence as ev
from onnx_ops.statistics.rollout import guardrails

FIXED = RolloutPolicy(steps=(0.1, 1.0), guardrails=RAILS, min_requests=(NEVER,), step_timeout=1e9)
FULL = RolloutPolicy(
    steps=(0.01, 0.1, 0.5, 1.0),
    guardrails=RAILS,
    min_requests=(300, 1000, 3000),
    slo=ServiceLevel(error_rate=0.05),
    step_timeout=1e9,
)
TWO_STEPS = RolloutPolicy(
    steps=(0.1, 0.5, 1.0), guardrails=RAILS, min_requests=(1000, 3000), step_timeout=1e9
)


def slow(times: float) -> tuple[float, float]:
    """Return the chances that a request exceeds a median and a 99th percentile.

    The latencies are longer than usual by the factor `times`.
    """
    shift = np.log(times) / SPREAD
    return float(1 - ndtr(-shift)), float(1 - ndtr(ndtri(0.99) - shift))


def steady(mine: float, theirs: float, times: float = 1.0) -> Rates:
    return lambda _: ((mine, *slow(times / SLACK)), (theirs, *slow(1.0)))


def drifting(low: float, high: float, looks: int) -> Rates:
    """Return rates with which errors and latencies of both versions rise together."""

    def rates(look: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        part = min(1.0, look / looks)
        errors, times = low + (high - low) * part, 1 + 0.3 * part
        return (errors, *slow(times / SLACK)), (errors, *slow(times))

    return rates


def prove(*, quick: bool, seed: int, trials: int | None = None) -> list[Claim]:
    """Return every promise, and print a table for each kind."""
    seeds = itertools.count(seed)
    many = Trials(count=trials or (100 if quick else 1000), seeds=seeds, quick=quick)
    return [
        *_nothing_changed(many),
        *_drift(many),
        *_whole_policy(many),
        *_routing(many),
        *_split_tests(many),
        *_percentiles(many),
        *_levels(many),
        *rollout_worlds.prove(many.with_trials(trials or (60 if quick else 300))),
    ]


def _row(name: str, result: Result, *others: str) -> tuple[str, ...]:
    n = len(result.ends)
    shares = (f"{100 * result.count(end) / n:.1f} %" for end in ("rolled back", "finished"))
    return (name, *shares, result.median("rolled back"), *others)


def _nothing_changed(trials: Trials) -> list[Claim]:
    claims, rows = [], []
    looks = trials.looks
    percents = np.full(looks, 10)
    for mine, theirs in (
        (0.001, 0.001),
        (0.005, 0.005),
        (0.01, 0.01),
        (0.02, 0.01),
        (0.03, 0.01),
        (0.01, 0.001),
    ):
        name = f"errors {100 * theirs:g} -> {100 * mine:g} %"
        result = trials.run(World(policy=FIXED, rates=steady(mine, theirs), looks=looks))
        drawn = draw([(mine, theirs)] * looks, percents, 200, trials.count, next(trials.seeds))
        rows.append(_row(name, result, *shown(drawn)))
        if mine == theirs:
            what = f"rolled back, {name}, looked at {looks} times"
            claims.append(trials.at_most("no change", what, result, "rolled back", 0.05))
    head = (
        "10 % canary, a look every 200 requests",
        "rolled back",
        "finished",
        "canary requests",
        *HEAD,
    )
    table("continuous looking", head, rows)
    return claims


def _drift(trials: Trials) -> list[Claim]:
    policy = RolloutPolicy(
        steps=(0.01, 0.1, 0.5, 1.0),
        guardrails=RAILS,
        min_requests=(300, 1000, 10_000),
        step_timeout=1e9,
    )
    looks = 60
    result = trials.run(
        World(policy=policy, rates=drifting(0.003, 0.02, looks), requests=1000, looks=looks)
    )
    shared = [drifting(0.003, 0.02, looks)(look)[0][0] for look in range(looks)]
    percents = np.repeat([1, 10, 50], (30, 10, 20))
    drawn = draw(
        [(rate, rate) for rate in shared], percents, 1000, trials.count, next(trials.seeds)
    )
    head = (
        "1/10/50 % ramp, errors of both .3 -> 2 %",
        "rolled back",
        "finished",
        "canary requests",
        *HEAD,
    )
    table("shared drift", head, [_row("both versions alike", result, *shown(drawn))])
    what = "rolled back while both versions get worse alike"
    return [trials.at_most("drift", what, result, "rolled back", 0.05)]


def _whole_policy(trials: Trials) -> list[Claim]:
    claims, rows = [], []
    cases: tuple[tuple[str, Rates, bool], ...] = (
        ("no change, .1 % errors", steady(0.001, 0.001), False),
        ("no change, .5 % errors", steady(0.005, 0.005), False),
        ("no change, 1 % errors", steady(0.01, 0.01), False),
        ("5 % slower", steady(0.005, 0.005, 1.05), False),
        ("8 % slower", steady(0.005, 0.005, 1.08), False),
        ("errors 1 -> 3 %", steady(0.03, 0.01), True),
        ("errors .1 -> 1 %", steady(0.01, 0.001), True),
        ("latency x 1.2", steady(0.005, 0.005, 1.2), True),
        ("30 % of requests fail", steady(0.3, 0.005), True),
        ("all requests fail", steady(1.0, 0.005), True),
    )
    for policy, shape, requests in ((FULL, "1/10/50/100 %", 1000), (TWO_STEPS, "10/50/100 %", 200)):
        for name, rates, bad in cases:
            result = trials.run(World(policy=policy, rates=rates, requests=requests, looks=200))
            rows.append(_row(f"{shape}: {name}", result))
            what = f"{shape}: {name}: rolled back"
            if bad:
                claims.append(trials.at_least("policy", what, result, "rolled back", 0.99))
            else:
                claims.append(trials.at_most("policy", what, result, "rolled back", 0.05))
                what = f"{shape}: {name}: reaches 100 %"
                claims.append(trials.at_least("policy", what, result, "finished", 0.95))
    table(
        "whole policies",
        ("a look every 1,000 and 200 requests", "rolled back", "finished", "canary requests"),
        rows,
    )
    return claims


def _routing(trials: Trials) -> list[Claim]:
    claims, rows = [], []
    policy = RolloutPolicy(
        steps=(0.1, 1.0), guardrails=RAILS[:1], min_requests=(NEVER,), step_timeout=1e9
    )
    for routed, name in ((1.0, "10 %"), (1.05, "10.5 %"), (2.0, "20 %"), (0.5, "5 %")):
        world = World(
            policy=policy, rates=lambda _: ((0.0,), (0.0,)), requests=400, looks=25, routed=routed
        )
        result = trials.run(world)
        rows.append(
            (f"10 % asked, {name} sent", f"{100 * result.count('paused') / trials.count:.1f} %")
        )
        what = f"10 % asked, {name} sent: paused"
        if routed <= 1.05 and routed >= 1:
            # The promised rate is 0.1 %, or one pause in the thousand trials of a full run.
            claims.append(trials.at_most("split", what, result, "paused", 0.001))
        else:
            claims.append(trials.at_least("split", what, result, "paused", 0.99))
    table("sample ratio", ("10,000 requests", "paused"), rows)
    return claims


def _split_tests(trials: Trials) -> list[Claim]:
    claims, rows = [], []
    looks = 20 if trials.quick else 75
    test = SplitTest(duration=1e9)
    policy = RolloutPolicy(ab_test=test, min_requests=(1,), step_timeout=1e9)
    for mine, theirs in ((0.1, 0.1), (0.5, 0.5), (0.12, 0.10), (0.10, 0.12)):
        world = World(
            policy=policy,
            rates=lambda _: ((), ()),
            requests=400,
            looks=looks,
            successes=(mine, theirs),
        )
        result = trials.run(world)
        name = f"{100 * theirs:g} -> {100 * mine:g} %"
        rows.append((*_row(name, result), result.median("finished")))
        wrong = (*["rolled back"] * (mine >= theirs), *["finished"] * (mine <= theirs))
        claims.append(trials.at_most("A/B", f"{name}: decided wrongly", result, wrong, 0.05))
        if mine != theirs and not trials.quick:
            right = "finished" if mine > theirs else "rolled back"
            claims.append(trials.at_least("A/B", f"{name}: decided rightly", result, right, 0.95))
    head = (
        f"success, {400 * looks:,} outcomes",
        "worse",
        "better",
        "outcomes to worse",
        "outcomes to better",
    )
    table("A/B at 50 %", head, rows)
    return claims


def _percentiles(trials: Trials) -> list[Claim]:
    """Try the weaker rule, which compares percentiles.

    There are 40 intervals with 100 requests to the candidate and 900 to the stable version.
    """
    claims, rows = [], []
    random = np.random.default_rng(next(trials.seeds))
    few = min(trials.count, 500)
    for times in (1.0, 1.05, 1.2, 1.5):
        mine = np.median(times * np.exp(SPREAD * random.standard_normal((few, 40, 100))), axis=2)
        theirs = np.median(np.exp(SPREAD * random.standard_normal((few, 40, 900))), axis=2)
        signs = (mine > guardrails.SLOWER_MARGIN * theirs).cumsum(axis=1)
        evidence = np.array(
            [
                [guardrails.compute_sign_evidence(int(s), look + 1) for look, s in enumerate(row)]
                for row in signs
            ]
        )
        fired = evidence >= np.log10(60)
        first = np.where(fired.any(axis=1), fired.argmax(axis=1) + 1, 0)
        text = f"{np.median(first[first > 0]):.0f}" if first.any() else "-"
        count = int(fired.any(axis=1).sum())
        rows.append((f"latency x {times:g}", f"{100 * count / few:.1f} %", text))
        if times <= 1.05:
            claims.append(at_most("percentiles", f"latency x {times:g}: fired", count, few, 0.05))
        else:
            claims.append(at_least("percentiles", f"latency x {times:g}: fired", count, few, 0.95))
    table("percentiles only (p50)", ("40 intervals", "fired", "intervals"), rows)
    return claims


def _levels(trials: Trials) -> list[Claim]:
    """Try a candidate that is exactly as bad as the service level.

    There is a look after every request.
    """
    claims, rows = [], []
    random = np.random.default_rng(next(trials.seeds))
    many = trials.count if trials.quick else 4 * trials.count
    for rate in (0.005, 0.02, 0.05):
        wrong = sum(_wrongly_certified(random, rate, count) for count in _parts(many, 250))
        rows.append(
            (
                f"below {100 * rate:g} %",
                f"{ev.compute_clean_requests(rate):,}",
                f"{100 * wrong / many:.1f} %",
            )
        )
        what = f"{100 * rate:g} % errors certified as below {100 * rate:g} %"
        claims.append(at_most("service level", what, wrong, many, 0.05))
    table(
        "service level",
        ("error rate", "clean requests to show it", "shown though it is at the limit"),
        rows,
    )
    return claims


def _wrongly_certified(random: np.random.Generator, rate: float, trials: int) -> int:
    errors = (random.random((trials, 3000)) < rate).cumsum(axis=1)
    return int(ev.is_rate_certified(errors, np.arange(1, 3001), rate).any(axis=1).sum())


def _parts(total: int, largest: int) -> list[int]:
    return [min(largest, total - done) for done in range(0, total, largest)]
