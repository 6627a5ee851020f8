"""The configuration of `onnx-ops analysis serve`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le, MinLen, doc

from onnx_ops.config.binding import bind, bind_document
from onnx_ops.config.document import Document, Issue, Loc
from onnx_ops.config.substitution import read_document
from onnx_ops.domain.quantities import Json, Name, Pattern, Seconds
from onnx_ops.domain.rollout_analysis import AnalysisPolicy
from onnx_ops.domain.rollout_policy import DAY
from onnx_ops.errors import ConfigError, UserError

MetricName = Annotated[str, Pattern("[a-zA-Z_:][a-zA-Z0-9_:]*", "the name of a metric")]
LabelName = Annotated[str, Pattern("[a-zA-Z_][a-zA-Z0-9_]*", "the name of a label")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSelection:
    """Series of the requests counter that count errors, or another counter of errors."""

    label: Annotated[LabelName | None, doc("Label of `requests` that shows an error.")] = None
    values: Annotated[tuple[str, ...], doc("Values of `label` that are errors.")] = ()
    regex: Annotated[
        str | None, doc("Regular expression of whole values of `label` that are errors.")
    ] = None
    counter: Annotated[
        MetricName | None, doc("Counter of failed requests, instead of `label`.")
    ] = None

    def matches(self, value: str) -> bool:
        """Return whether a value of the label is an error."""
        if value in self.values:
            return True
        return self.regex is not None and re.fullmatch(self.regex, value) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusCounters:
    """A Prometheus server, and the names of series and labels in it."""

    url: Annotated[
        str,
        Pattern("https?://[^/]+.*", "an http address"),
        doc("Address of the HTTP API."),
    ]
    requests: Annotated[MetricName, doc("Counter of requests.")]
    errors: Annotated[ErrorSelection, doc("Which requests are errors.")]
    revision_label: Annotated[LabelName, doc("Label whose value is the revision.")]
    histogram: Annotated[
        MetricName | None,
        doc("Classic histogram of latencies in any unit, without `_bucket`."),
    ] = None
    origin: Annotated[
        MetricName,
        doc("Series of the same targets that changes when their counters restart."),
    ] = "process_start_time_seconds"
    select: Annotated[
        Mapping[LabelName, str], doc("Labels that all series of counters must have.")
    ] = field(default_factory=dict)
    origin_select: Annotated[
        Mapping[LabelName, str] | None,
        doc("Labels that the series of `origin` must have; default: `select`."),
    ] = None
    timeout: Annotated[Seconds, Le(60), doc("Longest time of a query.")] = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisSettings(AnalysisPolicy):
    """One named analysis: its counters, and its policy."""

    prometheus: Annotated[
        PrometheusCounters | None,
        doc("Source of the counts; without this section, clients send the counts."),
    ] = None

    @property
    def policy(self) -> AnalysisPolicy:
        """The policy alone, which is recorded at the start of a rollout."""
        return AnalysisPolicy(
            guardrails=self.guardrails,
            min_requests=self.min_requests,
            slo=self.slo,
            assignment=self.assignment,
            interval=self.interval,
            max_duration=self.max_duration,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisServiceConfig:
    """The whole configuration file of the service of analyses."""

    state: Annotated[
        str, MinLen(1), doc("Folder or URL of recorded counts; relative to the folder of the file.")
    ]
    listen: Annotated[
        str,
        Pattern(r"(\[[0-9a-fA-F:]+\]|[^:\[\]]+):\d{1,5}", "HOST:PORT"),
        doc("Address of the service."),
    ] = "127.0.0.1:8651"
    token_file: Annotated[
        str | None,
        doc(
            "Private file with the bearer token that clients must send; "
            "not read if the environment variable ONNX_OPS_ANALYSIS_TOKEN is set."
        ),
    ] = None
    keep: Annotated[
        Seconds,
        Ge(DAY),
        doc("Time from a rollout's last entry to its deletion; at least its `max_duration`."),
    ] = 30 * DAY
    analyses: Annotated[Mapping[Name, AnalysisSettings], MinLen(1), doc("Analyses by name.")]


def load_analysis_config(path: Path) -> AnalysisServiceConfig:
    """Return the configuration of a file.

    `state` and `token_file` are returned as written: callers resolve relative paths from the folder
    of the file.

    Raises:
        NotFoundError, UserError: the file is missing, or cannot be read.
        ConfigError: the file has problems; the error contains their positions. The rules of
            analyses are checked only if each value is valid.
    """
    document: Document = read_document(path)
    binding = bind_document(document, AnalysisServiceConfig)
    config: AnalysisServiceConfig | None = binding.value
    if config is not None:
        for name, settings in config.analyses.items():
            document.issues += _check_analysis(("analyses", name), settings)
    if config is None or document.issues:
        raise ConfigError(tuple(document.problems()))
    return config


def bind_policy(given: Mapping[str, Json], settings: AnalysisSettings) -> AnalysisPolicy:
    """Return the policy that a client sends; missing keys are those of its analysis.

    Raises:
        UserError: the policy has problems.
    """
    from onnx_ops.config.document import path_text

    binding = bind(dict(given), AnalysisPolicy)
    issues = binding.issues
    if not issues:
        values = {name: getattr(binding.value, name) for name in given}
        settings = replace(settings, **values)
        issues = [*_check_policy((), settings)]
    if issues:
        texts = [f"{path_text(('policy', *each.loc))}: {each.message}" for each in issues]
        raise UserError("; ".join(texts))
    return settings.policy


def _check_analysis(where: Loc, settings: AnalysisSettings) -> Iterator[Issue]:
    yield from _check_policy(where, settings)
    source = settings.prometheus
    if source is None:
        return
    errors, here = source.errors, (*where, "prometheus", "errors")
    if (errors.label is None) is (errors.counter is None):
        yield Issue(here, "expected either 'label' or 'counter'")
    elif errors.label is not None and not errors.values and errors.regex is None:
        yield Issue(here, "'label' needs 'values' or 'regex'")
    elif errors.counter is not None and (errors.values or errors.regex is not None):
        yield Issue(here, "'values' and 'regex' need 'label'")
    if errors.regex is not None:
        try:
            re.compile(errors.regex)
        except re.error as error:
            yield Issue((*here, "regex"), f"not a regular expression: {error}")


def _check_policy(where: Loc, policy: AnalysisSettings) -> Iterator[Issue]:
    source = policy.prometheus
    if (
        source is not None
        and source.histogram is None
        and any(rail.name != "errors" for rail in policy.guardrails)
    ):
        yield Issue(
            (*where, "guardrails"), "guardrails except 'errors' need 'prometheus.histogram'"
        )
    seen: set[str] = set()
    for index, rail in enumerate(policy.guardrails):
        here = (*where, "guardrails", index)
        if rail.name == "cold_start":
            yield Issue(here, "guardrail 'cold_start' needs a server of onnx-ops")
        elif rail.max is not None:
            yield Issue((*here, "max"), "'max' is for guardrail 'cold_start' only")
        if rail.name in seen:
            yield Issue(here, f"guardrail '{rail.name}' is named twice")
        if rail.name == "errors" and rail.max_latency_increase is not None:
            message = (
                "'max_latency_increase' is for latency guardrails; 'errors' takes 'odds_ratio'"
            )
            yield Issue((*here, "max_latency_increase"), message)
        seen.add(rail.name)
    if policy.interval >= policy.max_duration:
        yield Issue((*where, "interval"), "'interval' must be shorter than 'max_duration'")
