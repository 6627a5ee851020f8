"""Derive: one variant of one ONNX file, for the targets that it is to run on, without a pipeline."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnx_ops.domain.artifact import MODEL_FILE
from onnx_ops.domain.pipeline import Quantize
from onnx_ops.domain.recipes import Arithmetic, arithmetic
from onnx_ops.domain.target import Target
from onnx_ops.errors import UserError
from onnx_ops.measure.coverage import Examined, examine
from onnx_ops.onnx_graph.check import ceiling, full_check
from onnx_ops.onnx_graph.files import parse, refuse_ort, tensors
from onnx_ops.onnx_graph.inspect import info
from onnx_ops.ports import ConfiguredOptimizer, OptimizeRequest, Ports, Tensors
from onnx_ops.scratch import Scratch
from onnx_ops.tools.effect import Effect, time_effect


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """What was made and how: sizes in bytes before and after, and what each target makes of it.

    `effects` on time are told for float variants, which are made for nothing else.
    """

    recipe: tuple[str, ...]
    sizes: tuple[int, int]
    examined: Mapping[str, Examined]
    effects: Mapping[str, Effect] = field(default_factory=dict)


def derive(
    ports: Ports,
    section: Quantize,
    source: Path,
    path: Path,
    *,
    targets: Sequence[Target],
    calibration: Tensors | None = None,
) -> Derived:
    """Write the variant to `path`, which must not exist; it appears whole or not at all.

    Args:
        ports: optimizers and runtimes.
        section: the recipe as a pipeline file would give it.
        source: the float model.
        path: the variant.
        targets: those that the recipe follows.
        calibration: rows by ONNX name, or None.

    Raises:
        UserError: a file is not valid or exists already, or the recipe does not fit.
        StageError: the library failed.
    """
    check_places(source, path)
    for target in targets:
        if reason := ceiling(info(source), target):
            remedy = "Export the model for this target's opset and IR version."
            raise UserError(reason.partition(": set export.")[0], where=source.name, remedy=remedy)
    machines = machines_of(ports, targets)
    with Scratch() as folder:
        made = folder / MODEL_FILE
        optimizer = ports.optimizer(section.method, section.env)
        quantized = optimizer.quantized
        if isinstance(optimizer, ConfiguredOptimizer):
            section = optimizer.settle(section, ports.root)
            quantized = optimizer.quantizes(section)
        recipe = optimizer.optimize(
            OptimizeRequest(section=section, source=source, path=made, calibration=calibration, machines=machines)
        )
        effects = {t.name: time_effect(ports.runtime(t.runtime), t, source, made) for t in targets if not quantized}
        found = delivered(ports, made, source, path, targets=targets, recipe=recipe, excluded=section.exclude)
        return replace(found, effects=effects)


def check_places(source: Path, path: Path) -> None:
    """Raises UserError if the source is no valid model, or the variant cannot be written to its path."""
    full_check(source)
    refuse_ort(source)
    for place in (path, _weights_of(path)):
        if place.exists():
            raise UserError("there is a file of that name", where=str(place), remedy="Remove it, or name another.")
    if not path.parent.is_dir():
        raise UserError("there is no such folder", where=str(path.parent))


def machines_of(ports: Ports, targets: Sequence[Target]) -> tuple[Arithmetic, ...]:
    """The kinds of machine of the targets, each once."""
    return tuple(dict.fromkeys(arithmetic(ports.runtime(t.runtime).fingerprint(t), t) for t in targets))


def delivered(
    ports: Ports,
    made: Path,
    source: Path,
    path: Path,
    *,
    targets: Sequence[Target],
    recipe: tuple[str, ...],
    excluded: tuple[str, ...],
) -> Derived:
    """Put a variant that was made to its path, weights too large for one file beside it, and examine it."""
    examined = {t.name: examine(ports.runtime(t.runtime), source, made, t, excluded) for t in targets}
    sizes = info(source).size_bytes, info(made).size_bytes
    if _weights_of(made).exists():
        model = parse(made)
        for entry in (entry for tensor in tensors(model) for entry in tensor.external_data if entry.key == "location"):
            entry.value = _weights_of(path).name
        _place(_weights_of(made), _weights_of(path))
        made.write_bytes(model.SerializeToString(deterministic=True))
    _place(made, path)
    return Derived(recipe=recipe, sizes=sizes, examined=examined)


def _weights_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


def _place(made: Path, path: Path) -> None:
    """Copy a file; it appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.copyfile(made, partial)
    os.replace(partial, path)
