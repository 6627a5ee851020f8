"""Measure how often a release chooses a variant that is as bad as the limit.

There are six variants on three targets, whose true drop equals the limit exactly. Releases whose
variants lose nothing are simulated too, to count those that are refused.
"""

from __future__ import annotations

import numpy as np

from benchmarks.truth.claims import Claim, at_least, at_most, table
from benchmarks.truth.draws import make_generator
from benchmarks.truth.evidence import evidence
from onnx_ops.domain.decision import Decision, GateResult, Verdict
from onnx_ops.domain.evidence import PairedCounts
from onnx_ops.domain.gate import MetricGate
from onnx_ops.statistics.rules.metric import judge_metric
from onnx_ops.statistics.variants.choice import choose

LIMIT = 0.01
BOUND = 0.06
VARIANTS, TARGETS = 6, 3
GATE = MetricGate(max_drop=LIMIT)
SHARES = ((0.02, 0.01), (0.05, 0.04))
"""Shares of rows that a variant loses and wins, with a true drop at the limit."""
ROWS = (300, 1000, 3000, 10_000)


def prove(*, quick: bool, trials: int | None = None) -> list[Claim]:
    many = 60 if quick else trials or 1000
    claims, rows = [], []
    for n in ROWS:
        for lost, won in SHARES:
            for differing in (0.0, 0.0001):
                shares = [(lost, won)] * VARIANTS
                name = (
                    f"{n} rows, {100 * lost:g} % lost, {100 * won:g} % won, "
                    f"{100 * differing:g} % other by target"
                )
                found = np.array(
                    [_release(n, shares, differing, trial) for trial in range(many)]
                ).sum(axis=0)
                rows.append((name, *(f"{100 * count / many:.1f} %" for count in found[:2])))
                claims.append(
                    at_most("choice", f"a bad one chosen, {name}", int(found[0]), many, BOUND)
                )
    table(
        f"six variants, all at the limit, {many} releases each",
        ("", "a bad one chosen", "each judged alone"),
        rows,
    )
    rows = []
    for n in ROWS:
        found = np.array(
            [_release(n, [(0.01, 0.01)] * VARIANTS, 0.0001, trial) for trial in range(many)]
        ).sum(axis=0)
        good = many - found[3]
        rows.append(
            (
                f"{n} rows",
                *(f"{100 * count / many:.1f} %" for count in (good, many - found[4], found[2])),
            )
        )
        if n >= 1000:
            claims.append(
                at_most("choice", f"a good release refused, {n} rows", int(found[2]), many, 0.01)
            )
        if n >= 3000:
            claims.append(
                at_least("choice", f"a good release chosen, {n} rows", int(good), many, 0.95)
            )
    head = (
        "six variants that lose nothing",
        "a variant chosen on all targets",
        "each judged alone",
        "any FAIL",
    )
    table(f"good releases, {many} each", head, rows)
    return claims


def _release(n: int, shares: list[tuple[float, float]], differing: float, trial: int) -> list[bool]:
    """Return the outcomes of one release on all targets.

    The values are: whether a variant was chosen on any target, by this project and by judging each
    variant alone; whether there was a FAIL; whether a target has no chosen variant, in the same two
    ways.
    """
    random = make_generator(n, trial, round(1e4 * shares[0][0]), round(1e5 * differing))
    common = [random.multinomial(n, [lost, won, 1 - lost - won])[:2] for lost, won in shares]
    chosen, alone, failed = [], [], False
    for target in range(TARGETS):
        decisions = [_export(target)]
        for number, counts in enumerate(common):
            lost, won = (_other(random, int(count), n, differing) for count in counts)
            decisions.append(
                _decision(f"v{number}", target, n, lost, won, ratio=float(random.uniform(0.4, 0.9)))
            )
        chosen.append(choose(decisions).variant != "fp32")
        alone.append(any(d.verdict is Verdict.PASS for d in decisions[1:]))
        failed = failed or any(d.verdict is Verdict.FAIL for d in decisions)
    return [any(chosen), any(alone), failed, not all(chosen), not all(alone)]


def _other(random: np.random.Generator, count: int, n: int, share: float) -> int:
    """Return the count on a target whose arithmetic changes a few answers."""
    return max(0, count + int(random.binomial(n, share)) - int(random.binomial(n, share)))


def _export(target: int) -> Decision:
    """Return the decision on an export; at a first release it has no baseline."""
    passed = GateResult(gate="size", metric="", limit="", verdict=Verdict.PASS, reason="")
    return Decision(variant="fp32", target=str(target), results=(passed,))


def _decision(name: str, target: int, n: int, lost: int, won: int, ratio: float) -> Decision:
    counts = PairedCounts(
        metric="accuracy",
        against="fp32",
        n=n,
        both=n - lost - won,
        only_baseline=lost,
        only_candidate=won,
    )
    results = tuple(judge_metric(GATE, evidence(variant=name, metrics=(counts,))))
    return Decision(
        variant=name,
        target=str(target),
        results=results,
        faster_than_export=True,
        latency_ratio=ratio,
    )
