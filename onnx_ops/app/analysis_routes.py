"""The HTTP API of the service of analyses.

`/v1/rollouts` is for scripts. It also shows and forgets rollouts of Argo Rollouts and Flagger. The
name of a rollout of Flagger is `NAMESPACE/NAME`, so a name in the path can contain slashes.

`/v1/argo` is for the web metric of Argo Rollouts. A reply of 200 is a measurement. `fail` meets the
failureCondition, `pass` the successCondition, and `inconclusive` neither of them. After
`inconclusive`, Argo measures again up to its `inconclusiveLimit`, and then pauses. Missing counts
are `inconclusive`. A wrong request has another status, which Argo counts as an error; errors abort
the rollout after `consecutiveErrorLimit`. No reply about a fault is a success.

`/v1/flagger` is for the webhooks of Flagger. Flagger reads only the status, and shows the text of a
refusal in its events. The kind of the webhook is in the path, since the payload does not have it.
Most kinds are answered with 200 only for `pass`. There are these exceptions:

- `rollback`: 200 only for `fail`, since Flagger then rolls back.
- `confirm-rollout` and `pre-rollout`: the canary has no traffic yet. 200 if the counts of the
  stable revision are recorded, and the verdict is not `fail`.
- `confirm-traffic-increase`: Flagger also calls this webhook before the first traffic, which is
  permitted once.
- `post-rollout` and `event`: nothing depends on the status.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from onnx_ops import codec
from onnx_ops.app.analysis import AnalysisAnswer, AnalysisService, ClientCounts
from onnx_ops.config.analysis import bind_policy
from onnx_ops.config.binding import bind_options
from onnx_ops.domain.artifact import digest_json
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.rollout_analysis import AnalysisVerdict, RolloutKey, make_document
from onnx_ops.domain.rollout_observations import RequestCounts
from onnx_ops.domain.rollout_policy import LATENCY_QUANTILES
from onnx_ops.errors import (
    CorruptStateError,
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    TooLargeError,
    UserError,
)
from onnx_ops.protocol.analysis import (
    FLAGGER_HOOKS,
    AnalysisReply,
    AnalysisRequest,
    CountsDocument,
    RevisionDocument,
    StartDocument,
    check_name,
    parse_flagger_call,
    parse_query,
    parse_step,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")
_STATUSES: Mapping[type[OnnxOpsError], int] = {
    NotFoundError: 404,
    TooLargeError: 413,
    UserError: 400,
    RefusedError: 409,
}
_ARGO_FIELDS = frozenset({"stable", "canary", "step"})
_NOT_ALLOWED = AnalysisReply(status=405, document={"error": "method not allowed"})


class AnalysisRoutes:
    """Handlers of the requests to a service of analyses."""

    def __init__(self, service: AnalysisService) -> None:
        self._service = service
        self._routes: Mapping[str, Callable[[AnalysisRequest, list[str]], AnalysisReply]] = {
            "argo": self._handle_argo,
            "flagger": self._handle_flagger,
            "rollouts": self._handle_rollout,
        }

    def handle(self, request: AnalysisRequest) -> AnalysisReply:
        """Return the reply to a request; errors become replies."""
        try:
            return self._dispatch(request)
        except OnnxOpsError as error:
            return make_error_reply(error)
        except Exception:
            # A fault must neither end the service nor count as success.
            _log.exception("%s %s", request.method, request.path)
            return AnalysisReply(status=500, document={"error": "internal error"})

    def _dispatch(self, request: AnalysisRequest) -> AnalysisReply:
        parts = request.path.split("/")
        route = self._routes.get(parts[2]) if parts[:2] == ["", "v1"] and len(parts) > 3 else None
        if route is None:
            raise NotFoundError("no such address")
        return route(request, parts[3:])

    def _handle_rollout(self, request: AnalysisRequest, parts: list[str]) -> AnalysisReply:
        """Start, show or forget a rollout, or add counts to it.

        In GET and DELETE requests, `counts` at the end of the path is part of the name.
        """
        if len(parts) < 2:
            raise NotFoundError("no such address")
        fields = parse_query(request.query)
        has_body = request.method in ("PUT", "POST")
        is_counts = has_body and len(parts) > 2 and parts[-1] == "counts"
        names = {
            name: check_name(fields[name], name)
            for name in ("stable", "canary", "checksum")
            if name in fields
        }
        key = RolloutKey(
            analysis=check_name(parts[0], "analysis"),
            rollout=check_name("/".join(parts[1:-1] if is_counts else parts[1:]), "rollout"),
            **names,
        )
        match request.method, is_counts:
            case "PUT" | "POST", False:
                return _reply(self._start(key, request.body))
            case "POST", True:
                return _reply(self._service.add_counts(key, _parse_counts(request.body)))
            case "GET", False:
                return _reply(self._service.show(key))
            case "DELETE", False:
                if not self._service.forget(key):
                    raise NotFoundError("the rollout was not started, or was deleted")
                return AnalysisReply(status=200, document={"forgotten": True})
            case _:
                return _NOT_ALLOWED

    def _handle_argo(self, request: AnalysisRequest, parts: list[str]) -> AnalysisReply:
        """Return a measurement for the web metric of Argo Rollouts.

        The revisions and the step are in the query, or in the body of a POST or PUT. The query
        takes precedence.
        """
        if len(parts) != 2:
            raise NotFoundError("no such address")
        fields: Mapping[str, Json] = parse_query(request.query)
        if request.body and request.method in ("POST", "PUT"):
            fields = {**parse_body(request.body), **fields}
        elif request.method not in ("GET", "POST", "PUT"):
            return _NOT_ALLOWED
        if unknown := sorted(set(fields) - _ARGO_FIELDS):
            raise UserError(f"unknown field {unknown[0][:80]!r}", why="known: stable, canary, step")
        stable, canary = (check_name(fields.get(name), name) for name in ("stable", "canary"))
        key = RolloutKey(
            analysis=check_name(parts[0], "analysis"),
            rollout=check_name(parts[1], "rollout"),
            stable=stable,
            canary=canary,
        )
        return _reply(self._service.observe(key, stable, canary, parse_step(fields.get("step"))))

    def _handle_flagger(self, request: AnalysisRequest, parts: list[str]) -> AnalysisReply:
        """Answer a webhook of Flagger."""
        if len(parts) != 2 or parts[1] not in FLAGGER_HOOKS:
            raise NotFoundError("no such webhook", remedy=f"Known: {', '.join(FLAGGER_HOOKS)}.")
        if request.method != "POST":
            return _NOT_ALLOWED
        hook = parts[1]
        call = parse_flagger_call(parse_body(request.body))
        key = RolloutKey(
            analysis=check_name(parts[0], "analysis"),
            rollout=f"{call.namespace}/{call.name}",
            stable=call.stable,
            canary=call.canary,
            checksum=call.checksum,
        )
        if hook in ("post-rollout", "event"):
            self._service.get_settings(key.analysis)
            return AnalysisReply(status=200, document="noted\n")
        answer = self._service.observe(key, call.stable, call.canary)
        return _make_hook_reply(answer.verdict, is_open=self._allows(hook, answer))

    def _allows(self, hook: str, answer: AnalysisAnswer) -> bool:
        """Return whether a webhook of Flagger lets the rollout continue, or roll back."""
        kind = answer.verdict.verdict
        match hook:
            case "rollback":
                return kind == "fail"
            case "confirm-rollout" | "pre-rollout":
                return answer.is_ready and kind != "fail"
            case "confirm-traffic-increase":
                return kind == "pass" or self._service.open_traffic(answer)
            case _:
                return kind == "pass"

    def _start(self, key: RolloutKey, body: bytes) -> AnalysisAnswer:
        document = _bind(parse_body(body), StartDocument)
        settings = self._service.get_settings(key.analysis)
        return self._service.start(
            key,
            check_name(document.stable, "stable"),
            check_name(document.canary, "canary"),
            bind_policy(document.policy, settings),
        )


def make_error_reply(error: OnnxOpsError) -> AnalysisReply:
    """Return the reply about an error; a fault of a service or of the state is 503."""
    status = next((code for kind, code in _STATUSES.items() if isinstance(error, kind)), 503)
    document = {"error": error.what, "where": error.where, "why": error.why}
    return AnalysisReply(status=status, document={**document, "remedy": error.remedy})


def parse_body(body: bytes) -> dict[str, Json]:
    """Return the JSON object of a body.

    Raises:
        UserError: the body is not a JSON object.
    """
    try:
        return codec.loads(body, dict[str, Any])
    except CorruptStateError as error:
        raise UserError("the body is not a JSON object") from error


def _make_hook_reply(verdict: AnalysisVerdict, *, is_open: bool) -> AnalysisReply:
    """Return 200, or 409 for a refusal.

    With `retries` in its webhook, Flagger retries a call after 5xx, but not after 409.
    """
    text = f"{verdict.verdict}: {verdict.reason}\n"
    return AnalysisReply(status=200 if is_open else 409, document=text)


def _reply(answer: AnalysisAnswer) -> AnalysisReply:
    return AnalysisReply(status=200, document=make_document(answer.state, answer.verdict))


def _bind(document: dict[str, Json], kind: type[T]) -> T:
    return bind_options(document, kind, where="body")


def _parse_counts(body: bytes) -> ClientCounts:
    document = _bind(parse_body(body), CountsDocument)
    if document.interval:
        check_name(document.interval, "interval")
        if document.at is not None or document.origin:
            raise UserError("counts with 'interval' must not have 'at' or 'origin'")
    sent = codec.to_json(document)
    return ClientCounts(
        stable=_make_counts(document.stable, "stable"),
        canary=_make_counts(document.canary, "canary"),
        step=parse_step(document.step),
        interval=document.interval,
        digest=digest_json(sent),
        origin=document.origin,
        at=document.at,
    )


def _make_counts(document: RevisionDocument, what: str) -> RequestCounts:
    unknown = sorted(set(document.slow) - set(LATENCY_QUANTILES))
    if unknown:
        known = ", ".join(LATENCY_QUANTILES)
        raise UserError(f"'slow' has the unknown key {unknown[0][:80]!r}", why=f"known: {known}")
    counts = RequestCounts(requests=document.requests, errors=document.errors)
    counts = counts.with_over(dict(document.slow))
    if not counts.is_consistent:
        raise UserError(f"{what} has more errors or slow requests than requests")
    return counts
