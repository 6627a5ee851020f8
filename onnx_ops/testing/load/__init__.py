"""A load generator for endpoint servers: `python -m onnx_ops.testing.load URL`, or `LoadProcess` from Python."""

from onnx_ops.testing.load.plan import LoadPlan, Payload
from onnx_ops.testing.load.process import LoadProcess
from onnx_ops.testing.load.records import Failure, Publication, Records, stale

__all__ = ["Failure", "LoadPlan", "LoadProcess", "Payload", "Publication", "Records", "stale"]
