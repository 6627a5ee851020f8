"""Events for programs: what people are told, and each step of a rollout, under names that can be relied on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnx_ops.domain.artifact import Digest, digest_json
from onnx_ops.domain.notification import Notification, What
from onnx_ops.domain.quantities import Json

PREFIX = "onnx-ops."

NAMES: Mapping[What, str] = {
    What.STARTED: "onnx-ops.rollout.started",
    What.ADVANCED: "onnx-ops.rollout.advanced",
    What.FINISHED: "onnx-ops.rollout.finished",
    What.ROLLED_BACK: "onnx-ops.rollout.rolled-back",
    What.WITHDRAWN: "onnx-ops.rollout.withdrawn",
    What.HELD: "onnx-ops.rollout.held",
    What.PAUSED: "onnx-ops.rollout.paused",
    What.OPERATOR: "onnx-ops.rolled-back",
    What.REFUSED: "onnx-ops.alias.refused",
    What.TROUBLE: "onnx-ops.endpoint.trouble",
    What.DRIFTED: "onnx-ops.champion.drifted",
    What.TEST: "onnx-ops.test",
}

GATE_FAILED = "onnx-ops.gate.failed"
REGISTERED = "onnx-ops.release.registered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a resource.

    `resource` is `onnx-ops.endpoint.NAME` or `onnx-ops.model.NAME`, `name` how people call it; `labels` are what
    triggers can filter by. `related` are other resources by their role. `at` is seconds since the epoch. `key` is the
    same whenever the same thing is told again; None where nothing tells one occurrence from another.
    """

    event: str
    resource: str
    name: str
    at: float
    payload: Mapping[str, Json]
    labels: Mapping[str, str] = field(default_factory=dict)
    related: Mapping[str, str] = field(default_factory=dict)
    key: Digest | None = None


def endpoint_id(name: str) -> str:
    return f"{PREFIX}endpoint.{name}"


def model_id(name: str) -> str:
    return f"{PREFIX}model.{name}"


def event_of(notice: Notification) -> Event:
    """The event of a notification. What is in no ledger is about a model, everything else about an endpoint."""
    drift = notice.what is What.DRIFTED
    payload: dict[str, Json] = {
        "what": notice.headline,
        "why": notice.why,
        "version": notice.version,
        "serving": notice.serving,
        "model": notice.model,
        "actor": notice.actor,
        "sequence": notice.sequence,
        "commands": dict(notice.commands),
        "link": notice.link,
    }
    return Event(
        event=NAMES[notice.what],
        resource=model_id(notice.model) if drift else endpoint_id(notice.endpoint),
        name=notice.endpoint,
        at=notice.at,
        payload=payload,
        labels={f"{PREFIX}severity": notice.severity.value},
        related={"model": model_id(notice.model)} if notice.model and not drift else {},
        key=digest_json([notice.endpoint, notice.sequence, notice.what.value, notice.at]) if notice.sequence else None,
    )
