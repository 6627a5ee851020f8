from __future__ import annotations

from collections.abc import Iterator

import pytest

from onnx_ops.serving.inference import tensors


@pytest.fixture(scope="module")
def small_is_large() -> Iterator[None]:
    """Lower the limits of large bodies, so that small bodies take the same path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "LARGE_BODY_BYTES", 2048)
        patch.setattr(tensors, "_LARGE_ARRAY_BYTES", 64)
        patch.setattr(tensors, "_PIECE_BYTES", 24)
        yield
