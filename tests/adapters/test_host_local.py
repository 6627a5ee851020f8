"""This machine: its clock."""

from __future__ import annotations

from onnx_ops.adapters.host import SystemClock


def test_the_clock_goes_forward() -> None:
    clock = SystemClock()
    assert clock.now() > 1.7e9
    assert clock.monotonic() <= clock.monotonic()
