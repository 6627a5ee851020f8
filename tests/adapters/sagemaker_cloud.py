"""A provider on the fake SageMaker, which tests share."""

from __future__ import annotations

import json
import os
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.domain.endpoint import EndpointConfig, EndpointState
from onnx_ops.domain.quantities import Json
from tests.adapters.endpoint_site import EndpointSite, make_config
from tests.support.clouds.sagemaker import SETTINGS, FakeSageMaker, client
from tests.support.forks import fork_context


def config_of(name: str, **options: Json) -> EndpointConfig:
    given: dict[str, Json] = {**SETTINGS, **options}
    return make_config(name, "sagemaker", **given)


@dataclass(kw_only=True)
class Site(EndpointSite):
    """A SageMaker provider on the fake cloud."""

    fake: FakeSageMaker
    provider: SageMakerEndpoints = field(default_factory=SageMakerEndpoints)

    def client(self, service: str) -> Any:
        return client(self.fake, service)

    def describe(self, endpoint: str) -> Any:
        return self.client("sagemaker").describe_endpoint(EndpointName=endpoint)

    def wait_for(self, endpoint: str, status: str) -> None:
        while self.describe(endpoint)["EndpointStatus"] != status:
            pass

    def invoke(self, endpoint: str, variant: str = "") -> tuple[str, float]:
        """Invoke the endpoint; return the variant that answered and its factor."""
        from botocore.exceptions import ClientError

        body = json.dumps({"inputs": {"x": [[1.0, 1.0]]}}).encode()
        pinned = {"TargetVariant": variant} if variant else {}
        try:
            answer = self.client("sagemaker-runtime").invoke_endpoint(
                EndpointName=endpoint, ContentType="application/json", Body=body, **pinned
            )
        except ClientError as error:
            raise urllib.error.URLError(str(error)) from error
        return answer["InvokedProductionVariant"], float(
            json.load(answer["Body"])["predictions"]["y"][0][0]
        )

    def start_client(
        self, config: EndpointConfig, state: EndpointState
    ) -> tuple[BaseProcess, Connection]:
        """Start a process that applies the state after a message from the connection.

        A test can kill it at any request.
        """
        context = fork_context(__name__, "onnx_ops.adapters.endpoints.sagemaker", "boto3", "pytest")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_apply_when_told, args=(dict(self.fake.environment), config, state, theirs)
        )
        process.start()
        return process, ours


def _apply_when_told(
    environment: Mapping[str, str], config: EndpointConfig, state: EndpointState, events: Connection
) -> None:
    os.environ.update(environment)
    events.recv()
    SageMakerEndpoints().apply(config, state, generation=state.generation)
