"""Release engineering for ONNX models."""
