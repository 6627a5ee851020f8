"""Ports in memory, which keep the promises of their protocols: for tests of whatever stands on the ports.

`FakeRegistry` and `FakeProvider` outlive the `Ports` that are made over them, as servers outlive their clients: make
new ports over the same fakes to play a process that was killed and started again.
"""

from onnx_ops.testing.fakes.endpoints import FakeMetrics, FakeProvider
from onnx_ops.testing.fakes.process import FakeClock, FakeHost, FakeSigner
from onnx_ops.testing.fakes.registry import FakeRegistry
from onnx_ops.testing.fakes.world import FakeModelFiles, FakeNotifier, FakeWorld

__all__ = [
    "FakeClock",
    "FakeHost",
    "FakeMetrics",
    "FakeModelFiles",
    "FakeNotifier",
    "FakeProvider",
    "FakeRegistry",
    "FakeSigner",
    "FakeWorld",
]
