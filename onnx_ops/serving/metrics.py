"""Counts of a server's life in Prometheus' text format, summed over its workers when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from onnx_ops.serving import shared as slab
from onnx_ops.serving.residents import Snapshot
from onnx_ops.serving.shared import Shared

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_REASONS: Mapping[str, tuple[int, ...]] = {
    "input": (400, 404, 408, 413, 415, 431),
    "unfit": (422,),
    "overload": (429,),
    "deadline": (504,),
    "unavailable": (503,),
    "client_gone": (499,),
    "internal": (500,),
}
"""Classes of errors, and the statuses that belong to them."""

_COUNTERS = (
    ("model_runs_total", "Runs of the model; fewer than requests where they were run together.", slab.RUNS),
    ("batched_requests_total", "Requests that were run together with others.", slab.BATCHED),
    ("shadow_requests_total", "Requests copied to the deployment.", slab.SHADOW_SENT),
    ("shadow_dropped_total", "Copies that were dropped because the shadow's queue was full.", slab.SHADOW_DROPPED),
    ("shadow_answered_total", "Copies that the deployment answered.", slab.SHADOW_DONE),
    ("shadow_failed_total", "Copies that the deployment could not answer.", slab.SHADOW_FAILED),
    ("shadow_differing_total", "Copies that the deployment answered otherwise.", slab.SHADOW_DIFFERING),
    ("outcomes_total", "Outcomes that clients reported.", slab.OUTCOMES),
    ("outcome_successes_total", "Reported outcomes that were successes.", slab.SUCCESSES),
    ("model_loads_total", "Loads of the model, one for each worker.", slab.LOADS),
    ("model_load_failures_total", "Loads of the model that failed.", slab.LOAD_FAILURES),
)
_SECONDS = (
    ("model_load_seconds_total", "Time spent loading, verifying and warming up the model.", slab.LOAD_NANOSECONDS),
)
_HISTOGRAMS = (
    ("request_seconds", "Time from the last byte of a request to its answer.", slab.request_times),
    ("service_seconds", "Time without waiting, of requests by which versions are compared.", slab.service_times),
)
_GAUGES = (
    ("requests_queued", "Requests that wait for the model.", slab.QUEUED),
    ("requests_running", "Requests that the model is at work on, off the event loop.", slab.RUNNING),
)


_SHOWN_S = {*slab.BOUNDS_S[:: slab.STEPS // 2], None}


class Metrics:
    """What `/metrics` shows. Any worker can tell it for all.

    Args:
        shared: where all workers count.
        endpoint: the value of the label `endpoint`.
    """

    def __init__(self, shared: Shared, endpoint: str) -> None:
        self._shared = shared
        self._endpoint = endpoint

    def text(self, snapshot: Snapshot | None) -> str:
        slots = self._slots()
        lines = [*_requests(slots), *_errors(slots)]
        named = slots[1:]
        for name, text, times in _HISTOGRAMS:
            lines += _histogram(name, text, ((labels, times(row)) for labels, row in named))
        for name, text, column in _COUNTERS:
            lines += _family(name, text, "counter", ((labels, row[column]) for labels, row in named))
        for name, text, column in _SECONDS:
            lines += _family(name, text, "counter", ((labels, row[column] / 1e9) for labels, row in named))
        for name, text, column in _GAUGES:
            lines += _family(name, text, "gauge", ((labels, row[column]) for labels, row in named))
        lines += self._of_server(slots[0][1])
        if snapshot is not None:
            lines += self._of_table(snapshot)
        return "\n".join(lines) + "\n"

    def _slots(self) -> list[tuple[str, Sequence[int]]]:
        """Labels and totals of every slot in use, the one of requests without a deployment first."""
        nowhere = {"deployment": "", "version": "", "variant": ""}
        found = [(self._labels(nowhere), self._shared.totals(0))]
        labelled = ((slot, self._shared.label(slot)) for slot in range(1, slab.SLOTS))
        return [*found, *((self._labels(ls), self._shared.totals(slot)) for slot, ls in labelled if ls is not None)]

    def _of_server(self, row: Sequence[int]) -> Iterator[str]:
        labels = self._labels({})
        for name, text, kind, column in (
            ("connections", "Open connections.", "gauge", slab.CONNECTIONS),
            ("connections_refused_total", "Connections over the limit.", "counter", slab.CONNECTIONS_REFUSED),
            ("access_log_dropped_total", "Lines that the access log had no room for.", "counter", slab.LOG_DROPPED),
            ("outcomes_unknown_total", "Outcomes of requests not known.", "counter", slab.UNKNOWN_OUTCOMES),
        ):
            yield from _family(name, text, kind, [(labels, row[column])])
        origin = [(self._labels({"origin": self._shared.origin}), 1)]
        yield from _family("counts", "All counts began at nothing with this origin.", "gauge", origin)
        yield from _family("workers", "Worker processes.", "gauge", [(labels, self._shared.workers)])

    def _of_table(self, snapshot: Snapshot) -> Iterator[str]:
        state = snapshot.table.state
        generation = [(self._labels({}), state.generation)]
        yield from _family("generation", "Generation of the published table.", "gauge", generation)
        labels = {
            d.name: self._labels({"deployment": d.name, "version": d.version, "variant": d.variant})
            for d in state.deployments
        }
        for name, text, shares in (
            ("traffic_percent", "Share of traffic.", state.split.weights),
            ("shadow_percent", "Share of traffic that is copied.", state.split.shadow),
        ):
            yield from _family(name, text, "gauge", [(labels[d], shares.get(d, 0)) for d in labels])

    def _labels(self, labels: Mapping[str, str]) -> str:
        full = {"endpoint": self._endpoint, **labels}
        return ",".join(f'{name}="{_escape(value)}"' for name, value in full.items())


def _requests(slots: Sequence[tuple[str, Sequence[int]]]) -> Iterator[str]:
    samples = [
        (f'{labels},status="{status}"', row[slab.column_of(status)])
        for labels, row in slots
        for status in slab.STATUSES
        if row[slab.column_of(status)]
    ]
    samples += [(f'{labels},status="other"', row[slab.OTHER]) for labels, row in slots if row[slab.OTHER]]
    yield from _family("requests_total", "Inference requests by HTTP status.", "counter", samples)


def _errors(slots: Sequence[tuple[str, Sequence[int]]]) -> Iterator[str]:
    samples = [
        (f'{labels},reason="{reason}"', sum(row[slab.column_of(status)] for status in statuses))
        for labels, row in slots
        for reason, statuses in _REASONS.items()
    ]
    yield from _family("errors_total", "Inference requests that failed, by reason.", "counter", samples)


def _histogram(name: str, text: str, samples: Iterable[tuple[str, slab.Histogram]]) -> Iterator[str]:
    """In steps of the square root of two: what dashboards need, at an eighth of the lines."""
    name = f"onnx_ops_{name}"
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} histogram"
    for labels, times in samples:
        count = 0
        for bound, number in zip((*slab.BOUNDS_S, None), times.buckets, strict=True):
            count += number
            if bound not in _SHOWN_S:
                continue
            yield f'{name}_bucket{{{labels},le="{"+Inf" if bound is None else f"{bound:.6g}"}"}} {count}'
        yield f"{name}_sum{{{labels}}} {times.nanoseconds / 1e9:.9g}"
        yield f"{name}_count{{{labels}}} {count}"


def _family(name: str, text: str, kind: str, samples: Iterable[tuple[str, float]]) -> Iterator[str]:
    yield f"# HELP onnx_ops_{name} {text}"
    yield f"# TYPE onnx_ops_{name} {kind}"
    for labels, value in samples:
        yield f"onnx_ops_{name}{{{labels}}} {value}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
