"""ONNX graphs as data."""
