"""Requests and answers of the service of analyses, without HTTP.

Names of rollouts and revisions come from other programs. They are used in queries and answers, and
their digest names the folder of a rollout's state. Valid names are printable, short, and contain no
quotes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import parse_qsl

from annotated_types import Ge, Gt, Le, MaxLen

from onnx_ops.domain.quantities import Json
from onnx_ops.errors import UserError

VARIABLE = "ONNX_OPS_ANALYSIS_TOKEN"
MAX_BODY_BYTES = 64 * 1024
MAX_STEP = 99
_MAX_FIELDS = 16
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._:@+=/-]{0,251}[A-Za-z0-9])?")
_STEP = re.compile(r"[0-9]{1,2}")

Number = Annotated[int, Ge(0), Le(10**12)]
Step = Annotated[int, Ge(0), Le(MAX_STEP)]
SentName = Annotated[str, MaxLen(253)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisRequest:
    """A request: method, decoded path, raw query and body."""

    method: str
    path: str
    query: str = ""
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisReply:
    """A reply: status, and a JSON document or a plain text."""

    status: int
    document: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDocument:
    """Body of a request that starts a rollout.

    Keys that `policy` lacks have the values of the configured analysis.
    """

    stable: SentName
    canary: SentName
    policy: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionDocument:
    """Counts of one revision; `slow` are requests over a threshold, by guardrail."""

    requests: Number
    errors: Number = 0
    slow: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountsDocument:
    """Counts of both revisions in one interval, or since the counters' last start.

    The first kind has the id `interval`. The second kind can have the time `at` in seconds since
    the epoch, by default the time of the request. Another `origin` means that the counters
    restarted. `step` is the number of the rollout's step.
    """

    stable: RevisionDocument
    canary: RevisionDocument
    interval: SentName = ""
    at: Annotated[float, Gt(0), Le(1e12)] | None = None
    origin: SentName = ""
    step: Step = 0


FLAGGER_HOOKS = (
    "confirm-rollout",
    "pre-rollout",
    "rollout",
    "confirm-traffic-increase",
    "confirm-promotion",
    "post-rollout",
    "rollback",
    "event",
)
"""Types of Flagger's webhooks that the service accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlaggerCall:
    """A call of a webhook of Flagger; `checksum` identifies the rollout."""

    name: str
    namespace: str
    checksum: str
    stable: str
    canary: str


def parse_flagger_call(document: Mapping[str, Any]) -> FlaggerCall:
    """Return the call that the payload of a webhook describes.

    The revisions are those of `metadata`, by default the names of Flagger's workloads.

    Raises:
        UserError: a field is missing or an invalid name, or `metadata` is not an object.
    """
    name = check_name(document.get("name"), "name")
    metadata = document.get("metadata") or {}
    if not isinstance(metadata, Mapping):
        raise UserError("metadata is not a JSON object")
    return FlaggerCall(
        name=name,
        namespace=check_name(document.get("namespace"), "namespace"),
        checksum=check_name(document.get("checksum"), "checksum"),
        stable=check_name(metadata.get("stable", f"{name}-primary"), "metadata.stable"),
        canary=check_name(metadata.get("canary", name), "metadata.canary"),
    )


def check_name(value: object, what: str) -> str:
    """Return a value that a client sent if it is a valid name.

    `what` is the name of its field in the error.

    Raises:
        UserError: the value is not a string that matches `_NAME`.
    """
    if not isinstance(value, str) or _NAME.fullmatch(value) is None:
        raise UserError(
            f"{what} is not a valid name: {value!r:.80}",
            why="a name has 1 to 253 letters, digits and ._:@+=/- and begins and ends with a "
            "letter or digit",
        )
    return value


def parse_query(query: str) -> dict[str, str]:
    """Return the fields of a query.

    Raises:
        UserError: a field is repeated, or there are too many fields.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError as error:
        raise UserError(f"the query has more than {_MAX_FIELDS} fields") from error
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise UserError("a field of the query is repeated")
    return fields


def parse_step(value: object) -> int | None:
    """Return the number of a step; None if it is absent or empty.

    Raises:
        UserError: the value is not a whole number from 0 to `MAX_STEP`.
    """
    if value is None or value == "":
        return None
    if isinstance(value, bool) or _STEP.fullmatch(str(value)) is None:
        raise UserError(f"step {str(value)[:20]!r} is not a whole number from 0 to {MAX_STEP}")
    return int(str(value))
