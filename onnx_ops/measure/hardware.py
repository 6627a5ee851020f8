"""Cross-hardware parity: the node at which a target departs from the CPU on which the export was proven."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from onnx_ops.domain.evidence import Divergence, ParityMeasurement
from onnx_ops.domain.target import Target
from onnx_ops.measure.divergence import Look, locate, worst_of
from onnx_ops.measure.reference import ReferenceGroup
from onnx_ops.onnx_graph.intermediate import expose
from onnx_ops.ports import Ports, Runtime, Tensors

REFERENCE_TARGET = Target(name="reference", description="One CPU thread, where every export is first compared.")


def departure(
    ports: Ports,
    runtime: Runtime,
    target: Target,
    model: Path,
    reference: list[ReferenceGroup],
    measured: Sequence[ParityMeasurement],
) -> Divergence | None:
    """Where a float model first computes otherwise on the target than on the reference CPU; None if it does not.

    Both run the same file on the same inputs, with intermediate values shown.

    Args:
        ports: bring the reference's runtime.
        runtime: of the target.
        target: where parity failed, if it did.
        model: a file in a folder that may be written to.
        reference: the source's answers by group of inputs.
        measured: parity on the target.
    """
    worst = worst_of(measured)
    if worst is None:
        return None
    proven = replace(REFERENCE_TARGET, custom_ops=target.custom_ops)
    plain = replace(proven, session=replace(proven.session, graph_level="disabled"))
    copy = model.with_name(f"{model.stem}-here.onnx")

    def tracer(inputs: Tensors, names: Collection[str]) -> tuple[Tensors, None]:
        expose(model, sorted(names), copy)
        (answers,) = ports.runtime(proven.runtime).run(copy, plain, (inputs,))
        return {name: value for name, value in answers.items() if hasattr(value, "dtype")}, None

    look = Look(runtime=runtime, target=target, model=model, reference=reference, worst=worst)
    return locate(look, lambda _: tracer)
