"""Azure Monitor's metrics of the fake's endpoints, from the routed requests."""

from __future__ import annotations

import datetime
import math
import re
import threading
from collections import defaultdict
from typing import Any

from onnx_ops.ports import Clock
from tests.support.clouds.azureml_resources import refuse, reply
from tests.support.clouds.azureml_web import Call, Reply
from tests.support.clouds.containers import BROKEN

MODEL_ERROR = 424
"""Status that Azure's front end answers and counts for a container's failure.

A container fails if it answers with a status other than 200.
"""
_MINUTE = 60
_PERCENTILE = re.compile(r"RequestLatency_P(\d+)")


class Monitor:
    """Request counts by minute, endpoint, deployment and status.

    The status is the container's, `BROKEN`, or 429 if all instances are busy.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str, int, int], int] = defaultdict(int)
        self._latencies: dict[tuple[str, str, int], list[float]] = defaultdict(list)

    def count(self, endpoint: str, deployment: str, status: int, seconds: float) -> None:
        minute = int(self.clock.now()) // _MINUTE * _MINUTE
        with self._lock:
            self._counts[endpoint, deployment, status, minute] += 1
            self._latencies[endpoint, deployment, minute].append(seconds)

    def answer(self, call: Call) -> Reply:
        endpoint = call.path.partition("/onlineEndpoints/")[2].partition("/")[0]
        try:
            first, last = (_seconds(text) for text in call.query["timespan"].split("/"))
        except (KeyError, ValueError):
            return refuse(400, "BadRequest", "timespan is not valid")
        if (
            call.query.get("interval") != "PT1M"
            or call.query.get("aggregation", "").lower() != "average"
        ):
            return refuse(400, "BadRequest", "these metrics are averages of a minute")
        names = call.query.get("metricnames", "").split(",")
        with self._lock:
            return reply(
                200, {"value": [self._metric(name, endpoint, first, last) for name in names]}
            )

    def _metric(self, name: str, endpoint: str, first: float, last: float) -> dict[str, Any]:
        series: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
        if found := _PERCENTILE.fullmatch(name):
            for (of, deployment, minute), values in sorted(self._latencies.items()):
                if of == endpoint and first <= minute < last:
                    ordered = sorted(values)
                    at = min(len(ordered) - 1, math.ceil(len(ordered) * int(found[1]) / 100) - 1)
                    series[deployment, "", ""].append(
                        {"timeStamp": _text(minute), "average": ordered[at] * 1e3}
                    )
        elif name == "RequestsPerMinute":
            for (of, deployment, status, minute), count in sorted(self._counts.items()):
                if of == endpoint and first <= minute < last:
                    code = status if status in (200, BROKEN) else MODEL_ERROR
                    point = {"timeStamp": _text(minute), "average": float(count)}
                    series[deployment, str(code), str(status)].append(point)
        rows = [
            {
                "metadatavalues": [
                    {"name": {"value": key}, "value": value}
                    for key, value in (
                        ("deployment", deployment),
                        ("statuscode", status),
                        ("modelstatuscode", model),
                    )
                    if value
                ],
                "data": data,
            }
            for (deployment, status, model), data in series.items()
        ]
        return {"name": {"value": name}, "timeseries": rows}


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()


def _text(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
