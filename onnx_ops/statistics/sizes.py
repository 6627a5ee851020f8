"""Inputs of other sizes: axes beside the batch that an export declares free, made shorter and longer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from onnx_ops.statistics.probes import ENOUGH_ROWS, in_rows

AnyArray = npt.NDArray[np.generic]
Tensors = Mapping[str, AnyArray]
Axes = Mapping[str, Sequence[tuple[str, int]]]
"""Places (input, axis) of each free axis by its symbol; axis 0, the batch, is not among them."""

_GROUP_BYTES = 1 << 26


def other_sizes(size: int) -> tuple[int, ...]:
    """One, a smaller odd size, the next odd one above, and the double; never the size itself."""
    smaller, larger = (size // 2) | 1, size + 1 + size % 2
    return tuple(sorted({1, smaller, larger, 2 * size} - {size}))


def sized_inputs(samples: Tensors, axes: Axes) -> dict[str, Tensors]:
    """32 real rows at other sizes of each free axis, and of all of them at once, cut or repeated to fit.

    A symbol that several inputs share gets one size in all of them. Groups of more than 64 MiB are left out.

    Args:
        samples: real inputs by name, axis 0 is the batch.
        axes: where each symbol stands.

    Raises:
        ValueError: there is no row.
    """
    rows = in_rows(samples, ENOUGH_ROWS)
    present = {symbol: _size(rows, places) for symbol, places in axes.items() if places}
    wanted = [{symbol: size} for symbol, known in present.items() for size in other_sizes(known)]
    if len(present) > 1:
        ranked = {symbol: other_sizes(known) for symbol, known in present.items()}
        wanted += [{symbol: sizes[end] for symbol, sizes in ranked.items()} for end in (0, -1)]
        wanted.append({symbol: sizes[(place + 1) % len(sizes)] for place, (symbol, sizes) in enumerate(ranked.items())})
    groups: dict[str, Tensors] = {}
    for sizes in wanted:
        made = _resized(rows, axes, sizes)
        if sum(array.nbytes for array in made.values()) <= _GROUP_BYTES:
            groups["lengths:" + ",".join(f"{symbol}={size}" for symbol, size in sizes.items())] = made
    return groups


def _size(rows: Tensors, places: Sequence[tuple[str, int]]) -> int:
    name, axis = places[0]
    return int(rows[name].shape[axis])


def _resized(rows: Tensors, axes: Axes, sizes: Mapping[str, int]) -> dict[str, AnyArray]:
    found = dict(rows)
    for symbol, size in sizes.items():
        for name, axis in axes[symbol]:
            here = found[name].shape[axis]
            found[name] = np.take(found[name], np.arange(size) % here, axis=axis) if here else found[name]
    return found
