"""A client that calls an endpoint continuously."""

from __future__ import annotations

import http.client
import json
import threading
import time
from urllib.parse import urlsplit

from benchmarks.debt.sites import TIMEOUT_S, Route
from onnx_ops.adapters.host import SystemClock
from onnx_ops.errors import MeasurementError

BODY = json.dumps({"inputs": {"x": [[1.0, 2.0]]}}).encode()


class Client:
    """A client that calls the endpoint until it is stopped.

    `answers` holds the deployment that gave each answer, and `failures` counts failed requests.
    `began_at` holds the time at which the request of each answer began, in seconds since the epoch.
    """

    def __init__(self, route: Route, *, timeout_s: float) -> None:
        self.answers: list[str] = []
        self.began_at: list[float] = []
        self.failures = 0
        self._clock = SystemClock()
        self._timeout_s = timeout_s
        self._route = route
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait_for(self, count: int, deployment: str) -> None:
        """Wait until a deployment has given `count` more answers.

        Raises:
            MeasurementError: the deployment does not answer.
        """
        goal, deadline = self.answers.count(deployment) + count, time.monotonic() + TIMEOUT_S
        while self.answers.count(deployment) < goal:
            if time.monotonic() > deadline:
                raise MeasurementError(
                    f"the client gets no answer of {deployment}", why=str(self.answers[-3:])
                )
            time.sleep(0.01)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(0.01):
            began_at = self._clock.now()
            if (name := self._ask()) is not None:
                self.began_at.append(began_at)
                self.answers.append(name)
            else:
                self.failures += 1

    def _ask(self) -> str | None:
        place = urlsplit(self._route.url)
        assert place.hostname is not None
        connection = (
            http.client.HTTPConnection(place.hostname, place.port, timeout=self._timeout_s)
            if self._route.tls is None
            else http.client.HTTPSConnection(
                place.hostname, place.port, timeout=self._timeout_s, context=self._route.tls
            )
        )
        try:
            headers = {"content-type": "application/json", **self._route.headers}
            connection.request("POST", place.path, BODY, headers)
            answer = connection.getresponse()
            return (
                self._route.deployment(answer.headers[self._route.named_by])
                if answer.status == 200
                else None
            )
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
