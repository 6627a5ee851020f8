"""Finds the node at which an export that fails parity first departs from its source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnx_ops.domain.evidence import Divergence, ParityMeasurement
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.target import Target
from onnx_ops.errors import OnnxOpsError
from onnx_ops.measure.parity import measure_group
from onnx_ops.measure.reference import ReferenceGroup
from onnx_ops.onnx_graph.inspect import info
from onnx_ops.onnx_graph.intermediate import ComputedValue, computed_values, expose
from onnx_ops.ports import Runtime, Tensors, Tracer
from onnx_ops.statistics.divergence import Departure, departed, first_departure, spread, telling_rows
from onnx_ops.statistics.probes import REAL

SHOWN = 64
"""Values that one run shows; a longer graph is searched coarsely first and then between two of them."""

LIMIT = ParityGate().noise_factor

Inside = Callable[[Tensors], Tracer | None]
"""Makes the tracer of the source, given samples to export it with; None if its exporter cannot look inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """An export that failed, the source's answers, and the measurement that failed worst."""

    runtime: Runtime
    target: Target
    model: Path
    reference: list[ReferenceGroup]
    worst: ParityMeasurement


def worst_of(measured: Sequence[ParityMeasurement]) -> ParityMeasurement | None:
    """The measurement farthest beyond the parity gate's usual limit, of inputs that callers can send.

    One with rows comes before one without.
    """
    bad = [m for m in measured if m.inside and departed(m, LIMIT)]
    return max(bad, key=lambda m: (m.rows > 0, bool(m.mismatch), m.ratio), default=None)


def locate(look: Look, inside: Inside) -> Divergence:
    """The first diverging node, or why none is named.

    The graph is run as it is written, without the runtime's optimizations, on the inputs where parity failed.
    Never raises for what goes wrong on the way: the parity gate has failed already, and this only explains it.
    """
    try:
        return _locate(look, inside)
    except (OnnxOpsError, ValueError) as error:
        return Divergence(note=str(error))


def _locate(look: Look, inside: Inside) -> Divergence:
    plain = replace(look.target, session=replace(look.target.session, graph_level="disabled"))
    group = next(g for g in look.reference if g.name == look.worst.group)
    (outputs,) = look.runtime.run(look.model, plain, (group.inputs,))
    if not any(departed(m, LIMIT) for m in measure_group(group, outputs)):
        return Divergence(note="as it is written the graph agrees with its source; the runtime's optimization departs")
    samples = next((g.inputs for g in look.reference if g.name == REAL), group.inputs)
    tracer = inside(samples)
    if tracer is None:
        return Divergence(note="the source shows no intermediate values")
    return _search(look, plain, tracer, _telling(look, group, outputs))


def _search(look: Look, plain: Target, tracer: Tracer, inputs: Tensors) -> Divergence:
    values = _up_to(look.worst.output, computed_values(look.model))
    copy = look.model.with_name(f"{look.model.stem}-inside.onnx")
    while True:
        chosen = spread([value.name for value in values], SHOWN)
        single, double = tracer(inputs, frozenset(chosen))
        shown = [name for name in chosen if name in single]
        expose(look.model, shown, copy)
        (answers,) = look.runtime.run(copy, plain, (inputs,))
        found = first_departure(shown, _arrays(answers), single, double)
        if found is None:
            return Divergence(note="no value that source and export share departs")
        closer = _between(values, shown, found)
        if len(chosen) == len(values) or len(closer) == len(values):
            return _told(found, values)
        values = closer


def _up_to(output: str, values: Sequence[ComputedValue]) -> list[ComputedValue]:
    """What comes after the output that departs has no part in it."""
    names = [value.name for value in values]
    return list(values[: names.index(output) + 1]) if output in names else list(values)


def _between(values: list[ComputedValue], shown: list[str], found: Departure) -> list[ComputedValue]:
    """The values after the last one shown that agreed, up to the one that departs."""
    names = [value.name for value in values]
    position = shown.index(found.value)
    start = names.index(shown[position - 1]) + 1 if position else 0
    return values[start : names.index(found.value) + 1]


def _told(found: Departure, values: list[ComputedValue]) -> Divergence:
    value = next(v for v in values if v.name == found.value)
    return Divergence(node=value.node, op_type=value.op_type, scope=value.scope, ratio=found.ratio)


def _telling(look: Look, group: ReferenceGroup, outputs: Any) -> Tensors:
    """Few rows are enough, and keep the values of a large model within memory; a fixed batch is asked whole."""
    if any(isinstance(spec.shape[0], int) for spec in info(look.model).inputs if spec.shape):
        return group.inputs
    reference = (group.double or group.single or {}).get(look.worst.output)
    if reference is None or look.worst.output not in outputs:
        return group.inputs
    chosen = telling_rows(outputs[look.worst.output], reference)
    return {name: array[chosen] for name, array in group.inputs.items()}


def _arrays(answers: Any) -> dict[str, Any]:
    """Without sequences and maps, which a graph may hold inside."""
    return {name: value for name, value in answers.items() if hasattr(value, "dtype")}
