"""Release engineering for ONNX models."""

import os

# ONNX Runtime's builds report to their maker unless they are told not to before they are imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
