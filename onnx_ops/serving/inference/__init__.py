"""Inference: bytes of a request to arrays, the loaded models that run them, and bytes of the response."""
