"""What the wire must know of a model, worked out once when the model is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import orjson

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.errors import UserError
from onnx_ops.ports.data import Array
from onnx_ops.serving.wire.reader import Reader, shown
from onnx_ops.serving.wire.repeated import Repeated
from onnx_ops.serving.wire.writer import Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A model as its clients see it.

    Args:
        model, version: named in every answer.
        inputs, outputs: by name, in the model's order.
        optional: inputs that a request may leave out.
        refuses_nan: the source of the model refuses NaN, so that what the model answers to it means nothing.
    """

    model: str
    version: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    optional: frozenset[str] = frozenset()
    refuses_nan: bool = False
    readers: Mapping[str, Reader] = field(init=False, repr=False, compare=False)
    required: frozenset[str] = field(init=False, repr=False, compare=False)
    output_names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    shared: Mapping[str, tuple[tuple[str, int], ...]] = field(init=False, repr=False, compare=False)
    """Symbolic dimensions that occur more than once: their places, as input and axis."""
    raw_only: frozenset[str] = field(init=False, repr=False, compare=False)
    """Outputs that only the binary form can carry."""
    holds_bits: bool = field(init=False, repr=False, compare=False)
    """Whether a tensor is bfloat16, which numpy does not have."""
    takes_text: bool = field(init=False, repr=False, compare=False)
    """Whether an input is text, whose elements are read one by one in every form."""
    fixed_rows: bool = field(init=False, repr=False, compare=False)
    """Whether an output's axis 0 is fixed, so that rows of several requests could not be told apart."""
    opening: bytes = field(init=False, repr=False, compare=False)
    """What every v2 answer begins with."""
    writers: Mapping[str, Writer] = field(init=False, repr=False, compare=False)
    repeated: Repeated = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        head = orjson.dumps({"model_name": self.model, "model_version": self.version})
        derived = {
            "readers": {name: Reader(spec) for name, spec in self.inputs.items()},
            "required": frozenset(self.inputs) - self.optional,
            "output_names": tuple(self.outputs),
            "shared": _shared(self.inputs.values()),
            "raw_only": frozenset(name for name, spec in self.outputs.items() if spec.dtype == "bfloat16"),
            "holds_bits": any(s.dtype == "bfloat16" for s in (*self.inputs.values(), *self.outputs.values())),
            "takes_text": any(spec.dtype == "string" for spec in self.inputs.values()),
            "fixed_rows": any(not spec.shape or isinstance(spec.shape[0], int) for spec in self.outputs.values()),
            "opening": head[:-1],
            "writers": {name: Writer(spec) for name, spec in self.outputs.items()},
            "repeated": Repeated(),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def complete(self, feed: dict[str, Array]) -> int:
        """The rows of a feed (see `Call`), once it is known to be complete.

        Raises:
            UserError: an input is missing, or holds NaN that is refused, or a symbolic dimension has two sizes.
        """
        if len(feed) != len(self.readers) and (missing := self.required - feed.keys()):
            name = next(name for name in self.inputs if name in missing)
            raise UserError(f"input {name!r} is missing")
        if self.refuses_nan:
            for name, array in feed.items():
                if array.dtype.kind == "f" and np.isnan(array).any():
                    raise UserError(f"input {name!r} holds NaN, which the model was not made for")
        if self.shared:
            for symbol, places in self.shared.items():
                _check_symbol(symbol, places, feed)
        rows = 0
        for name, array in feed.items():
            length = len(array) if self.readers[name].free_rows else 0
            if not length or self.fixed_rows or (rows and length != rows):
                return 0
            rows = length
        return rows

    def known(self, name: object) -> Reader:
        """Raises UserError if the model has no such input."""
        reader = self.readers.get(name) if isinstance(name, str) else None
        if reader is None:
            raise UserError(f"the model has no input {shown(name)}; its inputs are {', '.join(self.inputs)}")
        return reader

    def only(self, form: str) -> str:
        """The input that a request means which names none. Raises UserError if there is a choice."""
        names = [name for name in self.inputs if name in self.required] or list(self.inputs)
        if len(names) != 1:
            raise UserError(f"the model has several inputs; {form} must name them: {', '.join(self.inputs)}")
        return names[0]


def _shared(specs: Iterable[TensorSpec]) -> dict[str, tuple[tuple[str, int], ...]]:
    """`?` stands for dimensions without a name."""
    places: dict[str, tuple[tuple[str, int], ...]] = {}
    for spec in specs:
        for axis, symbol in enumerate(spec.shape):
            if isinstance(symbol, str) and symbol != "?":
                places[symbol] = (*places.get(symbol, ()), (spec.name, axis))
    return {symbol: found for symbol, found in places.items() if len(found) > 1}


def _check_symbol(symbol: str, places: tuple[tuple[str, int], ...], feed: Mapping[str, Array]) -> None:
    first: tuple[int, str] | None = None
    for name, axis in places:
        if name not in feed:
            continue
        size = feed[name].shape[axis]
        if first is None:
            first = size, name
        elif first[0] != size:
            raise UserError(f"dimension {symbol!r} is {first[0]} in tensor {first[1]!r} but {size} in {name!r}")
