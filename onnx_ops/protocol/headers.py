"""HTTP headers of the serving contract, in lower case."""

from __future__ import annotations

USER_KEY = "x-user-key"
"""Requests with the same value are answered by the same deployment."""
REQUEST_ID = "x-request-id"
"""Passed through to the answer."""
TRACE_PARENT = "traceparent"
"""W3C trace context; passed through to the answer."""
TIMEOUT = "x-request-timeout-ms"
"""A request that has waited this many milliseconds for its model is answered 504 instead of being run."""
PINS = ("x-amzn-sagemaker-target-variant", "azureml-model-deployment")
"""Force a deployment by name, whatever its weight."""
DEPLOYMENT = "x-onnx-ops-deployment"
INVOKED_VARIANT = "x-amzn-invoked-production-variant"
"""Both name the deployment that answered."""
BINARY_LENGTH = "inference-header-content-length"
"""Announces a body in the binary form of the Open Inference Protocol."""
