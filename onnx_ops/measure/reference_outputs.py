"""Reference outputs: the source model's answers to every group of inputs that its export takes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.evidence import NanPolicy, SourceLimits
from onnx_ops.domain.pipeline import SOURCE_TIME_S, InputValues
from onnx_ops.errors import UserError, quoted
from onnx_ops.measure.files import load_arrays, pack_arrays, slice_rows
from onnx_ops.onnx_graph.compatibility import aborts_without_rows
from onnx_ops.onnx_graph.input_bounds import index_bounds
from onnx_ops.onnx_graph.model_info import info
from onnx_ops.onnx_graph.tree_ensembles import has_trees, split_probes
from onnx_ops.ports import Exporter, Store, Tensors
from onnx_ops.ports.data import Array
from onnx_ops.statistics.probes import (
    REAL,
    Axes,
    ProbeGroup,
    learn_domains,
    make_batch_inputs,
    make_probe_groups,
    make_sized_inputs,
    take_rows,
)
from onnx_ops.statistics.tree_parity import COPIES, compute_envelope, jitter_rows, join_envelopes

MISSING = "missing"
SPLITS = "splits"
"""Group of inputs close to the splits of a tree, but not so close that rounding could cross one."""

_AGAIN: Mapping[Literal["float32", "float64"], float] = {"float32": 1e-4, "float64": 1e-9}
"""How far two answers to the same rows may lie apart, relative to the largest: threads add up in any order."""

_OTHERWISE = 0.01
"""Share of whole numbers and texts that may differ: where two classes are equally likely, rounding decides."""

_FEW, _SOME = 2, 32
"""Rows of two short questions that tell how slow a source is."""

_TIMES = 3

_ROWS_OF_SLOW = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Rows of each group that a slow source may be asked."""

_JITTER_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceGroup:
    """Inputs and the source's outputs on them, by ONNX names; a precision is None if the source has none.

    `bounds` are those of a source that jumps, as `statistics.jitter.envelope` gives them; None for any other. `inside`
    says whether callers can send such inputs.
    """

    name: str
    inputs: Tensors
    single: Tensors | None
    double: Tensors | None
    bounds: Tensors | None = None
    inside: bool = True

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs that the source answers."""
        return tuple(self.double or self.single or {})


_PARTS = ("input", "float32", "float64", "bounds")
_INSIDE = "inside"


def put_reference(store: Store, groups: list[ReferenceGroup]) -> Digest:
    import numpy as np

    arrays: dict[str, Any] = {}
    for group in groups:
        for part, tensors in zip(_PARTS, (group.inputs, group.single, group.double, group.bounds), strict=True):
            arrays |= {f"{group.name}|{part}|{name}": array for name, array in (tensors or {}).items()}
        arrays[f"{group.name}|{_INSIDE}|"] = np.array(group.inside)
    return store.put_bytes(pack_arrays(arrays))


def get_reference(store: Store, digest: Digest) -> list[ReferenceGroup]:
    """The groups in the order of the archive, which is not that in which they were asked."""
    parts: dict[str, dict[str, dict[str, Any]]] = {}
    for name, array in load_arrays(store, digest).items():
        group, part, tensor = name.split("|", 2)
        parts.setdefault(group, {}).setdefault(part, {})[tensor] = array
    return [
        ReferenceGroup(
            name=name,
            inputs=p["input"],
            single=p.get("float32"),
            double=p.get("float64"),
            bounds=p.get("bounds"),
            inside=bool(p[_INSIDE][""]),
        )
        for name, p in parts.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceOutputs:
    """The source's answers by group of inputs, and its limits."""

    groups: list[ReferenceGroup]
    limits: SourceLimits


@dataclass(frozen=True, slots=True)
class _Source:
    exporter: Exporter
    model: object
    jumps: bool

    def answers(self, tensors: Tensors) -> tuple[Tensors | None, Tensors | None]:
        """In float32 and float64. Raises ValueError if the source refuses the inputs."""
        single = self.exporter.reference(self.model, tensors, "float32")
        return single, self.exporter.reference(self.model, tensors, "float64")

    def group(self, name: str, tensors: Tensors) -> ReferenceGroup:
        """Raises ValueError if the source refuses the inputs."""
        single, double = self.answers(tensors)
        bounds = None
        if self.jumps and name != SPLITS and len(next(iter(tensors.values()))):
            bounds = self._bounds(tensors, [answer for answer in (double, single) if answer is not None])
        return ReferenceGroup(name=name, inputs=tensors, single=single, double=double, bounds=bounds)

    def changes(self, asked: ReferenceGroup) -> str:
        """How the answers to the same rows differ when they are asked again; empty if they do not."""
        precision: Literal["float32", "float64"] = "float64" if asked.double else "float32"
        first = asked.double or asked.single or {}
        again = self.exporter.reference(self.model, asked.inputs, precision) or {}
        differ = (_difference(name, first[name], again[name], _AGAIN[precision]) for name in first)
        return next(filter(None, differ), "")

    def _bounds(self, tensors: Tensors, known: list[Tensors]) -> Tensors | None:
        """What the source answers to the rows as they are and jittered, a part of the rows at a time."""
        count = len(next(iter(tensors.values())))
        row_bytes = sum(array.nbytes for array in tensors.values()) // count
        step = max(1, _JITTER_BYTES // max(1, COPIES * row_bytes))
        parts = []
        for start in range(0, count, step):
            chosen = slice_rows(tensors, start, start + step)
            many = self.exporter.reference(self.model, jitter_rows(chosen, seed=start), "float64")
            if many is None:
                return None
            size = len(next(iter(chosen.values())))
            answers = [slice_rows(many, copy * size, (copy + 1) * size) for copy in range(COPIES)]
            parts.append(compute_envelope([*(slice_rows(answer, start, start + step) for answer in known), *answers]))
        return join_envelopes(parts)


def collect_reference_outputs(
    exporter: Exporter,
    model: object,
    path: Path,
    samples: Tensors,
    declared: Mapping[str, InputValues] | None = None,
    *,
    seconds: float = SOURCE_TIME_S,
) -> ReferenceOutputs:
    """The source's answers wherever it has some; what it refuses has nothing to be compared with, and is noted.

    Args:
        exporter: of the model's framework.
        model: the source.
        path: its export, which says what inputs there may be.
        samples: real inputs by ONNX name.
        declared: what callers send, where the pipeline says it.
        seconds: about how long the source may take; a slow one is asked fewer rows of each group.

    Raises:
        UserError: it refuses the real samples, or answers them differently each time.
    """
    source = _Source(exporter, model, has_trees(path))
    asked = build_probes(path, samples, declared)
    total = len(next(iter(samples.values())))
    most = None if info(path).fixed_batch else _affordable(source, asked, seconds)
    groups: list[ReferenceGroup] = []
    refused: dict[str, str] = {}
    for name, probe in asked.items():
        tensors = probe.inputs if most is None else _evenly(probe.inputs, most)
        try:
            answered = replace(source.group(name, tensors), inside=probe.inside)
        except ValueError as error:
            if name == REAL:
                raise _refuses_samples(error) from error
            refused[name] = quoted(error)
            continue
        if name == REAL and (difference := source.changes(answered)):
            raise UserError(
                "the source model answers the same rows differently each time",
                where="train",
                why=difference,
                remedy="Switch off dropout, sampling and noise where it answers: only one function can be exported.",
            )
        if answered.single is not None or answered.double is not None:
            groups.append(answered)
    reduced = most is not None and most < total
    limits = SourceLimits(
        nan=_nan_policy(groups, refused),
        refused=refused,
        rows=most if reduced and most else 0,
        samples=total if reduced else 0,
    )
    return ReferenceOutputs(groups=groups, limits=limits)


def _affordable(source: _Source, probes: Mapping[str, ProbeGroup], seconds: float) -> int | None:
    """How many rows of each group the source can be asked in the time; None if all.

    Two short questions tell what a call and what a row costs; where that seems too much they are asked again, since
    another process may have been in the way.
    """
    real = probes[REAL].inputs
    sizes = [len(next(iter(probe.inputs.values()))) for probe in probes.values()]
    few, some = (slice_rows(real, 0, min(size, sizes[0])) for size in (_FEW, _SOME))
    copies = COPIES / 2 if source.jumps else 0  # these are asked in float64 only
    affordable: list[int] = []
    try:
        source.answers(few)  # the first call pays for what is made once
        per_call = longer = math.inf
        for _ in range(_TIMES):
            per_call = min(per_call, _seconds_of(source, few))
            longer = min(longer, _seconds_of(source, some))
            per_row = max(0.0, longer - per_call) / max(1, _SOME - _FEW)
            affordable = [
                most
                for most in (*_ROWS_OF_SLOW, max(sizes))
                if len(sizes) * per_call * (2 if copies else 1)
                + per_row * sum(min(size, most) for size in sizes) * (1 + copies)
                <= seconds
            ]
            if affordable and affordable[-1] == max(sizes):
                return None
    except ValueError as error:
        raise _refuses_samples(error) from error
    return max(affordable, default=min(_ROWS_OF_SLOW))


def _seconds_of(source: _Source, tensors: Tensors) -> float:
    begun = time.perf_counter()
    source.answers(tensors)
    return time.perf_counter() - begun


def _refuses_samples(error: ValueError) -> UserError:
    return UserError(
        "the source model refuses the samples",
        where="validate.samples",
        why=quoted(error),
        remedy="Validate with rows that it answers.",
    )


def _difference(name: str, first: Array, again: Array, tolerance: float) -> str:
    if first.shape != again.shape:
        return f"output {name!r} has the shape {first.shape}, then {again.shape}"
    if first.dtype.kind != "f":
        share = np.mean(first != again) if first.size else 0.0
        return f"{share:.3g} of output {name!r} differ" if share > _OTHERWISE else ""
    if not np.array_equal(np.isfinite(first), np.isfinite(again)):
        return f"output {name!r} is finite once and not the other time"
    both = np.nan_to_num(np.stack([first, again]).astype(np.float64), posinf=0, neginf=0)
    apart = np.ptp(both, axis=0).max(initial=0)
    return f"output {name!r} differs by up to {apart:.3g}" if apart > tolerance * np.abs(both).max(initial=0) else ""


def build_probes(
    path: Path, samples: Tensors, declared: Mapping[str, InputValues] | None = None
) -> dict[str, ProbeGroup]:
    """Groups of inputs that the export takes, the real samples first: at a fixed batch, whole ones only."""
    fixed = info(path).fixed_batch
    try:
        domains = learn_domains(samples, declared, index_bounds(path))
    except ValueError as error:
        raise UserError(str(error), where="inputs", remedy="Declare values of the input's own type.") from error
    found = make_probe_groups(samples, domains, empty=not fixed and not aborts_without_rows(path))
    if (splits := split_probes(path, samples)) is not None:
        found[SPLITS] = ProbeGroup(inputs=splits)
    found |= {
        name: ProbeGroup(inputs=made) for name, made in make_sized_inputs(samples, _free_axes(path, samples)).items()
    }
    if fixed:
        return {name: replace(probe, inputs=take_rows(probe.inputs, fixed)) for name, probe in found.items()}
    return found | {name: ProbeGroup(inputs=made) for name, made in make_batch_inputs(samples).items()}


def _evenly(tensors: Tensors, most: int) -> Tensors:
    count = len(next(iter(tensors.values())))
    chosen = np.unique(np.linspace(0, count - 1, min(most, count)).astype(np.intp))
    return {name: array[chosen] for name, array in tensors.items()}


def _free_axes(path: Path, samples: Tensors) -> Axes:
    """Where the export's named dimensions stand; the batch, and dimensions without a name, are not among them."""
    specs = [spec for spec in info(path).inputs if spec.name in samples]
    batch = {spec.shape[0] for spec in specs if spec.shape}
    found: dict[str, list[tuple[str, int]]] = {}
    for name, axis, symbol in _symbols((spec.name, spec.shape) for spec in specs):
        if symbol not in batch and axis < samples[name].ndim:
            found.setdefault(symbol, []).append((name, axis))
    return found


def _symbols(shapes: Iterator[tuple[str, tuple[int | str, ...]]]) -> Iterator[tuple[str, int, str]]:
    for name, shape in shapes:
        for axis, symbol in enumerate(shape[1:], start=1):
            if isinstance(symbol, str) and symbol != "?":
                yield name, axis, symbol


def _nan_policy(groups: list[ReferenceGroup], refused: Mapping[str, str]) -> NanPolicy:
    if MISSING in refused:
        return "refused"
    answers = next((group.double or group.single for group in groups if group.name == MISSING), None)
    if answers is None:
        return ""
    floats = [array for array in answers.values() if array.dtype.kind == "f"]
    return "passed on" if any(np.isnan(array).any() for array in floats) else "answered"
