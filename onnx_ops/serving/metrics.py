"""Counts of a server's life in Prometheus' text format."""

from __future__ import annotations

from collections import Counter

from onnx_ops.serving.endpoint import Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Requests by deployment and status. Counted on the event loop only, so that no lock is needed.

    `running` is the number of models at work now.
    """

    def __init__(self) -> None:
        self.running = 0
        self._requests: Counter[tuple[str, int]] = Counter()

    def count(self, deployment: str, status: int) -> None:
        """`deployment` is empty for a request that never reached one."""
        self._requests[deployment, status] += 1

    def text(self, snapshot: Snapshot | None) -> str:
        lines = [
            "# HELP onnx_ops_requests_total Inference requests by deployment and HTTP status.",
            "# TYPE onnx_ops_requests_total counter",
        ]
        for (deployment, status), count in sorted(self._requests.items()):
            lines.append(f'onnx_ops_requests_total{{deployment="{_escape(deployment)}",status="{status}"}} {count}')
        lines += [
            "# HELP onnx_ops_requests_running Inference requests that a model is at work on.",
            "# TYPE onnx_ops_requests_running gauge",
            f"onnx_ops_requests_running {self.running}",
        ]
        if snapshot is not None:
            lines += _of_table(snapshot)
        return "\n".join(lines) + "\n"


def _of_table(snapshot: Snapshot) -> list[str]:
    state = snapshot.table.state
    lines = [
        "# HELP onnx_ops_generation Generation of the published table.",
        "# TYPE onnx_ops_generation gauge",
        f"onnx_ops_generation {state.generation}",
        "# HELP onnx_ops_traffic_percent Share of traffic by deployment.",
        "# TYPE onnx_ops_traffic_percent gauge",
    ]
    for d in state.deployments:
        labels = {"deployment": d.name, "version": d.version, "variant": d.variant}
        text = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
        lines.append(f"onnx_ops_traffic_percent{{{text}}} {state.split.weights.get(d.name, 0)}")
    return lines


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
