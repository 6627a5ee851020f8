"""Release engineering for ONNX models."""

import os

# ONNX Runtime's builds report to their maker, from a thread of their own, unless they are told not to before they are
# imported; the endpoint's server forks and must have no such thread.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
