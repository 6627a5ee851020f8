"""What is known of a variant beside its answers: its trees, its quantized activations, its int8 operators, what slows
it down, its source's limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from onnx_ops.domain.quantities import LATER

NanPolicy = Literal["refused", "answered", "passed on", ""]
"""What the source does with NaN: it refuses such inputs, answers them with numbers, or answers NaN; empty where no
input can hold one."""


NAN_PROPERTY = "onnx-ops.nan"
"""Property of an ONNX file that holds the `NanPolicy` of its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLimits:
    """What the source model does not answer: groups of inputs that it refuses, in its own words, and NaN.

    `rows` is how many of the `samples` rows a slow source was asked; both are 0 where it was asked all.
    """

    nan: NanPolicy = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    rows: int = field(default=0, metadata=LATER)
    samples: int = field(default=0, metadata=LATER)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeStructure:
    """The trees of an export beside those of its source, node by node.

    `trees`, `splits` and `leaves` count the source's; `changed` counts the nodes that differ, and `differences` tells
    the first of them.
    """

    trees: int
    splits: int
    leaves: int
    changed: int
    differences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMeasurement:
    """One quantized activation on real rows.

    `noise` is the largest |read back - written| of values inside the range, in units of step / sqrt(12), the standard
    deviation of rounding: rounding alone makes up to sqrt(3). `departure` is the root mean square distance from the
    float export's value in that unit, which all layers before share in; None where the float export has no such
    value. `saturated` is the share of values outside the range, without those below a range that begins at 0.
    `clipping` is the mean square of what the range cuts off, in the mean square of rounding to 8 bits over that range.
    `stretch` is how many times as far the range reaches as the values do, at the end where it fits best; None where the
    range may be that of a function (Softmax, Sigmoid, Tanh) and not of values, and where no value differs from 0.
    """

    tensor: str
    values: int
    noise: float
    saturated: float
    departure: float | None = None
    clipping: float | None = field(default=None, metadata=LATER)
    stretch: float | None = field(default=None, metadata=LATER)


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatOperator:
    """An operator of a quantized variant that runs in float though its kind could run in int8, why, and which setting
    mends it; empty where none does."""

    name: str
    op_type: str
    reason: str
    setting: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Something that makes a variant slow or wrong on its target, and the setting that mends it.

    `setting` is what to write into the pipeline or target file; `nodes` are those that are meant, as far as it has
    names for them.
    """

    finding: str
    setting: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Coverage:
    """Which matrix products and convolutions run in int8 after the runtime's own optimization of the graph.

    `int8` and `floats` name them as the export does. `unheeded` are operators that were excluded from quantization
    and that the runtime runs in int8 all the same.
    """

    int8: tuple[str, ...] = ()
    floats: tuple[FloatOperator, ...] = ()
    unheeded: tuple[str, ...] = ()
