"""Task metrics in slices of the rows, and the stored slices.

The predictions are those of all rows; no model runs again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.evidence import PairedCounts, ScoreComparison, SliceMeasurement
from onnx_ops.errors import UserError, suggest
from onnx_ops.measure.files import load_arrays, pack_arrays, put_document
from onnx_ops.metric_formulas import Array
from onnx_ops.ports import Store
from onnx_ops.statistics.slices import MOST_VALUES, Slicing, make_slicing, read_values

_SLICES, _NAMES = "slices.npz", "slices.json"

_CROSSING = "*"
"""Sign between the columns of a crossing, such as `country*device`.

A slice of a crossing has one value of each column.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePlan:
    """The slices to measure, and the labels of the metrics to measure in them."""

    slicings: Sequence[Slicing] = ()
    metrics: Collection[str] = ()

    def list_rows(self, metric: str | None = None) -> Iterator[tuple[str, Array]]:
        """Yield the name of each slice that has rows, and the numbers of its rows.

        Nothing is yielded for a metric outside `metrics`.
        """
        if metric is not None and metric not in self.metrics:
            return
        for slicing in self.slicings:
            order = np.argsort(slicing.numbers, kind="stable")
            ends = np.cumsum(np.bincount(slicing.numbers, minlength=len(slicing.names)))
            parts = zip(slicing.names, np.split(order, ends[:-1]), strict=True)
            yield from ((name, rows) for name, rows in parts if len(rows))


def join_measurements(
    plan: SlicePlan, measured: Mapping[str, Sequence[PairedCounts | ScoreComparison]]
) -> tuple[SliceMeasurement, ...]:
    """Return the measurements of each slice from its counts and scores, by slice."""
    return tuple(
        SliceMeasurement(
            slice=name,
            rows=len(rows),
            metrics=tuple(e for e in measured.get(name, ()) if isinstance(e, PairedCounts)),
            scores=tuple(e for e in measured.get(name, ()) if isinstance(e, ScoreComparison)),
        )
        for name, rows in plan.list_rows()
    )


def split_columns(by: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the columns of each entry of `by`: one, or several of a crossing."""
    return {
        entry: tuple(part.strip() for part in entry.split(_CROSSING))
        if _CROSSING in entry
        else (entry,)
        for entry in by
    }


def find_slice_problem(
    by: str, arrays: Mapping[str, Any], rows: int | None, *, where: str = ""
) -> UserError | None:
    """Return why a column or crossing cannot be slices of the rows; None if it can.

    `rows` is the number of rows; None if the arrays have only the first rows.
    """
    columns = split_columns([by])[by]
    for name in columns:
        if name not in arrays:
            remedy = suggest(name, arrays, f"There are: {', '.join(sorted(arrays)) or 'none'}.")
            return UserError(f"there is no column {name!r} for slices", where=where, remedy=remedy)
        array = np.asarray(arrays[name])
        is_column = array.ndim == 1 or (array.ndim == 2 and array.shape[1] == 1)
        if not is_column or array.dtype.kind not in "iufbUSOMm":
            return UserError(
                f"column {name!r} must have one value per row; its type is {array.dtype} and its "
                f"shape {tuple(array.shape)}",
                where=where,
                remedy="Name a column of texts or whole numbers. In a pipeline, `use` can compute "
                "one.",
            )
        if rows is not None and len(array) != rows:
            return UserError(
                f"column {name!r} has {len(array)} value{'' if len(array) == 1 else 's'}, and the "
                f"scored data set has {rows} rows",
                where=where,
                remedy="Give one value for each row of the data set, in its order.",
            )
    # If only the first rows of the files were read, the columns can have different lengths.
    shortest = min(len(arrays[name]) for name in columns)
    texts = {name: read_values(arrays[name][:shortest]) for name in columns}
    count = len(make_slicing(texts).names)
    if count > MOST_VALUES:
        return UserError(
            f"{by!r} has {count:,} different values, and at most {MOST_VALUES} can be slices",
            where=where,
            why="it seems to identify rows, to be a measured number, or to cross too many values",
            remedy="Group its values (ranges, regions) in a column of the data. In a pipeline, "
            "`use` can compute this column. If the column is an id, such as a customer's, remove "
            "it from `by`, and name it with `group:` of the data set.",
        )
    return None


def make_slicings(
    by: Iterable[str], arrays: Mapping[str, Any], rows: int, *, where: str
) -> list[Slicing]:
    """Return the slices of each column or crossing.

    Raises:
        UserError: a column is missing, does not have one value per row, or has too many values.
    """
    slicings = []
    for entry, columns in split_columns(by).items():
        if problem := find_slice_problem(entry, arrays, rows, where=where):
            raise problem
        slicings.append(make_slicing({name: read_values(arrays[name]) for name in columns}))
    return slicings


def put_slicings(store: Store, slicings: Sequence[Slicing]) -> Manifest:
    """Store slices of the rows of a data set."""
    arrays = {str(index): slicing.numbers for index, slicing in enumerate(slicings)}
    files: dict[str, Digest] = {
        _SLICES: store.put_bytes(pack_arrays(arrays)),
        _NAMES: put_document(store, [list(slicing.names) for slicing in slicings]),
    }
    return Manifest(files=files)


def get_slicings(store: Store, manifest: Manifest, limit: int) -> list[Slicing]:
    """Return the stored slices of the first `limit` rows."""
    arrays = load_arrays(store, manifest[_SLICES])
    names = codec.loads(store.read(manifest[_NAMES]), tuple[tuple[str, ...], ...])
    return [
        Slicing(names=own, numbers=arrays[str(index)][:limit]) for index, own in enumerate(names)
    ]
