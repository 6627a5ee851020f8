"""Which series are an endpoint's, and the one query that gets them all."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from onnx_ops.errors import UserError

Scalar = str | int | float | bool

_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What series and labels are called; the defaults are the endpoint server's own.

    `select` are further labels that all series must have, as `job=serving, namespace=prod`. `origin` is a series that
    changes its labels or its value when the counters begin anew, such as `process_start_time_seconds`.
    """

    endpoint_label: str = "endpoint"
    deployment_label: str = "deployment"
    status_label: str = "status"
    requests: str = "onnx_ops_requests_total"
    histogram: str = "onnx_ops_service_seconds"
    origin: str = "onnx_ops_counts"
    select: str = ""

    @property
    def own(self) -> bool:
        """Whether the counts are those of an onnx-ops server, which tells more than requests."""
        return (self.requests, self.origin) == ("onnx_ops_requests_total", "onnx_ops_counts")

    def query(self, endpoint: str, counters: Sequence[str], scraped: str) -> str:
        """Everything about an endpoint at one moment.

        Args:
            endpoint: its name, which is the value of its label.
            counters: further series by deployment, where the server is one of ours.
            scraped: label by which the times of the scrapes are told from the counts.
        """
        chosen = _matchers(_selected(self.select))
        ours = [f"{self.endpoint_label}={_quoted(endpoint)}", *chosen]
        metrics = [self.requests, f"{self.histogram}_bucket", *(counters if self.own else ())]
        origin = f"{self.origin}{{{','.join(ours if self.own else chosen)}}}"
        named = f"__name__=~{_quoted('|'.join(metrics))}"
        series = f"{{{','.join([named, *ours])}}}"
        return f'{origin} or label_replace(timestamp({origin}), "{scraped}", "yes", "", "") or {series}'


def names_of(settings: Mapping[str, Scalar]) -> Names:
    """The names in an endpoint's settings.

    Raises:
        UserError: a setting is not known, or its value is no name.
    """
    known = [f.name for f in fields(Names)]
    for key, value in settings.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known: url, {', '.join(known)}."
            raise UserError(f"prometheus has no setting {key!r}", remedy=hint)
        pattern = _LABEL if key.endswith("_label") else _METRIC
        if key != "select" and not (isinstance(value, str) and pattern.fullmatch(value)):
            what = "label" if key.endswith("_label") else "metric"
            raise UserError(f"{key}: {value!r} is no name of a {what}", remedy="Letters, digits and underscores.")
    _selected(str(settings.get("select", "")))
    return Names(**{key: str(value) for key, value in settings.items()})


def _selected(text: str) -> dict[str, str]:
    found = {}
    for part in filter(None, map(str.strip, text.split(","))):
        label, equals, value = (piece.strip() for piece in part.partition("="))
        if not (equals and _LABEL.fullmatch(label)):
            raise UserError(f"select: {part!r} is not label=value", remedy="For example: job=serving, namespace=prod")
        found[label] = value
    return found


def _matchers(labels: Mapping[str, str]) -> list[str]:
    return [f"{label}={_quoted(value)}" for label, value in labels.items()]


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
