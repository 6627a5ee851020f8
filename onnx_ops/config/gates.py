"""What must hold within a gate, of a pipeline or of a target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnx_ops.config.document import Finding, Loc
from onnx_ops.domain.gate import ColdStartGate, Gate, LatencyGate, MemoryGate, ThroughputGate


def gate_findings(gates: Iterable[tuple[Loc, Gate]]) -> Iterator[Finding]:
    for loc, gate in gates:
        match gate:
            case LatencyGate() if gate == LatencyGate():
                limits = "'max_regression', 'p50', 'p90', 'p95', 'p99' or 'faster_than'"
                yield Finding(loc=loc, message=f"a latency gate needs {limits}")
            case ThroughputGate(max_regression=None, min=None):
                yield Finding(loc=loc, message="a throughput gate needs 'max_regression' or 'min'")
            case ColdStartGate(load=None, first=None, max_regression=None):
                yield Finding(loc=loc, message="a cold_start gate needs 'load', 'first' or 'max_regression'")
            case MemoryGate(max=None, max_regression=None):
                yield Finding(loc=loc, message="a memory gate needs 'max' or 'max_regression'")
            case LatencyGate() | ThroughputGate() | ColdStartGate() | MemoryGate():
                yield from _regression(loc, gate)
            case _:
                pass


def _regression(loc: Loc, gate: LatencyGate | ThroughputGate | ColdStartGate | MemoryGate) -> Iterator[Finding]:
    if gate.max_regression == 0:
        message = "0% cannot be shown of a model that is as good as the baseline; allow a little"
        yield Finding(loc=(*loc, "max_regression"), message=message)
    if isinstance(gate, LatencyGate) and gate.min_speedup is not None and gate.faster_than is None:
        yield Finding(loc=(*loc, "min_speedup"), message="'min_speedup' says by how much; add 'faster_than: fp32'")
