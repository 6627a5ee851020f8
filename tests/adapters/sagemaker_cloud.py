"""Fixtures and helpers of the tests against the fake SageMaker."""

from __future__ import annotations

import json
import multiprocessing.context
import os
import threading
import urllib.error
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection

import pytest

from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import Deployment, EndpointConfig, EndpointState
from onnx_ops.domain.quantities import Json
from onnx_ops.testing.endpoints import scaling_deployment
from tests.support.clouds.sagemaker import BUCKET, SETTINGS, FakeSageMaker, client
from tests.support.forks import fork_context

QUIET = {"taken_back": "", "stuck": "", "quota": "", "lag": 0, "reads": 2}


@pytest.fixture(scope="module")
def cloud(sagemaker: FakeSageMaker) -> FakeSageMaker:
    """Empty for each module."""
    sagemaker.reset()
    return sagemaker


@pytest.fixture
def fake(cloud: FakeSageMaker, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSageMaker]:
    """The module's cloud, reachable by whatever boto3 client is made, without faults. Whatever the test has the
    provider do is permitted by `infra/aws`."""
    for name, value in cloud.environment.items():
        monkeypatch.setenv(name, value)
    cloud.fault()
    cloud.behave(**QUIET)
    yield cloud
    assert cloud.denied() == []


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Deployment, Deployment]:
    folder = tmp_path_factory.mktemp("models")
    return (
        scaling_deployment(folder / "blue", name="blue", version="1", scale=2.0),
        scaling_deployment(folder / "green", name="green", version="2", scale=3.0),
    )


def config_of(name: str, **settings: Json) -> EndpointConfig:
    return EndpointConfig(
        endpoint=name,
        provider="sagemaker",
        model="scale",
        target="cpu-1t",
        target_digest=digest_bytes(b"target"),
        pipeline="digits",
        settings={**SETTINGS, **settings},
    )


def invoke(fake: FakeSageMaker, endpoint: str, variant: str = "", value: float = 1.0) -> tuple[str, float]:
    """The variant that answered, and the factor that it computes."""
    from botocore.exceptions import ClientError

    body = json.dumps({"inputs": {"x": [[value, value]]}}).encode()
    pinned = {"TargetVariant": variant} if variant else {}
    try:
        answer = client(fake, "sagemaker-runtime").invoke_endpoint(
            EndpointName=endpoint, ContentType="application/json", Body=body, **pinned
        )
    except ClientError as error:
        raise urllib.error.URLError(str(error)) from error
    return answer["InvokedProductionVariant"], float(json.load(answer["Body"])["predictions"]["y"][0][0])


def apply_when_told(
    environment: Mapping[str, str], config: EndpointConfig, state: EndpointState, told: Connection
) -> None:
    """A client in a process of its own, which may be killed at any request."""
    os.environ.update(environment)
    told.recv()
    SageMakerEndpoints().apply(config, state, generation=state.generation)


def process_context() -> multiprocessing.context.ForkServerContext:
    """Clients that start at once: what they import is there already."""
    return fork_context(__name__, "onnx_ops.adapters.endpoints.sagemaker", "boto3", "pytest")


def all_that_stands(fake: FakeSageMaker, endpoint: str) -> set[tuple[str, str]]:
    """Kind and name of every model, config and archive of an endpoint, by a look of one's own."""
    sagemaker, s3 = client(fake, "sagemaker"), client(fake, "s3")
    models = sagemaker.get_paginator("list_models").paginate().build_full_result()["Models"]
    configs = sagemaker.get_paginator("list_endpoint_configs").paginate().build_full_result()["EndpointConfigs"]
    objects = s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"onnx-ops/{endpoint}/archives/")
    named = [("model", m["ModelName"]) for m in models] + [
        ("endpoint-config", c["EndpointConfigName"]) for c in configs
    ]
    found = {(kind, name) for kind, name in named if name.startswith(f"{endpoint}-")}
    return found | {("archive", o["Key"]) for o in objects.build_full_result().get("Contents", ())}


class Load:
    """Requests to one endpoint after another without a pause; remembers those that failed."""

    def __init__(self, fake: FakeSageMaker) -> None:
        self.failed: list[str] = []
        self.answered = 0
        self.endpoint = ""
        self._fake = fake
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.01):
            if name := self.endpoint:
                try:
                    invoke(self._fake, name)
                    self.answered += 1
                except urllib.error.URLError as error:
                    self.failed.append(f"{name}: {error}")
