"""Does the candidate take longer to start? Judged once, before any traffic, on loads of either version in turn.

A test that is made once needs no e-process: its p-value is below 1 / L with a chance of at most 1 / L, as evidence that
may be looked at at any time reaches L. So it takes its part of the family error like any other guardrail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnx_ops.domain.rollout_judged import Guard
from onnx_ops.domain.rollout_policy import COLD_STARTS, SLOWER, Guardrail


def cold_start(rail: Guardrail, candidate_s: Sequence[float], stable_s: Sequence[float], limit: float) -> Guard:
    """Return the guardrail `cold_start`.

    Args:
        rail: held against a fixed `max` if it has one, else against the stable version.
        candidate_s: seconds that each load of the candidate took until it could answer.
        stable_s: the same of the stable version, in turn on the same machine.
        limit: log10 of the evidence at which it fires.
    """
    seen = min(len(candidate_s), len(stable_s))
    if seen < COLD_STARTS:
        p, told = 1.0, "not measured yet"
    elif rail.max is not None:
        p = _often_above(candidate_s, rail.max)
        told = f"candidate {_range(candidate_s)}, at most {rail.max:g} s"
    else:
        allowed = SLOWER if rail.slower is None else rail.slower
        p = _longer([each / (1 + allowed) for each in candidate_s], stable_s)
        told = f"candidate {_range(candidate_s)}, stable {_range(stable_s)}, {100 * allowed:g} % slower is allowed"
    return Guard(
        name=rail.name,
        evidence=-math.log10(p),
        limit=limit,
        holds=rail.on_violation == "hold",
        seen=seen,
        needed=COLD_STARTS,
        rule=told,
    )


def _longer(candidate_s: Sequence[float], stable_s: Sequence[float]) -> float:
    """Exact p-value of the rank sum (Wilcoxon 1945, Biometrics Bulletin 1:80-83; Mann and Whitney 1947)."""
    from scipy.stats import mannwhitneyu  # takes long to import, and few policies need it

    return float(mannwhitneyu(candidate_s, stable_s, alternative="greater", method="exact").pvalue)


def _often_above(candidate_s: Sequence[float], max_s: float) -> float:
    """Exact p-value of the sign test of "half of the loads take no longer"."""
    above, n = sum(each > max_s for each in candidate_s), len(candidate_s)
    return float(sum(math.comb(n, k) for k in range(above, n + 1)) / 2**n)


def _range(loads_s: Sequence[float]) -> str:
    return f"{min(loads_s):.3g}-{max(loads_s):.3g} s"
