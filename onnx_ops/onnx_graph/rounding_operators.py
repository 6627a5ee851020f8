"""Tables of operators by how they round: kernel errors, slopes, and kinds."""

from __future__ import annotations

from collections.abc import Mapping

from onnx_ops.onnx_graph.files import DEFAULT_DOMAINS

EPSILON = 2.0**-23
"""Spacing of float32 relative to its values."""

EPSILON_DOUBLE = 2.0**-52
"""Spacing of float64 relative to its values."""

ML_DOMAIN = "ai.onnx.ml"
"""Domain of the operators of classical machine learning."""

DOMAINS = frozenset({*DEFAULT_DOMAINS, ML_DOMAIN, "com.microsoft"})
"""Domains of the operators in these tables."""

KERNEL_ERRORS: Mapping[str, float] = {
    "Atan": 1.0,
    "Celu": 0.5,
    "Elu": 0.5,
    "Erf": 0.5,
    "Gelu": 0.5,
    "HardSigmoid": 0.25,
    "HardSwish": 0.5,
    "Log": 0.5,
    "Mish": 1.0,
    "Selu": 1.0,
    "Sigmoid": 0.5,
    "Softplus": 0.5,
    "Tanh": 1.0,
}
"""Absolute errors of float32 kernels beyond eps |y|, in units of eps.

The kernels are those of ONNX Runtime. `benchmarks.kernel_errors` compares them with float64 for 2.6
million arguments. No error beyond eps |y| exceeds 2.5 times its entry (Mish: for |y| up to 1).
"""

SLOPES: Mapping[str, float] = {
    "Abs": 1.0,
    "Atan": 1.0,
    "Celu": 1.0,
    "Clip": 1.0,
    "Cos": 1.0,
    "Elu": 1.0,
    "Erf": 1.13,
    "Gelu": 1.13,
    "HardSigmoid": 0.2,
    "HardSwish": 1.5,
    "LeakyRelu": 1.0,
    "Mish": 1.1,
    "Neg": 1.0,
    "PRelu": 1.0,
    "Relu": 1.0,
    "Selu": 1.76,
    "Sin": 1.0,
    "Softplus": 1.0,
    "Softsign": 1.0,
    "ThresholdedRelu": 1.0,
}
"""Steepest slopes of functions of one argument, with default attributes.

The slopes of PRelu are inputs of the model, and are taken to be at most 1.
"""

SAME_SHAPE = frozenset(SLOPES) | frozenset(
    {
        "Add",
        "BatchNormalization",
        "Cast",
        "Div",
        "Dropout",
        "Exp",
        "Identity",
        "LayerNormalization",
        "Log",
        "LogSoftmax",
        "Mul",
        "Pow",
        "Reciprocal",
        "Sigmoid",
        "Softmax",
        "Sqrt",
        "Sub",
        "Tanh",
    }
)
"""Operators whose output has its columns on the same axis as their main input."""

MOVES = frozenset(
    {
        "ArrayFeatureExtractor",
        "DepthToSpace",
        "Expand",
        "Flatten",
        "Gather",
        "GatherElements",
        "GatherND",
        "GlobalMaxPool",
        "Identity",
        "MaxPool",
        "ReduceMax",
        "Reshape",
        "Resize",
        "Slice",
        "SpaceToDepth",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Trilu",
        "Unsqueeze",
    }
)
"""Operators that move, select or interpolate elements of their first input."""

RESHAPES = frozenset({"Flatten", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators through which the segments of a joined output can be followed."""

SUMS = frozenset({"AveragePool", "GlobalAveragePool", "ReduceL1", "ReduceMean", "ReduceSum"})
"""Operators that add one term after the other."""

WITH_CHANNELS = frozenset(
    {"AveragePool", "Conv", "ConvTranspose", "InstanceNormalization", "MaxPool", "Resize"}
)
"""Operators whose output has its channels on axis 1."""

EXACT = frozenset(
    {
        "And",
        "ArgMax",
        "ArgMin",
        "Binarizer",
        "Ceil",
        "Constant",
        "ConstantOfShape",
        "Equal",
        "Floor",
        "Greater",
        "GreaterOrEqual",
        "IsInf",
        "IsNaN",
        "LabelEncoder",
        "Less",
        "LessOrEqual",
        "NonMaxSuppression",
        "NonZero",
        "Not",
        "OneHot",
        "OneHotEncoder",
        "Or",
        "Range",
        "Round",
        "Shape",
        "Sign",
        "Size",
        "Xor",
    }
)
"""Operators whose outputs are not rounded: an output is either right or wrong."""

RANKINGS = frozenset({"ArgMax", "ArgMin", "NonMaxSuppression"})
"""Operators whose whole output can change where two scores change their order."""

BEHIND_INDICES = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that preserve the order of a ranking's indices or classes."""
