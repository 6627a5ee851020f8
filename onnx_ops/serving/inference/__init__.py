"""Inference: from bytes of a request to bytes of a response."""
