"""Findings about the structure of a variant, as texts.

The findings are the recipe, trees, opsets, operators, activations, int8 coverage and advice. The
limits of the source are listed too.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx_ops.domain.evidence import ActivationMeasurement, Advice, Evidence, Int8Coverage
from onnx_ops.reporting.formatting import format_figure, number

_NAN = {
    "refused": "rejected by the source: an endpoint must reject them too",
    "answered": "answered by the source with numbers",
    "passed on": "answered by the source with NaN",
}
_CLIPPED = 1e6
_NAMED = 5


def structure_entries(evidence: Evidence) -> dict[str, str]:
    """Return the findings by name; only checks that were made have an entry."""
    entries: dict[str, str] = {}
    if (trees := evidence.trees) is not None:
        changed = f"{trees.changed} differ" if trees.changed else "all the same"
        counted = f"{trees.trees} trees, {trees.splits} splits, {trees.leaves} leaves: {changed}"
        entries["trees"] = "; ".join([counted, *trees.differences])
    entries |= {
        "recipe": "; ".join(evidence.recipe),
        "opsets": ", ".join(
            f"{domain or 'ai.onnx'} {version}" for domain, version in evidence.opsets.items()
        ),
        "operators": ", ".join(f"{name} {count}" for name, count in evidence.operators.items()),
        "int8": "; ".join(coverage_lines(evidence.coverage)),
        "advice": "; ".join(advice_lines(evidence.advice)),
        "activations": "; ".join(map(_describe_activation, evidence.activations)),
    }
    if (source := evidence.source) is not None:
        entries["NaN inputs"] = _NAN.get(source.nan, "")
        refused = (f"{name} ({why})" for name, why in sorted(source.refused.items()))
        entries["inputs that the source refuses"] = ", ".join(refused)
    return {name: text for name, text in entries.items() if text}


def _describe_activation(measured: ActivationMeasurement) -> str:
    away = (
        ""
        if measured.departure is None
        else f", distance from the float export {_times(measured.departure)}"
    )
    saturated = format_figure(measured.saturated, "1")
    return (
        f"{measured.tensor}: largest rounding error {_times(measured.noise)}{away} (unit: "
        f"step/√12), {saturated} of values saturated"
    )


def coverage_lines(coverage: Int8Coverage | None) -> list[str]:
    """Return the int8 coverage, operators in float, and exclusions without effect."""
    if coverage is None or not (coverage.int8 or coverage.floats):
        return []
    lines = [coverage.summary]
    lines += [f"in float: {one.name} ({one.op_type}): {one.reason}" for one in coverage.floats]
    return lines + [f"excluded, but run in int8: {name}" for name in coverage.unheeded]


def advice_lines(advice: Sequence[Advice]) -> list[str]:
    """Return each finding with its first nodes and the setting that fixes it."""
    lines = []
    for one in advice:
        more = f" and {len(one.nodes) - _NAMED} more" if len(one.nodes) > _NAMED else ""
        nodes = f" ({', '.join(one.nodes[:_NAMED])}{more})" if one.nodes else ""
        lines.append(f"{one.finding}{nodes}; set: {one.setting}")
    return lines


def _times(value: float) -> str:
    return f"{number(value)}×" if value < _CLIPPED else ">1e6×"
