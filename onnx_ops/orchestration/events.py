"""Emit Prefect events, to which automations react.

A run never fails because of an event, and waits only briefly for the server.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from onnx_ops.app.results import Summary
from onnx_ops.config.binding import refuse_options
from onnx_ops.domain.artifact import hex_digits
from onnx_ops.domain.decision import Decision, Verdict
from onnx_ops.domain.notification import (
    GATE_FAILED,
    PREFIX,
    REGISTERED,
    Notification,
    ReleaseEvent,
    build_event,
    format_model_id,
)
from onnx_ops.domain.pipeline import Pipeline
from onnx_ops.domain.plan import StageStatus
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.release import Registration
from onnx_ops.errors import OnnxOpsError, ServiceUnavailableError, UserError
from onnx_ops.plugins import EXTRAS
from onnx_ops.ports import Context, Notifier

if TYPE_CHECKING:
    from prefect.events import Event as PrefectEvent

NAME = "prefect-events"
TIMEOUT_S = 5.0
"""Time limit for the server to accept an event, in seconds."""

_log = logging.getLogger(__name__)


class PrefectEvents(Notifier):
    """Notifier that emits an event for every notification and every step of a rollout.

    Flows emit the events automatically if a server is configured. If the setting `notify` names
    this notifier, commands and `onnx-ops reconcile --watch` emit them too. The ledger records sent
    notifications under the name of the notifier, so that the next sender does not repeat them.

    Raises:
        OptionsError: there are options.
    """

    wants_steps = True
    tools = EXTRAS["prefect"]

    def __init__(self, options: Mapping[str, Json] | None = None, state: Path = Path()) -> None:
        refuse_options(options or {}, NAME)

    def send(self, notification: Notification) -> None:
        """Emit the notification as an event."""
        post([build_event(notification)])

    def check(self) -> str:
        """Return a text with the address of the server, which is not contacted.

        Raises:
            UserError: no server is configured.
        """
        return f"as events, to Prefect's server at {_server()}"


def with_events(context: Context) -> Context:
    """Return a context with an additional first notifier, which emits events.

    Without a configured server, the context is returned unchanged.
    """
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value():
        return context
    return replace(context, notifiers=lambda: {NAME: PrefectEvents(), **context.notifiers()})


def emit_run_events(context: Context, pipeline: Pipeline, summary: Summary) -> None:
    """Emit the new gate failures and the new release of a pipeline's run.

    Events of cached results were emitted by an earlier run. Failures are logged, also that no
    server is configured.
    """
    events = tuple(run_events(pipeline, summary, context.clock.now()))
    if not events:
        return
    try:
        post(events)
    except OnnxOpsError as error:
        _log.info("no events: %s", error)


def run_events(pipeline: Pipeline, summary: Summary, now: float) -> Iterator[ReleaseEvent]:
    """Yield the events of a run for new failures and a new release.

    There is one event for each new failure of a variant on a target, and one for the release if it
    is new.
    """
    done = {outcome.stage for outcome in summary.outcomes if outcome.status is StageStatus.DONE}
    registered = summary.registration
    model = pipeline.register.model if pipeline.register is not None else summary.pipeline
    common: dict[str, Any] = {"resource": format_model_id(model), "name": model, "at": now}
    for decision in summary.decisions:
        # An earlier run has emitted the events of a stage that was not executed.
        if (
            decision.verdict is Verdict.FAIL
            and f"gate/{decision.variant}@{decision.target}" in done
        ):
            yield _describe_failure(decision, summary, common)
    if registered is not None and "register" in done:
        yield _describe_release(registered, summary, common)


def _describe_failure(
    decision: Decision, summary: Summary, common: Mapping[str, Any]
) -> ReleaseEvent:
    registered = summary.registration
    chosen = next(
        (
            choice.variant
            for choice in reversed(summary.choices)
            if choice.target == decision.target
        ),
        None,
    )
    return ReleaseEvent(
        event=GATE_FAILED,
        **common,
        labels={
            f"{PREFIX}target": decision.target,
            f"{PREFIX}served": "no" if chosen is None else "yes",
        },
        payload={
            "what": f"{decision.variant} failed on {decision.target}",
            "why": decision.reason,
            "pipeline": summary.pipeline,
            "variant": decision.variant,
            "target": decision.target,
            "version": registered.versions.get(decision.variant, "")
            if registered is not None
            else "",
            "chosen": chosen,
            "gates": [
                gate for gate, verdict in decision.verdicts.items() if verdict is Verdict.FAIL
            ],
            "link": registered.report if registered is not None else "",
        },
    )


def _describe_release(
    registered: Registration, summary: Summary, common: Mapping[str, Any]
) -> ReleaseEvent:
    return ReleaseEvent(
        event=REGISTERED,
        **common,
        payload={
            "what": f"release {hex_digits(registered.release)[:12]} of {common['name']} "
            "is registered",
            "why": "; ".join(
                f"{c.target}: {c.variant or 'no variant'} ({c.reason})" for c in summary.choices
            ),
            "pipeline": summary.pipeline,
            "release": registered.release,
            "versions": dict(registered.versions),
            "chosen": {choice.target: choice.variant for choice in summary.choices},
            "awaiting": list(summary.awaiting),
            "left": [promotion.explain_left() for promotion in summary.left],
            "link": registered.report,
        },
    )


def post(events: Sequence[ReleaseEvent]) -> None:
    """Send events to the server and wait until it has accepted them.

    Prefect's `emit_event` is not used. It passes events to a thread, which drops them if the server
    is down, and delays the end of the process. A ledger must not record unsent events as sent.

    Raises:
        ServiceUnavailableError: the server does not answer, or refuses the events.
        UserError: no server is configured.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    where = _server()
    documents = [_prefects(event).model_dump(mode="json") for event in events]
    try:
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(sync_client=True, httpx_settings={"timeout": TIMEOUT_S}) as client,
        ):
            client.request("POST", "/events", json=documents)
    # Prefect's client raises RuntimeError if the server's version is incompatible.
    except (httpx.HTTPError, RuntimeError) as error:
        raise ServiceUnavailableError(
            "Prefect's server did not accept the events", where=where, why=type(error).__name__
        ) from None


def _server() -> str:
    from prefect.settings import PREFECT_API_URL

    if url := PREFECT_API_URL.value():
        return str(url)
    raise UserError(
        "events need a Prefect server, and none is configured",
        where="PREFECT_API_URL",
        remedy="Run `prefect config set PREFECT_API_URL=http://HOST:4200/api`.",
    )


def _prefects(event: ReleaseEvent) -> PrefectEvent:
    from prefect import runtime
    from prefect.events import Event as PrefectEvent

    related = {**event.related}
    if runtime.flow_run.id:
        related["flow-run"] = f"prefect.flow-run.{runtime.flow_run.id}"
    identity = {} if event.key is None else {"id": UUID(hex_digits(event.key)[:32])}
    return PrefectEvent.model_validate(
        {
            "occurred": event.at,
            "event": event.event,
            "resource": {
                "prefect.resource.id": event.resource,
                "prefect.resource.name": event.name,
                **event.labels,
            },
            "related": [
                {"prefect.resource.id": one, "prefect.resource.role": role}
                for role, one in related.items()
            ],
            "payload": dict(event.payload),
            **identity,
        }
    )
