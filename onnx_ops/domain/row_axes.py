"""The axis of the rows of each input of a model.

The axis is derived from the names of the input's dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

Shape = Sequence[int | str]
"""Sizes and names of dimensions.

A dimension is free and has no name if its size is negative. The same is true if its name is empty,
`?` or a generated name (`_GENERATED_NAME`).
"""

_BATCH_NAME = re.compile(r"n|b|bs|.*batch.*", re.IGNORECASE)
_GENERATED_NAME = re.compile(r"\??|unk_.*|None")
"""Names that exporters generate for free dimensions.

Exporters also give such names to dimensions whose size never changes (tf2onnx: `unk__6`).
"""


def is_free(size: int | str) -> bool:
    """Return whether a dimension may have any size."""
    return isinstance(size, str) or size < 0


def is_named(size: int | str) -> bool:
    """Return whether a free dimension has a name.

    Dimensions with the same name have the same size.
    """
    return isinstance(size, str) and not _GENERATED_NAME.fullmatch(size)


def find_batch_symbol(shapes: Mapping[str, Shape]) -> str:
    """Return the name of the dimension of rows; empty if no name states it.

    A name qualifies if it is that of a batch (`N`, `batch_size`). It also qualifies if all inputs
    with a free dimension share it, and it is the first dimension of at least one of them. A free
    first dimension without a name counts as this dimension. Inputs that begin with 1 need not share
    it, since they are broadcast. Names with "batch" come first, then those that the most inputs
    share.
    """
    free = {name: shape for name, shape in shapes.items() if any(map(is_free, shape))}
    required = {name for name, shape in free.items() if shape[0] != 1}
    candidates: dict[str, list[int]] = {}
    for size in dict.fromkeys(size for shape in free.values() for size in shape if is_named(size)):
        symbol = str(size)
        axes = _find_symbol_axes(free, symbol)
        is_shared = required and required <= set(axes) and 0 in axes.values()
        if is_shared or _BATCH_NAME.fullmatch(symbol):
            candidates[symbol] = list(axes.values())

    def rank(symbol: str) -> tuple[bool, int, int]:
        axes = candidates[symbol]
        return "batch" in symbol.lower(), len(axes), axes.count(0)

    return max(candidates, key=rank, default="")


def _find_symbol_axes(shapes: Mapping[str, Shape], symbol: str) -> dict[str, int]:
    """Return the axis that `find_axis` finds, for each shape that has one."""
    axes = {name: find_axis(shape, symbol) for name, shape in shapes.items()}
    return {name: axis for name, axis in axes.items() if axis is not None}


def find_axis(shape: Shape, symbol: str) -> int | None:
    """Return the first axis named `symbol`, or else axis 0 if it is free and unnamed.

    The result is None if both are missing.
    """
    if symbol in shape:
        return list(shape).index(symbol)
    return 0 if len(shape) and is_free(shape[0]) and not is_named(shape[0]) else None


def find_row_axes(shapes: Mapping[str, Shape], *, pooled: bool = True) -> dict[str, int]:
    """Return the axis of the rows of each input that has one.

    If no name qualifies (`find_batch_symbol`), rows are on the first dimensions of the inputs with
    free dimensions, if all of these are free. Otherwise, rows are on the axes that have the first
    size of the first input; inputs of only one value are ignored.

    Args:
        shapes: shapes of all inputs by name; scalars have none.
        pooled: whether first dimensions of different names are taken for the same dimension;
            otherwise, the result is empty for such inputs.
    """
    ranked = {name: shape for name, shape in shapes.items() if len(shape)}
    if symbol := find_batch_symbol(ranked):
        return _find_symbol_axes(ranked, symbol)
    free = {name: shape for name, shape in ranked.items() if any(map(is_free, shape))}
    if free and all(is_free(shape[0]) for shape in free.values()):
        names = {shape[0] for shape in free.values() if is_named(shape[0])}
        return dict.fromkeys(free, 0) if pooled or len(names) < 2 else {}
    return _find_common_size(ranked, free)


def guess_row_axes(
    shapes: Mapping[str, Shape], sizes: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """Return the axes of rows, by the sizes of arrays.

    Axes are found only if no dimension has a name, and if the inputs have exactly one size of free
    dimensions in common.

    Args:
        shapes: shapes of the model's inputs.
        sizes: shapes of the arrays for them, of the same ranks.
    """
    unnamed = {
        name: {
            sizes[name][axis]: axis
            for axis, size in reversed(list(enumerate(shape)))
            if is_free(size)
        }
        for name, shape in shapes.items()
        if any(map(is_free, shape)) and name in sizes
    }
    if not unnamed or any(is_named(size) for shape in shapes.values() for size in shape):
        return {}
    common = set.intersection(*map(set, unnamed.values()))
    return (
        {name: axes[size] for size in common for name, axes in unnamed.items()}
        if len(common) == 1
        else {}
    )


def find_declared_axes(
    dynamic: Mapping[str, Mapping[int, str]], shapes: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """Return the axis of the rows of each input that has one, from the declared axes.

    By default, axis 0 of an input is a batch.

    Args:
        dynamic: names of free axes, by input and axis.
        shapes: shapes of arrays for the inputs.
    """
    return find_row_axes(
        {
            name: [
                dynamic.get(name, {0: "batch"}).get(axis, size) for axis, size in enumerate(shape)
            ]
            for name, shape in shapes.items()
        }
    )


def _find_common_size(ranked: Mapping[str, Shape], free: Collection[str]) -> dict[str, int]:
    """Return the axis of each input that has the first size of the first input.

    It is the first such axis. Inputs of only one value are ignored if there are others. The result
    is empty if this size is free, or if an input does not have it. An input in `free` must have it
    on axis 0.
    """
    several = {
        name: shape for name, shape in ranked.items() if any(size != 1 for size in shape)
    } or ranked
    size = next((shape[0] for shape in several.values()), "")
    if is_free(size):
        return {}
    axes = {}
    for name, shape in several.items():
        at = [
            axis
            for axis, other in enumerate(shape)
            if other == size and (axis == 0 or name not in free)
        ]
        if not at:
            return {}
        axes[name] = at[0]
    return axes


def find_fixed_batch(shapes: Mapping[str, Shape]) -> int:
    """Return the number of rows that every request must have.

    The result is 0 if any number of rows is accepted.
    """
    sizes = (shapes[name][axis] for name, axis in find_row_axes(shapes).items())
    return max((size for size in sizes if isinstance(size, int) and size > 0), default=0)


def find_output_axes(inputs: Mapping[str, Shape], outputs: Mapping[str, Shape]) -> dict[str, int]:
    """Return the axis of the rows of each output that names it."""
    symbol = find_batch_symbol(inputs)
    return {
        name: list(shape).index(symbol)
        for name, shape in outputs.items()
        if symbol and symbol in shape
    }


def move_axis_first(shape: Shape, axis: int) -> tuple[int | str, ...]:
    """Return a shape with that axis in front of the others."""
    return (shape[axis], *shape[:axis], *shape[axis + 1 :])


def count_common_rows(shapes: Mapping[str, Sequence[int]], known: int = 0) -> int:
    """Return the number of rows of arrays that have rows on any axis.

    The number is a size that all arrays have on some axis. Among such sizes, the size that most
    arrays have on the first axis is chosen. The result is 0 if the arrays have no size in common.
    Without arrays, it is `known`.

    Args:
        known: the number of rows, if it is known from other data.
    """
    common = {known} if known else {size for shape in shapes.values() for size in shape}
    for shape in shapes.values():
        common &= set(shape)
    first = [shape[0] for shape in shapes.values() if len(shape)]
    return max(sorted(common - {0}, reverse=True), key=first.count, default=0) if shapes else known


def list_named_axes(shapes: Mapping[str, Shape]) -> Iterator[tuple[str, str, int]]:
    """Yield the name, input and axis of each free dimension.

    A dimension is named after its place if its size is negative, or its name is empty or `?`.
    """
    for name, shape in shapes.items():
        for axis, size in enumerate(shape):
            if is_free(size):
                yield (
                    size if isinstance(size, str) and size.strip("?") else f"{name}[{axis}]",
                    name,
                    axis,
                )


def find_sized_axes(
    shapes: Mapping[str, Shape], *, unnamed: bool = True
) -> dict[str, list[tuple[str, int]]]:
    """Return the places (input, axis) of each free dimension except rows, by its name.

    The shapes have rows on axis 0.

    Args:
        unnamed: whether to return dimensions without a name, each under its own place.
    """
    rows = {shape[0] for shape in shapes.values() if len(shape)}
    places: dict[str, list[tuple[str, int]]] = {}
    for symbol, name, axis in list_named_axes(shapes):
        if axis and symbol not in rows and (unnamed or shapes[name][axis] == symbol):
            places.setdefault(symbol, []).append((name, axis))
    return places
