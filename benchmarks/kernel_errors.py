"""Measure the distance of ONNX Runtime's unary kernels from float64.

    python -m benchmarks.kernel_errors

Prints the largest distance beyond eps |y|, in units of eps, beside the operator's entry in
`KERNEL_ERRORS`. The 2.6 million arguments are evenly spaced from -30 to 30, normally distributed,
small, and negative with evenly spaced logarithms of their size. Exits with 1 if a kernel errs by
more than 2.5 times its entry.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import helper
from scipy import special

from onnx_ops.onnx_graph.rounding_operators import EPSILON, KERNEL_ERRORS

_ALPHA, _GAMMA = 1.67326319217681884765625, 1.05070102214813232421875
_MISH_FROM = 1.0
"""Largest |y| at which the error of Mish is compared with its entry.

Beyond, the kernel errs by a few eps |y|.
"""

EXACT: Mapping[str, Callable[[Any], Any]] = {
    "Atan": np.arctan,
    "Celu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "Elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "Erf": special.erf,
    "Gelu": lambda x: x * special.ndtr(x),
    "HardSigmoid": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
    "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "Log": np.log,
    "Mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "Selu": lambda x: _GAMMA * np.where(x > 0, x, _ALPHA * np.expm1(np.minimum(x, 0))),
    "Sigmoid": special.expit,
    "Softplus": lambda x: np.logaddexp(0, x),
    "Tanh": np.tanh,
}


def main() -> int:
    draw = np.random.default_rng(0)
    parts = [
        np.linspace(-30, 30, 1_000_003),
        draw.normal(size=1_000_000),
        1e-3 * draw.normal(size=300_000),
    ]
    arguments = np.concatenate([*parts, -np.logspace(-8, 1.9, 300_000)]).astype(np.float32)
    is_met = True
    for op_type, allowed in KERNEL_ERRORS.items():
        x = np.abs(arguments) + np.float32(1e-30) if op_type == "Log" else arguments
        exact = EXACT[op_type](x.astype(np.float64))
        lost = np.maximum(np.abs(_run(op_type, x) - exact) - EPSILON * np.abs(exact), 0) / EPSILON
        if op_type == "Mish":
            lost = lost[np.abs(exact) <= _MISH_FROM]
        largest = float(lost.max())
        is_met &= largest <= 2.5 * allowed
        print(f"{op_type:12s} {largest:6.2f} eps, allowed {allowed:g}")
    return 0 if is_met else 1


def _run(op_type: str, x: Any) -> Any:
    ends = [helper.make_tensor_value_info(name, 1, [None]) for name in ("x", "y")]
    graph = helper.make_graph(
        [helper.make_node(op_type, ["x"], ["y"])], "kernel", ends[:1], ends[1:]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0].astype(np.float64)


if __name__ == "__main__":
    sys.exit(main())
