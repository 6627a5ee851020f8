"""The rules of the gates.

Importing the package registers the rule of every kind of gate with `common.judge_gate`.
"""

from onnx_ops.statistics.rules import metric, parity, performance, slices

__all__ = ["metric", "parity", "performance", "slices"]
