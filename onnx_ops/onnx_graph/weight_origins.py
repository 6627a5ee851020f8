"""Find the float constant that each rounded weight of another file was made from.

Quantizers preserve or change the names of weights, or write a new graph. A weight is therefore
matched by its name, by the place of its operator in both graphs, and by its values, in this order
of trust:

1. A name that the place confirms, unless the values are unrelated.
2. Near values, by name, by place, or otherwise the nearest ones.
3. A name that the place confirms.
4. The place.
5. The name.
6. The only remaining constant of the same shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onnx_ops.onnx_graph.files import collect_constants
from onnx_ops.onnx_graph.quantized_activations import WRITTEN_SUFFIX
from onnx_ops.onnx_graph.stored_weights import Floats, StoredWeight

if TYPE_CHECKING:
    import onnx

_FLOATS = frozenset({1, 10, 11, 16})

_NEAR = 0.3
"""Squared distance from the original below which values are near.

The distance is relative to the square of the original. Rounding to 4 bits gives normal weights a
distance of 0.01 to 0.02, and rounding to 2 bits 0.1 to 0.3. Another weight of the same spread has a
distance of 2.
"""

_SAME_NUMBER = 1e-3
"""Squared relative distance below which two single numbers are treated as equal.

One of the numbers may be rounded.
"""

_UNRELATED = 1.0
"""Distance above which near values elsewhere are trusted more than name and place.

Tools give tensors and nodes generic names such as `v206`. Two files can have the same generic names
by chance.
"""

_SAMPLED = 4096
"""Maximum number of elements of a weight that are compared to find its original."""

_MOVING = frozenset(
    {
        "Cast",
        "DequantizeLinear",
        "Identity",
        "QuantizeLinear",
        "Reshape",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    }
)
"""Operators that can be between a constant and the operator whose weight it is."""

_KINDS = {
    "DynamicQuantizeLSTM": "LSTM",
    "ConvInteger": "Conv", "DynamicQuantizeMatMul": "MatMul", "FusedConv": "Conv",
    "FusedGemm": "MatMul", "FusedMatMul": "MatMul", "Gemm": "MatMul",
    "GatherBlockQuantized": "Gather", "MatMulInteger": "MatMul",
    "MatMulIntegerToFloat": "MatMul", "MatMulNBits": "MatMul", "NhwcFusedConv": "Conv",
}  # fmt: skip
"""The operator that each of these operators is compared as."""

_TWO = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A float constant, and whether the weight has its axes in reverse order."""

    name: str
    transposed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """The operator that takes a constant as input `slot`.

    `number` counts the operators of this kind and slot in graph order. `names` are the names of the
    node and its results, and `output` is its first result. `turned` is True for a product whose
    weight has the outputs on axis 0. `biased` is True if the operator has a third input, which is
    the bias of a Conv or Gemm.
    """

    kind: str
    slot: int
    number: int
    names: frozenset[str]
    output: str
    turned: bool
    biased: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _PossibleOrigin:
    """A possible original of matching shape, in one orientation, with its evidence.

    `named`, `placed` and `oriented` are True if name, place and orientation suit the weight.
    """

    origin: Origin
    distance: float
    named: bool
    placed: bool
    oriented: bool

    @property
    def rank(self) -> tuple[int, bool, float]:
        near, known = self.distance < _NEAR, self.named and self.placed
        trusts = (
            known and self.distance < _UNRELATED,
            near and self.named,
            near and self.placed,
            near,
            known,
            self.placed,
            self.named,
        )
        level = next((place for place, trust in enumerate(trusts) if trust), len(trusts))
        # If neither a square matrix nor its transpose is close in value, the orientation decides.
        # Otherwise, the smaller distance decides.
        return level, not (near or self.oriented), self.distance


class OriginFinder:
    """Finder of the originals, in a float model, of the weights of a derived model."""

    def __init__(self, source: onnx.ModelProto, derived: onnx.ModelProto) -> None:
        self.tensors = {
            n: t for n, t in collect_constants(source).items() if t.data_type in _FLOATS
        }
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._uses, counts = _list_uses(source)
        self._derived_uses, derived_counts = _list_uses(derived)
        self._sums, self._derived_sums = _list_sums(source), _list_sums(derived)
        self._alike = {kind for kind, count in counts.items() if derived_counts.get(kind) == count}
        self._shapes: dict[tuple[int, ...], list[str]] = {}
        for name, tensor in self.tensors.items():
            self._shapes.setdefault(
                tuple(sorted(size for size in tensor.dims if size != 1)), []
            ).append(name)

    def read(self, origin: Origin) -> npt.NDArray[Any]:
        """Return the values of an original, in the orientation of the weight."""
        from onnx import numpy_helper

        if origin.name not in self._arrays:
            self._arrays[origin.name] = numpy_helper.to_array(self.tensors[origin.name])
        values = self._arrays[origin.name]
        return values.T if origin.transposed else values

    def find(self, weights: Sequence[StoredWeight]) -> dict[str, Origin]:
        """Return the original of each weight, by the name that it is stored under.

        Weights without an original are omitted.
        """
        found: dict[str, Origin] = {}
        waiting: list[tuple[StoredWeight, list[_PossibleOrigin]]] = []
        for weight in weights:
            candidates = sorted(self._list_candidates(weight), key=lambda candidate: candidate.rank)
            # Scalars, such as exponents and factors, can have the same names and positions in
            # unrelated files. Only an equal value is evidence.
            if weight.values.size == 1:
                candidates = [one for one in candidates if one.distance < _SAME_NUMBER]
            if candidates and candidates[0].rank[0] < _UNKNOWN:
                found[weight.tensor] = candidates[0].origin
            elif candidates:
                waiting.append((weight, candidates))
        taken = {origin.name for origin in found.values()}
        for weight, candidates in waiting:
            left = [candidate for candidate in candidates if candidate.origin.name not in taken]
            if len({candidate.origin.name for candidate in left}) == 1:
                found[weight.tensor] = left[0].origin
        return found

    def match_values(self, weights: Sequence[StoredWeight]) -> dict[str, str]:
        """Return the source's value for each output of a layer with a rounded weight.

        A bias that is added after a layer is part of the layer.
        """
        values = {}
        for tensor, origin in self.find(weights).items():
            own, use = self._uses.get(origin.name), self._derived_uses.get(tensor)
            if own is None or use is None or own.slot != 1 or use.slot != 1:
                continue
            whole = own.output if own.biased else self._sums.get(own.output, own.output)
            if use.biased:
                values[use.output] = whole
            else:
                values[use.output] = own.output
                values |= (
                    {self._derived_sums[use.output]: whole}
                    if use.output in self._derived_sums
                    else {}
                )
        return values

    def find_by_name(self, weight: StoredWeight) -> Origin | None:
        """Return the original with the same name as the weight.

        Return None if there is no such constant of matching shape. Also return None if the constant
        belongs to another operator of the same kind and its values are not near.
        """
        own, use = self._uses.get(weight.name), self._derived_uses.get(weight.tensor)
        named = [
            candidate
            for candidate in self._list_candidates(weight)
            if candidate.origin.name == weight.name
        ]
        if (
            own is not None
            and use is not None
            and (own.kind, own.slot) == (use.kind, use.slot)
            and named
        ):
            elsewhere = (own.kind, own.slot) in self._alike and not named[0].placed
            named = (
                []
                if elsewhere and all(candidate.distance >= _NEAR for candidate in named)
                else named
            )
        return min(named, key=lambda candidate: candidate.rank).origin if named else None

    def _list_candidates(self, weight: StoredWeight) -> Iterator[_PossibleOrigin]:
        """Yield the originals of matching shape; axes of size 1 are ignored."""
        shape = tuple(size for size in weight.values.shape if size != 1)
        use = self._derived_uses.get(weight.tensor)
        own_shape = weight.values.shape or (1,)
        places = _sample_places(own_shape)
        values = weight.values.reshape(own_shape)[places]
        names = set(_list_names(weight.name))
        for name in self._shapes.get(tuple(sorted(shape)), ()):
            own = self._uses.get(name)
            for transposed in self._list_orientations(
                name, shape, transposable=weight.transposable
            ):
                origin = Origin(name=name, transposed=transposed)
                original = self.read(origin).reshape(own_shape)[places].astype(np.float64)
                yield _PossibleOrigin(
                    origin=origin,
                    distance=_measure_distance(values, original),
                    named=name in names,
                    placed=use is not None and own is not None and self._is_same_place(own, use),
                    oriented=use is None or own is None or (own.turned != use.turned) == transposed,
                )

    def _list_orientations(
        self, name: str, shape: tuple[int, ...], *, transposable: bool
    ) -> Iterator[bool]:
        """Yield the orientations in which a constant can be the original of a weight.

        False stands for the constant, and True for its transpose. `shape` is that of the weight.
        """
        plain = tuple(size for size in self.tensors[name].dims if size != 1)
        if plain == shape:
            yield False
        if transposable and len(shape) == _TWO and plain[::-1] == shape:
            yield True

    def _is_same_place(self, one: _Use, other: _Use) -> bool:
        kind = (one.kind, one.slot)
        if kind != (other.kind, other.slot):
            return False
        if one.names & other.names:
            return True
        return one.number == other.number and kind in self._alike


_UNKNOWN = 7
"""Rank of a candidate without any evidence."""


def _list_names(name: str) -> list[str]:
    """Return the name, and the name without one or more of its last digits.

    Quantizers add numbers to the copies of a shared bias.
    """
    stem = name.rstrip("0123456789")
    return [name[:end] for end in range(len(name), len(stem) - 1, -1)]


def _sample_places(shape: tuple[int, ...]) -> tuple[npt.NDArray[np.intp], ...]:
    size = int(np.prod(shape))
    flat = np.arange(size) if size <= _SAMPLED else np.random.default_rng(0).choice(size, _SAMPLED)
    return tuple(np.unravel_index(flat, shape))


def _measure_distance(values: Floats, original: Floats) -> float:
    """Return the squared distance, relative to the square of the original.

    It is 0 for equal values.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        moved, size = float(((values - original) ** 2).sum()), float((original**2).sum())
    if not moved:
        return 0.0
    return moved / size if size and np.isfinite(moved) else float("inf")


def _list_uses(model: onnx.ModelProto) -> tuple[dict[str, _Use], dict[tuple[str, int], int]]:
    """Return the first operator that takes each constant, and counts of operators.

    The counts are by kind and slot, of the operators that take a constant. Operators in between
    that only move the values of a constant are skipped.
    """
    follows = _follow_constants(model, collect_constants(model))
    counts: dict[tuple[str, int], int] = {}
    uses: dict[str, _Use] = {}
    for node in model.graph.node:
        if node.op_type in _MOVING:
            continue
        kind = _KINDS.get(node.op_type, node.op_type)
        names = frozenset(
            {node.name, *(output.removesuffix(WRITTEN_SUFFIX) for output in node.output)} - {""}
        )
        flipped = any(a.name == "transB" and a.i for a in node.attribute)
        for slot, name in enumerate(node.input):
            if name not in follows:
                continue
            constant, swaps = follows[name]
            number = counts.get((kind, slot), 0)
            counts[kind, slot] = number + 1
            use = _Use(
                kind=kind,
                slot=slot,
                number=number,
                names=names,
                output=node.output[0],
                turned=flipped != bool(swaps % 2),
                biased=any(node.input[2:3]),
            )
            uses.setdefault(constant, use)
    return uses, counts


def _list_sums(model: onnx.ModelProto) -> dict[str, str]:
    """Return the sum of each value and a constant, by the name of the value.

    The value may be quantized before the addition.
    """
    follows = _follow_constants(model, collect_constants(model))
    # The keys are quantized or dequantized values, and the values are the originals before
    # quantization.
    before: dict[str, str] = {}
    sums = {}
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            before[node.output[0]] = before.get(node.input[0], node.input[0])
        elif node.op_type == "Add" and (node.input[0] in follows) != (node.input[1] in follows):
            value = next(name for name in node.input if name not in follows)
            sums[before.get(value, value)] = node.output[0]
    return sums


def _follow_constants(
    model: onnx.ModelProto, stored: Mapping[str, Any]
) -> dict[str, tuple[str, int]]:
    """Return the constant behind each value, and how often its axes were swapped.

    Values behind the operators of `_MOVING` are included.
    """
    follows = {name: (name, 0) for name in stored}
    for node in model.graph.node:
        if node.op_type in _MOVING and node.input and node.input[0] in follows:
            name, swaps = follows[node.input[0]]
            follows[node.output[0]] = name, swaps + (node.op_type == "Transpose")
    return follows
