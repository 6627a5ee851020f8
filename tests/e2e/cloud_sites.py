"""Endpoints on this machine and on the fakes of the clouds, by one interface.

SDKs, sockets and inference are real.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import ssl
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import onnx.parser

from onnx_ops.adapters import azure
from onnx_ops.adapters.endpoints.azureml import AzureEndpoints
from onnx_ops.adapters.endpoints.azureml_client import RetryPolicy, _ml_client
from onnx_ops.adapters.endpoints.local import LocalEndpoints
from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.adapters.metrics.azuremonitor import AzureMonitorMetrics
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.quantities import Json
from onnx_ops.ports import Clock, EndpointProvider, MetricsSource
from tests.adapters.azureml_parts import key_of
from tests.support.clouds.azureml import AzureCloud
from tests.support.clouds.sagemaker import SETTINGS, FakeSageMaker, client
from tests.support.must import must
from tests.support.server import stop_endpoints

POLICY = RetryPolicy(operation_s=60, answer_s=5, lag_s=1, pause_s=0.01, longest_s=0.1)
LATE_S = 240.0
"""Seconds after which both clouds have reported all counts of a minute."""
BEHIND_S = 6 * 3600.0
"""Seconds by which the tests' clock starts behind the clock of the machine.

The commands use the machine's clock, and the tests' clock must never pass it.
"""
CLOUD = "AZUREML_CURRENT_CLOUD"
"""Variable that Azure's SDK sets permanently."""
_PICK = 7


def write_model(path: Path, *, scale: float, table: int = 8) -> Path:
    """Write y = x * table[pick]; all entries of the table are `scale`.

    A request that picks an entry beyond the end of a short table fails.
    """
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        scale (float[batch, 1] x, int64[batch] pick) => (float[batch, 1] y)
        <float[{table}, 1] table = {{{", ".join([str(float(scale))] * table)}}}>
        {{ picked = Gather(table, pick) y = Mul(x, picked) }}""")
    path.parent.mkdir(parents=True)
    onnx.save(model, path)
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The deployment that answered, its status, and the factor that it computed."""

    deployment: str
    ok: bool
    factor: float = 0.0


class Wound:
    """A clock (`ports.Clock`) hours behind the machine, which tests put forward."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.shift = -BEHIND_S

    def now(self) -> float:
        return self._clock.now() + self.shift

    def monotonic(self) -> float:
        return self._clock.monotonic()


class Site(ABC):
    """An endpoint provider, and what its clients need."""

    name: str
    provider: EndpointProvider
    options: Mapping[str, Json]

    def __init__(self) -> None:
        self.kept = threading.local()

    @abstractmethod
    def ask(self, config: EndpointConfig, body: bytes) -> Answered:
        """Send one request as clients of this provider do."""

    def metrics(self) -> MetricsSource:
        return self.provider.metrics(self.options)

    def wind(self, seconds: float) -> None:
        """Put the provider's clock forward, if it has a separate clock."""
        del seconds

    def hang_up(self) -> None:
        """Close the connections that the calling thread keeps open for `ask`."""
        if (connection := getattr(self.kept, "connection", None)) is not None:
            connection.close()


class Local(Site):
    name = "local"

    def __init__(self, folder: Path, trusted: Path) -> None:
        super().__init__()
        self.provider = LocalEndpoints(folder, trusted)
        self.options = {}
        self._folder = folder

    def ask(self, config: EndpointConfig, body: bytes) -> Answered:
        address = must(self.provider.address(config))
        answer, document = post(self.kept, address, "/invocations", body, {})
        return Answered(
            deployment=answer.headers["x-onnx-ops-deployment"], **read(answer.status, document)
        )

    def stop(self) -> None:
        stop_endpoints(self._folder)


class SageMaker(Site):
    name = "sagemaker"

    def __init__(self, fake: FakeSageMaker, trusted: Path) -> None:
        super().__init__()
        self.provider = SageMakerEndpoints(None, trusted)
        self.options = SETTINGS
        self._fake = fake

    def ask(self, config: EndpointConfig, body: bytes) -> Answered:
        from botocore.exceptions import ClientError

        runtime = client(self._fake, "sagemaker-runtime")
        try:
            answer = runtime.invoke_endpoint(
                EndpointName=config.endpoint, ContentType="application/json", Body=body
            )
        except ClientError as error:
            if error.response["Error"]["Code"] != "ModelError":
                raise
            headers = error.response["ResponseMetadata"]["HTTPHeaders"]
            return Answered(deployment=headers["x-amzn-invoked-production-variant"], ok=False)
        return Answered(
            deployment=answer["InvokedProductionVariant"], **read(200, answer["Body"].read())
        )

    def wind(self, seconds: float) -> None:
        self._fake.shift(seconds)


class AzureMl(Site):
    name = "azureml"

    def __init__(self, folder: Path, trusted: Path, cloud: AzureCloud, clock: Wound) -> None:
        super().__init__()
        self.provider = AzureEndpoints(folder, trusted, policy=POLICY)
        self.options = cloud.options
        self._clock = clock
        self._known: dict[str, tuple[str, str]] = {}

    def ask(self, config: EndpointConfig, body: bytes) -> Answered:
        if config.endpoint not in self._known:
            address = must(self.provider.address(config))
            self._known[config.endpoint] = (f"{address}/invocations", key_of(config))
        address, key = self._known[config.endpoint]
        answer, document = post(
            self.kept, address, urlsplit(address).path, body, {"authorization": key}
        )
        name = answer.headers["azureml-model-deployment"].rpartition("-")[0]
        return Answered(deployment=name, **read(answer.status, document))

    def metrics(self) -> MetricsSource:
        return AzureMonitorMetrics({}, self._clock)


def post(
    kept: threading.local, address: str, path: str, body: bytes, headers: Mapping[str, str]
) -> tuple[http.client.HTTPResponse, bytes]:
    """Send one request on the connection that this thread keeps to the address."""
    place = urlsplit(address)
    connection = getattr(kept, "connection", None)
    if connection is None or (connection.host, connection.port) != (place.hostname, place.port):
        host = place.hostname or ""
        connection = kept.connection = (
            http.client.HTTPSConnection(
                host, place.port, timeout=60, context=ssl.create_default_context()
            )
            if place.scheme == "https"
            else http.client.HTTPConnection(host, place.port, timeout=60)
        )
    connection.request("POST", path, body, {"content-type": "application/json", **headers})
    answer = connection.getresponse()
    return answer, answer.read()


def read(status: int, document: bytes) -> dict[str, Any]:
    if status != 200:
        return {"ok": False}
    return {"ok": True, "factor": float(json.loads(document)["predictions"]["y"][0][0])}


def body_of(*, odd: bool) -> bytes:
    """Return the body of a request; `odd` ones pick an entry that a short table lacks."""
    return json.dumps({"inputs": {"x": [[1.0]], "pick": [_PICK if odd else 0]}}).encode()


class Clients:
    """A client that sends requests one after the other until it is stopped.

    A part of the requests is odd. `answers` counts the requests by their result.
    """

    def __init__(self, site: Site, config: EndpointConfig, *, odd_percent: int) -> None:
        self._site, self._config, self._odd = site, config, odd_percent
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._bodies = (body_of(odd=False), body_of(odd=True))
        self.answers: Counter[Answered] = Counter()
        self.broken: list[str] = []

    @property
    def total(self) -> int:
        return self.answers.total()

    def by(self, deployment: str) -> Counter[bool]:
        found: Counter[bool] = Counter()
        for answer, count in list(self.answers.items()):
            if answer.deployment == deployment:
                found[answer.ok] += count
        return found

    def __enter__(self) -> Clients:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def more(self, count: int) -> None:
        """Wait until `count` more requests are answered."""
        goal = self.total + count
        while self.total < goal:
            assert self._thread.is_alive(), self.broken
            self._over.wait(0.005)

    def _run(self) -> None:
        draw = random.Random(0)  # noqa: S311 (a pattern would keep step with the fakes' own way of splitting)
        while not self._over.is_set():
            odd = draw.random() < self._odd / 100
            try:
                self.answers[self._site.ask(self._config, self._bodies[odd])] += 1
            except Exception as error:
                self.broken.append(repr(error))
                break
        self._site.hang_up()


@contextmanager
def environment(given: Mapping[str, str]) -> Iterator[None]:
    """Replace the clouds by the fakes, and undo that at the end."""
    # Variables that an SDK sets meanwhile are removed, too.
    with patch.dict(os.environ, given):
        os.environ.pop(CLOUD, None)
        azure.get_credential.cache_clear()
        _ml_client.cache_clear()
        yield
