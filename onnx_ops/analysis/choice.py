"""Which variant a target gets. Imports no numbers library: a run with nothing to do asks it too."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnx_ops.domain.gate import Decision, Verdict, combine
from onnx_ops.domain.pipeline import EXPORT
from onnx_ops.domain.release import Choice


def choose(decisions: Sequence[Decision]) -> Choice:
    """The variant to serve on one target: the fastest that passes, but fp32 unless one beats it with confidence.

    Args:
        decisions: of all variants on that target, in the order of the pipeline file, which breaks ties.

    Raises:
        ValueError: there is no decision, or they are about several targets.
    """
    targets = {decision.target for decision in decisions}
    if len(targets) != 1:
        raise ValueError(f"a choice is made for one target, not for {sorted(targets)}")
    target = targets.pop()
    passing = [d for d in decisions if d.verdict is Verdict.PASS]
    if not passing:
        verdict = combine(d.verdict for d in decisions)
        return Choice(target=target, variant=None, verdict=verdict, reason=_blame(decisions))
    export = next((d for d in passing if d.variant == EXPORT), None)
    rivals = [d for d in passing if d.variant != EXPORT and (export is None or d.faster_than_export is True)]
    if not rivals:
        reason = f"{EXPORT} passes and no passing variant is faster with confidence"
        return Choice(target=target, variant=EXPORT, verdict=Verdict.PASS, reason=reason)
    best = min(rivals, key=lambda d: math.inf if d.latency_ratio is None else d.latency_ratio)
    return Choice(target=target, variant=best.variant, verdict=Verdict.PASS, reason=_praise(best, export))


def _blame(decisions: Sequence[Decision]) -> str:
    """Why no variant passes, the export first; variants that share a reason are named together."""
    shared: dict[tuple[Verdict, str], list[str]] = {}
    for decision in sorted(decisions, key=lambda d: d.variant != EXPORT):
        shared.setdefault((decision.verdict, decision.reason), []).append(decision.variant)
    return "; ".join(f"{', '.join(names)} {verdict.value}: {why}" for (verdict, why), names in shared.items())


def _praise(best: Decision, export: Decision | None) -> str:
    ratio = "" if best.latency_ratio is None else f", {best.latency_ratio:.3g}x the latency of {EXPORT}"
    return f"{best.variant} passes{ratio}" + ("" if export else f"; {EXPORT} does not pass")
