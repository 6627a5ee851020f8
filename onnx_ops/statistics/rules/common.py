"""Common parts of the rules: registry, baseline, empty results and formatting."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.evidence import EXPORT, Evidence
from onnx_ops.domain.gate import Gate


@functools.singledispatch
def judge_gate(gate: Gate, evidence: Evidence) -> Iterator[GateResult]:
    """Yield the results of a gate, from the rule that is registered for its class."""
    raise TypeError(f"no rule judges {type(gate).__name__}")


def get_baseline(evidence: Evidence) -> str:
    """Return the name of the baseline; empty for a first export."""
    return evidence.baseline or ("" if evidence.variant == EXPORT else EXPORT)


def name_baseline(baseline: str) -> str:
    """Return the name of a baseline for use in a sentence."""
    return "the champion" if baseline == "champion" else baseline


def make_unmeasured(gate: str, metric: str, limit: str, *, advisory: bool = False) -> GateResult:
    """Return an INCONCLUSIVE result for a missing measurement."""
    return GateResult(
        gate=gate,
        metric=metric,
        limit=limit,
        verdict=Verdict.INCONCLUSIVE,
        reason=f"{metric} was not measured" if metric else "not measured",
        advisory=advisory,
    )


def make_unlimited(gate: str, metric: str) -> GateResult:
    """Return an INCONCLUSIVE result for a gate without limits."""
    return GateResult(
        gate=gate,
        metric=metric,
        limit="",
        verdict=Verdict.INCONCLUSIVE,
        reason="the gate sets no limit",
    )


def join_lines(text: str) -> str:
    """Return the text with each run of white space replaced by one space."""
    return " ".join(text.split())


def as_percent(fraction: float) -> str:
    """Format a fraction as a percentage."""
    return f"{100 * fraction:.4g}%"


def as_signed_percent(fraction: float) -> str:
    """Format a fraction as a percentage with a sign."""
    return f"{100 * fraction:+.3g}%" if fraction else "0%"


def as_ms(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{1e3 * seconds:.4g} ms"


def as_size(size: int) -> str:
    """Format bytes as MB, kB or B."""
    return (
        f"{size / 1e6:.4g} MB"
        if size >= 1e6
        else f"{size / 1e3:.4g} kB"
        if size >= 1e3
        else f"{size} B"
    )
