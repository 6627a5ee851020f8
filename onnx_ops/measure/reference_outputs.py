"""Reference outputs: the source's answers to every group of inputs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.evidence import NanPolicy, SourceLimits
from onnx_ops.domain.execution import SOURCE_TIME_S
from onnx_ops.domain.input_values import InputValues
from onnx_ops.domain.row_axes import find_row_axes, find_sized_axes, move_axis_first
from onnx_ops.errors import UserError, quoted
from onnx_ops.measure.files import load_arrays, pack_arrays, slice_rows
from onnx_ops.measure.row_layout import RowLayout
from onnx_ops.onnx_graph.compatibility import is_unsafe_without_rows
from onnx_ops.onnx_graph.input_bounds import read_index_bounds
from onnx_ops.onnx_graph.model_info import read_encoded_inputs, read_model_info
from onnx_ops.onnx_graph.rounding_errors import list_ranked_outputs
from onnx_ops.onnx_graph.tree_ensembles import build_split_probes, has_trees
from onnx_ops.ports import Exporter, Store, Tensors
from onnx_ops.ports.data import Array
from onnx_ops.statistics.probes import (
    RANGE,
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
"""Name of the group of inputs close to the splits of a tree.

The distance is large enough that rounding to float32 cannot move an input across the split.
"""

Precision = Literal["float32", "float64"]

_AGAIN: Mapping[Literal["float32", "float64"], float] = {"float32": 1e-4, "float64": 1e-9}
"""Maximum relative difference of two answers of the source to the same rows.

Answers can differ, because threads add numbers in any order.
"""

_OTHERWISE = 0.01
"""Maximum share of whole numbers or texts that differ between two answers.

If two classes are equally likely, rounding decides which class the source returns.
"""

_FEW, _SOME = 2, 32
"""Numbers of rows of the two calls that measure how slow a source is."""

_TIMES = 3

_ROWS_OF_SLOW = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Possible numbers of rows per group for a slow source."""

_JITTER_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceGroup:
    """Inputs and the source's outputs for them, by ONNX names.

    `single` has outputs in float32 and `double` outputs in float64; None if the source has none.
    `bounds` is the envelope of outputs that jump (`statistics.tree_parity.compute_envelope`).
    `inside` is True if callers can send these inputs.
    """

    name: str
    inputs: Tensors
    single: Tensors | None
    double: Tensors | None
    bounds: Tensors | None = None
    inside: bool = True

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of the source's outputs."""
        return tuple(self.double or self.single or {})


def find_real_group(groups: Sequence[ReferenceGroup]) -> ReferenceGroup | None:
    """Return the group of real rows; None if it is not among the groups."""
    return next((group for group in groups if group.name == REAL), None)


_PARTS = ("input", "float32", "float64", "bounds")
_INSIDE = "inside"


def put_reference(store: Store, groups: list[ReferenceGroup]) -> Digest:
    """Store groups as one archive, and return its digest."""
    arrays: dict[str, Any] = {}
    for group in groups:
        for part, tensors in zip(
            _PARTS, (group.inputs, group.single, group.double, group.bounds), strict=True
        ):
            arrays |= {
                f"{group.name}|{part}|{name}": array for name, array in (tensors or {}).items()
            }
        arrays[f"{group.name}|{_INSIDE}|"] = np.array(group.inside)
    return store.put_bytes(pack_arrays(arrays))


def get_reference(store: Store, digest: Digest) -> list[ReferenceGroup]:
    """Return the stored groups, in the order in which they were stored."""
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
    """The source's answers for each group of inputs, and the limits of the source."""

    groups: list[ReferenceGroup]
    limits: SourceLimits


@dataclass(frozen=True, slots=True)
class _Source:
    """A loaded source model.

    `trees` is True for a tree model. `ranked` names outputs that depend on a ranking. `layout`
    describes where the model takes and returns rows.
    """

    exporter: Exporter
    model: object
    trees: bool
    ranked: frozenset[str] = frozenset()
    layout: RowLayout = field(default_factory=RowLayout)

    @property
    def jumps(self) -> bool:
        """Return whether the answers of the source jump at some inputs."""
        return self.trees or bool(self.ranked)

    def answer(self, tensors: Tensors, precision: Precision) -> Tensors | None:
        """Return the answers in one precision; None if the source does not support it.

        Raises:
            ValueError: the source rejects the inputs.
        """
        answers = self.exporter.reference(self.model, self.layout.arrange(tensors), precision)
        return None if answers is None else self.layout.read(tensors, answers)

    def answers(self, tensors: Tensors) -> tuple[Tensors | None, Tensors | None]:
        """Return the answers in float32 and float64.

        Raises:
            ValueError: the source rejects the inputs.
        """
        return self.answer(tensors, "float32"), self.answer(tensors, "float64")

    def group(self, name: str, tensors: Tensors) -> ReferenceGroup:
        """Return a group of these inputs with the answers to them.

        Raises:
            ValueError: the source rejects the inputs.
        """
        single, double = self.answers(tensors)
        bounds = None
        if self.jumps and name != SPLITS and _count_rows(tensors):
            known = [answer for answer in (double, single) if answer is not None]
            bounds = self._bounds(tensors, known, made_up=name == RANGE)
        return ReferenceGroup(
            name=name, inputs=tensors, single=single, double=double, bounds=bounds
        )

    def changes(self, group: ReferenceGroup) -> str:
        """Return how a second answer to the same rows differs; empty if it agrees."""
        precision: Precision = "float64" if group.double else "float32"
        first = group.double or group.single or {}
        again = self.answer(group.inputs, precision) or {}
        differences = (
            _describe_change(name, array, again[name], _AGAIN[precision])
            for name, array in first.items()
        )
        return next((difference for difference in differences if difference), "")

    def _bounds(self, tensors: Tensors, known: list[Tensors], *, made_up: bool) -> Tensors | None:
        """Return the envelope of the answers to the rows and to jittered copies.

        The rows are processed in ranges. Return None if `_answer_jittered` does so for a range.
        """
        count = _count_rows(tensors)
        row_bytes = sum(array.nbytes for array in tensors.values()) // count
        step = max(1, _JITTER_BYTES // max(1, COPIES * row_bytes))
        parts = []
        for start in range(0, count, step):
            chosen = slice_rows(tensors, start, start + step)
            many = self._answer_jittered(chosen, seed=start, made_up=made_up)
            if many is None:
                return None
            size = _count_rows(chosen)
            answers = [slice_rows(many, copy * size, (copy + 1) * size) for copy in range(COPIES)]
            own = [{name: answer[name][start : start + step] for name in many} for answer in known]
            narrow = COPIES if self.trees else COPIES // 2
            parts.append(compute_envelope([*own, *answers[:narrow]], answers[narrow:]))
        return join_envelopes(parts)

    def _answer_jittered(self, rows: Tensors, *, seed: int, made_up: bool) -> Tensors | None:
        """Return the answers to jittered copies of the rows.

        Return None if the source has no answers in float64. Of a source without trees, only the
        ranked outputs are returned. Also return None if one of them has another number of entries
        than rows.
        """
        jittered = jitter_rows(
            rows, seed=seed, ranks=not self.trees, parts_ties=made_up and not self.trees
        )
        many = self.answer(jittered, "float64")
        if many is None or self.trees:
            return many
        many = {name: array for name, array in many.items() if name in self.ranked}
        count = COPIES * _count_rows(rows)
        return many if all(array.ndim and len(array) == count for array in many.values()) else None


def collect_reference_outputs(
    exporter: Exporter,
    model: object,
    path: Path,
    samples: Tensors,
    declared: Mapping[str, InputValues] | None = None,
    *,
    seconds: float = SOURCE_TIME_S,
    layout: RowLayout | None = None,
) -> ReferenceOutputs:
    """Return the source's answers, and the groups that the source rejects.

    The export at `path` defines the possible inputs. A slow source without a fixed batch answers
    fewer rows of each group, to finish in about `seconds`. `declared` has the input values that the
    pipeline declares for callers. `layout` describes the axes of the source's rows.

    Raises:
        UserError: the source rejects the real samples, or answers them differently in two runs. The
            same error is raised if samples are missing, or if texts are declared as values of a
            numeric input.
    """
    source = _Source(
        exporter, model, has_trees(path), list_ranked_outputs(path), layout or RowLayout()
    )
    probes = build_probes(path, samples, declared)
    max_rows = (
        None
        if read_model_info(path).fixed_batch
        else _count_affordable_rows(source, probes, seconds)
    )
    groups: list[ReferenceGroup] = []
    refused: dict[str, str] = {}
    for name, probe in probes.items():
        tensors = _take_evenly(probe.inputs, max_rows)
        try:
            group = replace(source.group(name, tensors), inside=probe.inside)
        except ValueError as error:
            if name == REAL:
                raise _make_samples_error(error) from error
            refused[name] = quoted(error)
            continue
        if name == REAL:
            _check_repeatable(source, group)
        if group.single is not None or group.double is not None:
            groups.append(group)
    limits = SourceLimits(nan=_find_nan_policy(groups, refused), refused=refused)
    if max_rows is not None and max_rows < _count_rows(samples):
        limits = replace(limits, rows=max_rows, samples=_count_rows(samples))
    return ReferenceOutputs(groups=groups, limits=limits)


def _describe_change(name: str, first: Array, again: Array, limit: float) -> str:
    """Return how two answers to the same rows differ; empty if they agree.

    Floats can differ by `limit`, relative to the largest value. Of other values, a share of
    `_OTHERWISE` can differ.
    """
    if first.shape != again.shape:
        return f"output {name!r} has the shape {first.shape}, then {again.shape}"
    if first.dtype.kind != "f":
        share = np.mean(first != again) if first.size else 0.0
        return f"a share of {share:.3g} of output {name!r} differs" if share > _OTHERWISE else ""
    if not np.array_equal(np.isfinite(first), np.isfinite(again)):
        return f"a value of output {name!r} is finite in only one of two runs"
    both = np.nan_to_num(np.stack([first, again]).astype(np.float64), posinf=0, neginf=0)
    distance = np.ptp(both, axis=0).max(initial=0)
    return (
        f"output {name!r} differs by up to {distance:.3g}"
        if distance > limit * np.abs(both).max(initial=0)
        else ""
    )


def _count_rows(tensors: Tensors) -> int:
    return len(next(iter(tensors.values())))


def _take_evenly(tensors: Tensors, max_rows: int | None) -> Tensors:
    """Return at most `max_rows` rows, evenly spaced; all rows if it is None."""
    if max_rows is None:
        return tensors
    count = _count_rows(tensors)
    chosen = np.unique(np.linspace(0, count - 1, min(max_rows, count)).astype(np.intp))
    return {name: array[chosen] for name, array in tensors.items()}


def _check_repeatable(source: _Source, group: ReferenceGroup) -> None:
    """Raise UserError if the source answers the same rows differently."""
    if difference := source.changes(group):
        raise UserError(
            "the source model answered the same rows differently in two runs",
            where="train",
            why=difference,
            remedy="Turn off dropout, sampling and noise in inference mode.",
        )


def _count_affordable_rows(
    source: _Source, probes: Mapping[str, ProbeGroup], seconds: float
) -> int | None:
    """Return how many rows of each group the source can answer within `seconds`.

    The result is at least the smallest number in `_ROWS_OF_SLOW`, and None if the source can answer
    all rows. Two short calls measure the time of a call and of a row. The calls are repeated if the
    source seems too slow for all rows, since another process may have interfered.
    """
    real = probes[REAL].inputs
    sizes = [_count_rows(probe.inputs) for probe in probes.values()]
    few, some = (slice_rows(real, 0, min(size, sizes[0])) for size in (_FEW, _SOME))
    more = _count_rows(some) - _count_rows(few)
    # A row is answered in float32 and float64, but a jittered copy of it only in float64. So a copy
    # takes half the time of a row.
    copies = COPIES / 2 if source.jumps else 0
    affordable: list[int] = []
    try:
        source.answers(few)  # This first call includes one-time initialization, so it is not timed.
        per_call = longer = math.inf
        for _ in range(_TIMES):
            per_call = min(per_call, _time_answers(source, few))
            longer = min(longer, _time_answers(source, some))
            # With few rows, both calls are the same, and a row takes at most its part of a call.
            per_row = max(0.0, longer - per_call) / more if more else per_call / _count_rows(few)
            calls_s = len(sizes) * per_call * (2 if copies else 1)
            affordable = []
            for max_rows in (*_ROWS_OF_SLOW, max(sizes)):
                rows_s = per_row * sum(min(size, max_rows) for size in sizes) * (1 + copies)
                if calls_s + rows_s <= seconds:
                    affordable.append(max_rows)
            if affordable and affordable[-1] == max(sizes):
                return None
    except ValueError as error:
        raise _make_samples_error(error) from error
    return max(affordable, default=min(_ROWS_OF_SLOW))


def _time_answers(source: _Source, tensors: Tensors) -> float:
    started = time.perf_counter()
    source.answers(tensors)
    return time.perf_counter() - started


def _make_samples_error(error: ValueError) -> UserError:
    return UserError(
        "the source model rejects the samples",
        where="validate.samples",
        why=quoted(error),
        remedy="Validate with rows that the model accepts.",
    )


def build_probes(
    path: Path, samples: Tensors, declared: Mapping[str, InputValues] | None = None
) -> dict[str, ProbeGroup]:
    """Return the groups of inputs for the export and its source, real rows first.

    Raises:
        UserError: rows are missing, or texts are declared as values of a numeric input.
    """
    fixed = read_model_info(path).fixed_batch
    try:
        domains = learn_domains(
            samples, declared, read_index_bounds(path), read_encoded_inputs(path)
        )
    except ValueError as error:
        raise UserError(str(error), where="inputs") from error
    groups = make_probe_groups(
        samples, domains, empty=not fixed and not is_unsafe_without_rows(path)
    )
    if (splits := build_split_probes(path, samples)) is not None:
        groups[SPLITS] = ProbeGroup(inputs=splits)
    sized = make_sized_inputs(samples, _find_free_axes(path, samples))
    groups |= {name: ProbeGroup(inputs=inputs) for name, inputs in sized.items()}
    if fixed:
        return {
            name: replace(probe, inputs=take_rows(probe.inputs, fixed))
            for name, probe in groups.items()
        }
    return groups | {
        name: ProbeGroup(inputs=inputs) for name, inputs in make_batch_inputs(samples).items()
    }


def _find_free_axes(path: Path, samples: Tensors) -> Axes:
    """Return the named free axes of the inputs, numbered with rows on axis 0."""
    shapes = {spec.name: spec.shape for spec in read_model_info(path).inputs if spec.shape}
    axes = find_row_axes(shapes)
    # An encoded file that is cut at another size cannot be decoded.
    whole = read_encoded_inputs(path)
    shapes = {
        n: move_axis_first(shape, axes.get(n, 0))
        for n, shape in shapes.items()
        if n in samples and n not in whole
    }
    return find_sized_axes(shapes, unnamed=False)


def _find_nan_policy(groups: list[ReferenceGroup], refused: Mapping[str, str]) -> NanPolicy:
    if MISSING in refused:
        return "refused"
    answers = next(
        (group.double or group.single for group in groups if group.name == MISSING), None
    )
    if answers is None:
        return ""
    floats = [array for array in answers.values() if array.dtype.kind == "f"]
    return "passed on" if any(np.isnan(array).any() for array in floats) else "answered"
