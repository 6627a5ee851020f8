"""Comparison of the project's own code with the deployed steps and model.

The module has its settings, and its examples for reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt, MinLen, doc

from onnx_ops.domain.quantities import Fraction

MODEL_STEP = "output"
"""Name of the step that is the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """Limits within which two values of a step count as equal.

    The default limits lie between the differences of correct implementations and those of faults
    in `benchmarks.system_truth`.
    """

    rounding: Annotated[
        float,
        Gt(0),
        doc("Largest error of a float, as a share of the value plus a tenth of the largest value."),
    ] = 1e-3
    resampling: Annotated[
        float,
        Gt(0),
        doc("Largest mean difference in levels (1/255 of the range) after interpolation."),
    ] = 0.75
    decoding: Annotated[
        float, Gt(0), doc("Largest mean difference in levels of files that a lossy decoder reads.")
    ] = 3.5
    bias: Annotated[
        float,
        Gt(0),
        doc("Largest difference of the means in levels, of interpolated or decoded values."),
    ] = 0.65
    answers: Annotated[
        Fraction,
        doc("Largest share of inputs whose final answer differs although every step agrees."),
    ] = 0.05
    files: Annotated[int, Ge(1), doc("Number of inputs that a PASS needs.")] = 20
    steps: Annotated[
        Mapping[str, Annotated[float, Gt(0)]],
        doc("Step -> factor by which its limits are multiplied."),
    ] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedStep:
    """A step before or after the model: a function of the project, or a graph."""

    name: Annotated[
        str, MinLen(1), doc("Name under which the source records its value of this step.")
    ]
    use: Annotated[str | None, doc("Function of the step, `package.module:function`.")] = None
    graph: Annotated[str | None, doc("ONNX file of the step, relative to the project's root.")] = (
        None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemExample:
    """The values of one input at one step: those of the source, and the deployed ones.

    `pictures` are pairs of a name and a data URI. `texts` are pairs of a name and a text.
    """

    step: str
    name: str
    pictures: Sequence[tuple[str, str]] = ()
    texts: Sequence[tuple[str, str]] = ()
