"""Counts of two revisions of any service, from its metrics in Prometheus.

One query reads all series, so all counts of an instance come from the same scrape. Series of one
revision, such as those of several instances and status codes, are added up. Series that a second
scrape or a replica of Prometheus stores again are refused, since their sum would count each request
twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from onnx_ops.adapters.metrics.prometheus_api import (
    make_answer_error,
    query_prometheus,
    quote_text,
)
from onnx_ops.adapters.server_metrics import count_slower
from onnx_ops.config.analysis import PrometheusCounters
from onnx_ops.domain.artifact import digest_json, short_digest
from onnx_ops.domain.rollout_observations import LatencyThresholds, MetricsReading, RequestCounts
from onnx_ops.errors import ServiceUnavailableError

_MARK = "onnx_ops_mark"
"""Label that marks samples which are not series of the service."""
_SCRAPED, _KNOWN = "scraped", "known"
COPY_LABELS = ("job", "prometheus", "prometheus_replica", "receive_replica", "replica", "reporter")
"""Labels in which the copies of one series differ.

The labels are those of a second job, of replicas of Prometheus and Thanos, and of the two ends of a
connection in Istio.
"""

Labels = dict[str, str]


@dataclass(slots=True)
class RevisionCounts:
    """Counts of one revision since its targets started; `buckets` are cumulative."""

    requests: int = 0
    errors: int = 0
    buckets: dict[float, int] = field(default_factory=lambda: defaultdict(int))

    def count(self, thresholds: LatencyThresholds | None) -> RequestCounts:
        """Return the counts, with those over the thresholds."""
        timed = max(self.buckets.values(), default=None)
        limits = {} if thresholds is None else thresholds.by_guardrail()
        # The tolerance allows for bounds that are rounded to six digits.
        return RequestCounts(requests=self.requests, errors=self.errors, timed=timed).with_over(
            {
                place: count_slower(self.buckets, timed or 0, limit_s, 1e-4)
                for place, limit_s in limits.items()
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionsReading:
    """Counts of the revisions with series, at the time `at` of their oldest scrape."""

    at: float
    origin: str
    revisions: Mapping[str, RevisionCounts]

    def make_reading(self, thresholds: Mapping[str, LatencyThresholds | None]) -> MetricsReading:
        """Return the counts with those over the thresholds of each revision."""
        return MetricsReading(
            at=self.at,
            origin=self.origin,
            tallies={
                revision: counts.count(thresholds.get(revision))
                for revision, counts in self.revisions.items()
            },
        )

    def latencies(self, revision: str) -> tuple[Sequence[float], Sequence[int]] | None:
        """Return the histogram of a revision; its bounds have the unit of the series.

        The result is None if there is no histogram with bounds from above zero to `+Inf`.
        """
        counts = self.revisions.get(revision)
        if counts is None or not counts.buckets:
            return None
        ordered = sorted(counts.buckets)
        if ordered[0] <= 0 or math.isfinite(ordered[-1]):
            return None
        below = [0, *(counts.buckets[bound] for bound in ordered)]
        numbers = [later - earlier for earlier, later in pairwise(below)]
        return [bound for bound in ordered if math.isfinite(bound)], numbers


class RevisionCounters:
    """Counters of the revisions of one analysis.

    Args:
        name: name of the analysis, for errors.
    """

    def __init__(self, name: str, settings: PrometheusCounters) -> None:
        self._name = name
        self._settings = settings
        self._url = settings.url.rstrip("/")

    def read(self, stable: str, canary: str) -> RevisionsReading:
        """Return the counts of both revisions at the last scrape.

        Raises:
            ServiceUnavailableError: the query of Prometheus fails, or the series are missing,
                stored twice or contradictory.
            UserError: a token is set, and must not be sent to the address of Prometheus.
        """
        samples = query_prometheus(
            self._url,
            self.build_query(stable, canary),
            where=self._name,
            timeout_s=self._settings.timeout,
        )
        parsed = [self._parse(sample) for sample in samples]
        self._require_single([labels for labels, _ in parsed if _MARK not in labels])
        marked = defaultdict[str, list[float]](list)
        origins, series = [], []
        for labels, value in parsed:
            if _MARK in labels:
                marked[labels[_MARK]].append(value)
            elif labels.get("__name__") == self._settings.origin:
                origins.append([sorted(labels.items()), repr(value)])
            else:
                series.append((labels, value))
        self._require_series(marked, series)
        revisions = self._sum(series)
        for revision, counts in revisions.items():
            if counts.errors > counts.requests:
                raise self._fail(
                    f"revision {revision} has more errors ({counts.errors:.0f}) than requests "
                    f"({counts.requests:.0f})"
                )
        return RevisionsReading(
            at=min(marked[_SCRAPED]),
            origin=short_digest(digest_json(sorted(origins))),
            revisions=revisions,
        )

    def build_query(self, stable: str, canary: str) -> str:
        """Return the query for the counters of both revisions and their scrape times."""
        settings = self._settings
        origin_select = (
            settings.select if settings.origin_select is None else settings.origin_select
        )
        origin = _select(settings.origin, origin_select)
        metrics = [settings.requests]
        if settings.errors.counter is not None:
            metrics.append(settings.errors.counter)
        if settings.histogram is not None:
            metrics.append(f"{settings.histogram}_bucket")
        parts = [origin, _mark(f"timestamp({origin})", _SCRAPED)]
        if settings.errors.counter is not None:
            parts.append(
                _mark(f"count({_select(settings.errors.counter, settings.select)})", _KNOWN)
            )
        for revision in (stable, canary):
            matchers = [
                f"__name__=~{quote_text('|'.join(metrics))}",
                f"{settings.revision_label}={quote_text(revision)}",
                *_match(settings.select),
            ]
            parts.append(f"{{{','.join(matchers)}}}")
        return " or ".join(parts)

    def _parse(self, sample: Any) -> tuple[Labels, float]:
        try:
            labels, value = dict(sample["metric"]), float(sample["value"][1])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise make_answer_error(self._name, sample) from error
        if not math.isfinite(value) or value < 0:
            raise make_answer_error(self._name, sample)
        return labels, value

    def _require_single(self, series: Sequence[Labels]) -> None:
        """Raise an error if a series other than the origin is stored more than once."""
        seen: dict[tuple[tuple[str, str], ...], Labels] = {}
        for labels in series:
            identity = tuple(
                sorted((key, value) for key, value in labels.items() if key not in COPY_LABELS)
            )
            other = seen.setdefault(identity, labels)
            if other is not labels and labels.get("__name__") != self._settings.origin:
                differing = [
                    f"{key}={each.get(key, '')!r}"
                    for key in COPY_LABELS
                    for each in (other, labels)
                    if other.get(key) != labels.get(key)
                ]
                raise self._fail(
                    f"series {labels.get('__name__', '')} of the same target is stored twice",
                    why=", ".join(differing) or "all labels are equal",
                    remedy="Choose one of the copies with `select`.",
                )

    def _require_series(
        self, marked: Mapping[str, Sequence[float]], series: Sequence[tuple[Labels, float]]
    ) -> None:
        settings = self._settings
        if not marked.get(_SCRAPED):
            labels_key = "select" if settings.origin_select is None else "origin_select"
            raise self._fail(
                f"Prometheus has no series {settings.origin} with the labels of `{labels_key}`",
                remedy="Check that the targets are scraped, and set `origin` and `origin_select` "
                "to a series of these targets.",
            )
        counter = settings.errors.counter
        if counter is not None and not marked.get(_KNOWN):
            raise self._fail(f"Prometheus has no series {counter} with the labels of `select`")
        label = settings.errors.label
        counted = [labels for labels, _ in series if labels.get("__name__") == settings.requests]
        if label is not None and any(label not in labels for labels in counted):
            raise self._fail(f"a series {settings.requests} has no label {label}")

    def _sum(self, series: Sequence[tuple[Labels, float]]) -> dict[str, RevisionCounts]:
        settings, revisions = self._settings, defaultdict[str, RevisionCounts](RevisionCounts)
        for labels, value in series:
            counts, metric = revisions[labels[settings.revision_label]], labels["__name__"]
            if metric == settings.requests:
                counts.requests += int(value)
                label = settings.errors.label
                if label is not None and settings.errors.matches(labels[label]):
                    counts.errors += int(value)
            elif metric == settings.errors.counter:
                counts.errors += int(value)
            else:
                try:
                    bound = float(labels["le"])
                except (KeyError, ValueError) as error:
                    raise make_answer_error(self._name, labels) from error
                counts.buckets[bound] += int(value)
        return dict(revisions)

    def _fail(self, what: str, *, why: str = "", remedy: str = "") -> ServiceUnavailableError:
        return ServiceUnavailableError(what, where=self._name, why=why, remedy=remedy)


def _match(labels: Mapping[str, str]) -> list[str]:
    return [f"{label}={quote_text(value)}" for label, value in labels.items()]


def _select(metric: str, labels: Mapping[str, str]) -> str:
    return f"{metric}{{{','.join(_match(labels))}}}"


def _mark(expression: str, mark: str) -> str:
    return f'label_replace({expression}, "{_MARK}", "{mark}", "", "")'
