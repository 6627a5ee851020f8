"""Asks a model on groups of inputs, of which it may refuse some."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.statistics.probes import REAL

Answers = Mapping[str, tuple[Tensors, ...] | MeasurementError]
"""The answers to each run of a group, or why the model refuses the group."""


def answers_of(runtime: Runtime, target: Target, model: Path, groups: Mapping[str, tuple[Tensors, ...]]) -> Answers:
    """The model's answers by group, in one session if it takes them all.

    Args:
        runtime: runs it.
        target: as on which.
        model: the file.
        groups: runs by group.

    Raises:
        MeasurementError: it does not run on plain rows, which is refusing to run at all.
    """
    try:
        answers = iter(runtime.run(model, target, tuple(feed for runs in groups.values() for feed in runs)))
        return {name: tuple(next(answers) for _ in runs) for name, runs in groups.items()}
    except MeasurementError:
        pass
    found: dict[str, tuple[Tensors, ...] | MeasurementError] = {}
    for name in sorted(groups, key=lambda group: group != REAL):  # a model that does not run at all is told at once
        try:
            found[name] = runtime.run(model, target, groups[name])
        except MeasurementError as error:
            if name == REAL:
                raise
            found[name] = error
    return found


def refusal(error: MeasurementError) -> str:
    """What ONNX Runtime says at the end of a long line."""
    return (error.why or error.what).rpartition("Status Message: ")[2]
