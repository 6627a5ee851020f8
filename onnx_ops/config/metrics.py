"""What must hold within a metric gate, and between it and the data set that is scored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from onnx_ops.config.document import Finding, Loc
from onnx_ops.config.draft import Draft
from onnx_ops.config.functions import function_problem
from onnx_ops.config.words import listing
from onnx_ops.domain.gate import METRICS, MetricGate

_LIMITS: Mapping[bool, tuple[str, ...]] = {True: ("max_drop", "min"), False: ("max_increase", "max")}
"""By whether higher is better."""

_OPTIONS = ("k", "average", "positive", "ignore")


def metric_gates(draft: Draft) -> Iterator[tuple[Loc, MetricGate]]:
    return ((loc, gate) for loc, gate in draft.gates if isinstance(gate, MetricGate))


def metric_findings(draft: Draft) -> Iterator[Finding]:
    for loc, gate in metric_gates(draft):
        yield from _identity(loc, gate)
        yield from _options(loc, gate)
        yield from _limits(loc, gate)


def function_findings(draft: Draft, root: Path) -> Iterator[Finding]:
    """Own metrics that are not there."""
    for loc, gate in metric_gates(draft):
        if gate.use and (problem := function_problem(gate.use, root)):
            yield Finding(loc=(*loc, "use"), message=problem)


def label_findings(draft: Draft) -> Iterator[Finding]:
    """Metrics that need labels, where the scored set has none."""
    scored = draft.data.get(draft.validate.samples.data) if draft.validate else None
    if not draft.validate or scored is None or scored.label is not None:
        return
    needing = [loc for loc, gate in metric_gates(draft) if not gate.definition().label_free]
    if needing:
        message = f"the metric gate needs labels, but data set '{draft.validate.samples.data}' names no 'label'"
        yield Finding(loc=needing[0], message=message)


def _identity(loc: Loc, gate: MetricGate) -> Iterator[Finding]:
    if gate.use and gate.name is not None:
        yield Finding(loc=(*loc, "use"), message="'name' and 'use' exclude each other; keep one", on_key=True)
    if gate.use and gate.higher_is_better is None:
        yield Finding(loc=loc, message="an own metric must say 'higher_is_better: true' or 'false'")
    if not gate.use and gate.higher_is_better is not None:
        message = f"only an own metric ('use') says it; {gate.definition().name} is known"
        yield Finding(loc=(*loc, "higher_is_better"), message=message, on_key=True)


def _options(loc: Loc, gate: MetricGate) -> Iterator[Finding]:
    name = gate.definition().name
    known = METRICS[name].options if name is not None else frozenset()
    for option in _OPTIONS:
        if getattr(gate, option) is not None and option not in known:
            takes = f"; it takes {listing(sorted(known))}" if known else ""
            message = f"{name or 'an own metric'} takes no '{option}'{takes}"
            yield Finding(loc=(*loc, option), message=message, on_key=True)
    if gate.positive is not None and gate.average not in (None, "binary"):
        message = f"'positive' is for average: binary, not {gate.average}"
        yield Finding(loc=(*loc, "positive"), message=message, on_key=True)


def _limits(loc: Loc, gate: MetricGate) -> Iterator[Finding]:
    definition = gate.definition()
    better = gate.higher_is_better if definition.name is None else definition.higher_is_better
    if better is None:
        return
    fitting, others = _LIMITS[better], _LIMITS[not better]
    told = definition.name or "an own metric"
    for key in others:
        if getattr(gate, key) is not None:
            direction = "higher" if better else "lower"
            message = f"of {told}, {direction} is better: limit it by {listing(fitting)}"
            yield Finding(loc=(*loc, key), message=message, on_key=True)
    if all(getattr(gate, key) is None for key in (*fitting, *others)):
        yield Finding(loc=loc, message="a metric gate needs " + " or ".join(f"'{key}'" for key in fitting))
    for key in ("max_drop", "min"):
        share = getattr(gate, key)
        if share is not None and share > 1 and better and definition.name is not None:
            yield Finding(loc=(*loc, key), message=f"{told} is never more than 100%")
