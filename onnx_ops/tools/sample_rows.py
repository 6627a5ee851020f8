"""Input rows of a model, and the groups of inputs that are made from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnx_ops.domain.input_values import InputValues
from onnx_ops.domain.row_axes import find_output_axes
from onnx_ops.measure.answers import cut_batches
from onnx_ops.measure.row_layout import RowLayout
from onnx_ops.onnx_graph.input_bounds import InputBounds
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import Tensors
from onnx_ops.statistics.probes import (
    MIN_NOISE_ROWS,
    REAL,
    ProbeGroup,
    learn_domains,
    make_batch_inputs,
    make_probe_groups,
    take_rows,
)

SET_BYTES = 1 << 26
"""Maximum bytes of generated rows, and of 32 rows from which groups are derived.

There are about ten groups.
"""

_BITS = 40
"""Bits of the largest generated whole numbers; more than 32 bits."""

_RUN_BYTES = 1 << 24
"""Maximum bytes of the inputs of one run.

The intermediate values of a model may take a hundred times as much.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGroup:
    """Inputs of one kind, in runs whose outputs are joined along axis 0.

    `inside` is True if callers can send such inputs. `assumed` is True if only the model can show
    whether it accepts inputs of these sizes or values.
    """

    name: str
    runs: tuple[Tensors, ...]
    inside: bool = True
    assumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """Input rows of a model, on axis 0 of every array.

    Args:
        rows: the inputs that have rows; empty for a model whose inputs share no dimension.
        fixed: the other inputs, the same in every run.
        batch: the number of rows that every run must have, or 0 for any number.
        axes: axis of the rows in the model's inputs; by default axis 0.
        further: more runs by group, at other sizes of free dimensions and with other values of
            `fixed`.
        choices: generated values of inputs with one value; the model may reject some of them.
    """

    rows: Tensors
    fixed: Tensors
    batch: int
    axes: Mapping[str, int] = field(default_factory=dict)
    further: Mapping[str, Tensors] = field(default_factory=dict)
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.rows.values()))) if self.rows else 1

    @property
    def row_bytes(self) -> int:
        """Return the number of bytes of one row, over all inputs."""
        return sum(array.nbytes for array in self.rows.values()) // max(1, len(self))

    @property
    def large(self) -> bool:
        """Return whether groups of 32 such rows would take too much memory."""
        return self.row_bytes * MIN_NOISE_ROWS > SET_BYTES

    def head(self, limit: int) -> SampleRows:
        """Return samples of the first rows."""
        return replace(self, rows={name: array[:limit] for name, array in self.rows.items()})

    def select(self, rows: Any) -> Tensors:
        """Return the rows with these indices as one run."""
        return {name: array[rows] for name, array in self.rows.items()}

    def feed(self, size: int) -> Tensors:
        """Return one run of `size` rows, or of the model's fixed batch.

        If there are fewer rows, they are repeated.
        """
        return self.select(np.arange(self.batch or size) % max(1, len(self)))

    def read_layout(self, model: Path) -> RowLayout:
        """Return the layout in which the model takes and returns these rows."""
        info = read_model_info(model)
        shapes, outputs = (
            {spec.name: spec.shape for spec in specs} for specs in (info.inputs, info.outputs)
        )
        inputs = self.axes or dict.fromkeys(self.rows, 0)
        return RowLayout(
            inputs=inputs, outputs=find_output_axes(shapes, outputs), values=self.fixed
        )


def build_groups(
    samples: SampleRows,
    *,
    empty: bool = True,
    bounds: Mapping[str, InputBounds] | None = None,
    splits: Tensors | None = None,
) -> tuple[InputGroup, ...]:
    """Build the groups: the rows, rows derived from them, batches, and further runs.

    Large rows have no derived groups. In one derived group, whole numbers other than indices and
    sizes have all magnitudes and both signs. If the baseline rejects them, no answer is compared.
    `empty` adds a group without rows, unless the model has a fixed batch. `bounds` contains the
    bounds of the inputs that were derived from the graph. `splits` contains rows near the splits of
    trees, which are unused if the rows are large.
    """
    encoded = [name for name, known in (bounds or {}).items() if known.encoded]
    further = [
        InputGroup(name=name, runs=(run,), assumed=True)
        for name, run in samples.further.items()
        if not _cuts_files(run, samples.rows, encoded)
    ]
    if not samples.rows:
        return (InputGroup(name=REAL, runs=({},)), *further)
    probes = {REAL: ProbeGroup(inputs=samples.rows)}
    if not samples.large:
        probes = _make_probes(samples, bounds or {}, empty=empty, splits=splits)
    groups = [
        InputGroup(name=name, runs=_cut_runs(probe.inputs, samples), inside=probe.inside)
        for name, probe in probes.items()
    ]
    return (*groups, *_make_batches(samples), *further)


def _cuts_files(run: Tensors, rows: Tensors, encoded: Sequence[str]) -> bool:
    """Return whether a run has encoded files of another size, which cannot be decoded."""
    return any(
        run[name].shape[1:] != rows[name].shape[1:]
        for name in encoded
        if name in run and name in rows
    )


def _make_probes(
    samples: SampleRows, bounds: Mapping[str, InputBounds], *, empty: bool, splits: Tensors | None
) -> dict[str, ProbeGroup]:
    """Return the rows, and rows derived from them, by group."""
    indices = {name: known.index for name, known in bounds.items() if known.index is not None}
    missing = {name: InputValues(missing=True) for name, known in bounds.items() if known.missing}
    encoded = [name for name, known in bounds.items() if known.encoded]
    domains = learn_domains(samples.rows, missing, indices, encoded)
    probes = make_probe_groups(samples.rows, domains, empty=empty and not samples.batch)
    if splits is not None:
        probes["splits"] = ProbeGroup(inputs=splits)
    if plain := [
        name
        for name, array in samples.rows.items()
        if _holds_plain_numbers(array, bounds.get(name))
    ]:
        probes["range:whole_numbers"] = ProbeGroup(inputs=_draw_whole_numbers(samples.rows, plain))
    return probes


def _holds_plain_numbers(array: Any, known: InputBounds | None) -> bool:
    """Return whether an input has whole numbers other than indices, sizes and files.

    The graph shows which inputs are indices or sizes.
    """
    if known is None or known.index is not None or known.size or known.encoded:
        return False
    return array.dtype.kind in "iu"


def _make_batches(samples: SampleRows) -> Iterator[InputGroup]:
    """Yield batches of the rows, of at most 16 MiB or one row.

    Nothing is yielded for a model with a fixed batch.
    """
    if samples.batch:
        return
    for name, index in make_batch_inputs({"row": np.arange(len(samples))}).items():
        rows = index["row"].astype(np.intp)
        if len(rows) < 2 or len(rows) * samples.row_bytes <= _RUN_BYTES:
            yield InputGroup(name=name, runs=(samples.select(rows),))


def _draw_whole_numbers(rows: Tensors, names: Sequence[str]) -> Tensors:
    """Return rows with whole numbers of every magnitude and sign in these inputs."""
    draw = np.random.default_rng(1)
    inputs = dict(take_rows(rows, 3 * MIN_NOISE_ROWS))
    for name in names:
        limits = np.iinfo(inputs[name].dtype.name)
        sizes = np.exp2(draw.uniform(0, min(_BITS, np.log2(float(limits.max))), inputs[name].shape))
        signed = sizes * (draw.choice([-1.0, 1.0], sizes.shape) if limits.min < 0 else 1.0)
        inputs[name] = np.clip(signed, float(limits.min), float(limits.max) / 2).astype(
            inputs[name].dtype
        )
    return inputs


def _cut_runs(rows: Tensors, samples: SampleRows) -> tuple[Tensors, ...]:
    """Split rows into runs of the fixed batch size, or of at most about 16 MiB.

    Without rows, there is one empty run.
    """
    return tuple(feed for feed, _ in cut_batches(rows, samples.batch, _RUN_BYTES)) or (rows,)
