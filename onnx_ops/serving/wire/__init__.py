"""The wire: bytes of a request to a checked feed, and a model's arrays to the bytes of an answer.

It knows no HTTP framework. Every function raises `UserError` (or `TooLargeError`) for a request that does not fit the
model, with a message that names the tensor.
"""

from onnx_ops.serving.wire.answer import write
from onnx_ops.serving.wire.call import Call, Form
from onnx_ops.serving.wire.infer import read_header_length, read_infer
from onnx_ops.serving.wire.invocation import read_invocation
from onnx_ops.serving.wire.signature import Signature

__all__ = ["Call", "Form", "Signature", "read_header_length", "read_infer", "read_invocation", "write"]
