"""Which series are an endpoint's, and the one query that gets them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from onnx_ops.domain.quantities import Pattern

_Metric = Annotated[str, Pattern("[a-zA-Z_:][a-zA-Z0-9_:]*", "the name of a metric")]
_Label = Annotated[str, Pattern("[a-zA-Z_][a-zA-Z0-9_]*", "the name of a label")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What series and labels are called; the defaults are the endpoint server's own.

    `select` are further labels that all series must have, as `{job: serving, namespace: prod}`. `origin` is a series
    that changes its labels or its value when the counters begin anew, such as `process_start_time_seconds`.
    """

    endpoint_label: _Label = "endpoint"
    deployment_label: _Label = "deployment"
    status_label: _Label = "status"
    requests: _Metric = "onnx_ops_requests_total"
    histogram: _Metric = "onnx_ops_service_seconds"
    origin: _Metric = "onnx_ops_counts"
    select: Mapping[_Label, str] = field(default_factory=dict)

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
        chosen = _matchers(self.select)
        ours = [f"{self.endpoint_label}={_quoted(endpoint)}", *chosen]
        metrics = [self.requests, f"{self.histogram}_bucket", *(counters if self.own else ())]
        origin = f"{self.origin}{{{','.join(ours if self.own else chosen)}}}"
        named = f"__name__=~{_quoted('|'.join(metrics))}"
        series = f"{{{','.join([named, *ours])}}}"
        return f'{origin} or label_replace(timestamp({origin}), "{scraped}", "yes", "", "") or {series}'


def _matchers(labels: Mapping[str, str]) -> list[str]:
    return [f"{label}={_quoted(value)}" for label, value in labels.items()]


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
