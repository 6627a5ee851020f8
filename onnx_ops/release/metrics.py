"""What endpoints owe, as metrics: for an alarm that does not depend on a message that somebody has to read."""

from __future__ import annotations

import json

from onnx_ops.ports import Ports
from onnx_ops.release.journal import bound_endpoints, readable


def owed_metrics(ports: Ports) -> str:
    """Rollbacks and deletions that are owed, in Prometheus' text format: 0 where nothing is.

    Raises:
        ServiceUnavailableError: the ledger does not answer.
    """
    now = ports.clock.now()
    states = [readable(ports, name) for name in bound_endpoints(ports)]
    rollbacks = {s.endpoint: max(0.0, now - s.pending_rollback.at) if s.pending_rollback else 0.0 for s in states}
    return "".join(
        (
            *_gauge("onnx_ops_rollback_owed_seconds", "Age of the rollback that is owed.", rollbacks),
            *_gauge(
                "onnx_ops_rollback_failed_attempts",
                "Attempts to roll back that failed.",
                {s.endpoint: s.pending_rollback.attempts if s.pending_rollback else 0 for s in states},
            ),
            *_gauge(
                "onnx_ops_deletion_owed",
                "Whether the endpoint is still to be deleted.",
                {s.endpoint: int(s.deleting) for s in states},
            ),
        )
    )


def _gauge(name: str, text: str, values: dict[str, float] | dict[str, int]) -> list[str]:
    samples = [f"{name}{{endpoint={json.dumps(endpoint)}}} {value:g}\n" for endpoint, value in sorted(values.items())]
    return [f"# HELP {name} {text}\n# TYPE {name} gauge\n", *samples]
