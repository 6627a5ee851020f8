"""Endpoints with `traffic: table` on the fakes of both clouds, with a signing key."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import fsspec

from onnx_ops.adapters.endpoints.azureml import AzureEndpoints
from onnx_ops.adapters.endpoints.fleets import TrafficModes
from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.adapters.signers.ecdsa import create_key
from onnx_ops.domain.quantities import Json
from onnx_ops.ports import Signer
from onnx_ops.protocol.messages import DEPLOYMENT_HEADER, FEEDBACK_HEADER, USER_KEY_HEADER
from onnx_ops.serving.http.sagemaker import FEEDBACK_TYPE
from tests.adapters.azureml_parts import POLICY, inside, key_of
from tests.adapters.endpoint_site import EndpointSite, make_config, make_models
from tests.adapters.replica_site import approve
from tests.support.clouds.azureml import AzureCloud
from tests.support.clouds.sagemaker import SETTINGS, FakeSageMaker, client

REQUEST = json.dumps({"inputs": {"x": [[1.0, 1.0]]}}).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The deployment that answered, its feedback token, and the factor of its model."""

    deployment: str
    token: str
    factor: float


@dataclass(kw_only=True)
class FleetSite(EndpointSite):
    """A cloud's provider, and one endpoint whose instances follow a table."""

    folder: Path
    name: str = "fleet"
    signer: Signer = field(init=False)
    provider: TrafficModes = field(init=False)

    def __post_init__(self) -> None:
        keys = self.folder / "trusted"
        keys.mkdir(parents=True)
        self.signer = create_key(keys / "signing.pem")
        self.blue, self.green = approve(self.blue, self.signer), approve(self.green, self.signer)
        self.provider = self.make_provider(keys)
        self.provider.sign_with(lambda: self.signer)
        self.config = make_config(self.name, self.provider_name, **self.options)

    provider_name = ""

    @property
    @abstractmethod
    def options(self) -> Mapping[str, Json]: ...

    @abstractmethod
    def make_provider(self, keys: Path) -> TrafficModes: ...

    @abstractmethod
    def invoke(self, user: str, body: bytes = REQUEST) -> Answer:
        """Send a request as a client of this cloud does.

        Raises:
            URLError: the endpoint does not answer it.
        """

    @abstractmethod
    def report(self, successes: Mapping[str, bool]) -> None:
        """Report feedback by tokens, as a client of this cloud does."""

    @abstractmethod
    def count_changes(self) -> int:
        """Return how many requests have changed something in the control plane."""

    @abstractmethod
    def slow_updates(self) -> None:
        """Let each later change of instances take seconds."""

    def open_again(self) -> None:
        """Replace the provider by a new one, as another process of this machine has it."""
        self.provider = self.make_provider(self.folder / "trusted")
        self.provider.sign_with(lambda: self.signer)


@dataclass(kw_only=True)
class SageMakerFleet(FleetSite):
    fake: FakeSageMaker

    provider_name = "sagemaker"

    @property
    def options(self) -> Mapping[str, Json]:
        return {**SETTINGS, "traffic": "table", "instance_count": 2}

    def make_provider(self, keys: Path) -> TrafficModes:
        return SageMakerEndpoints(None, keys)

    def invoke(self, user: str, body: bytes = REQUEST) -> Answer:
        attributes = f"user={quote(user)}"
        answer = self._invoke(body, "application/json", CustomAttributes=attributes)
        fields = dict(part.split("=", 1) for part in answer["CustomAttributes"].split(";"))
        return Answer(
            deployment=fields["deployment"],
            token=fields.get("token", ""),
            factor=float(json.load(answer["Body"])["predictions"]["y"][0][0]),
        )

    def report(self, successes: Mapping[str, bool]) -> None:
        entries = [{"token": token, "success": success} for token, success in successes.items()]
        body = json.dumps({"feedback": entries}).encode()
        self._invoke(body, FEEDBACK_TYPE.decode())

    def _invoke(self, body: bytes, content_type: str, **more: str) -> Any:
        from botocore.exceptions import ClientError

        runtime = client(self.fake, "sagemaker-runtime")
        try:
            return runtime.invoke_endpoint(
                EndpointName=self.name, ContentType=content_type, Body=body, **more
            )
        except ClientError as error:
            raise urllib.error.URLError(str(error)) from error

    def describe(self) -> Mapping[str, Any]:
        description: Mapping[str, Any] = client(self.fake, "sagemaker").describe_endpoint(
            EndpointName=self.name
        )
        return description

    def read_status(self) -> str:
        """Return the status of the endpoint in SageMaker, or `Deleted`."""
        from botocore.exceptions import ClientError

        try:
            return str(self.describe()["EndpointStatus"])
        except ClientError:
            return "Deleted"

    def count_changes(self) -> int:
        changing = ("Create", "Update", "Delete")
        return sum(
            call.removeprefix("SageMaker.").startswith(changing) for call in self.fake.calls()
        )

    def slow_updates(self) -> None:
        self.fake.behave(reads=3000)


@dataclass(kw_only=True)
class AzureFleet(FleetSite):
    cloud: AzureCloud
    _address: str | None = field(default=None, init=False)
    _context: ssl.SSLContext | None = field(default=None, init=False)

    provider_name = "azureml"

    @property
    def options(self) -> Mapping[str, Json]:
        return {
            **self.cloud.options,
            "traffic": "table",
            "instances": 2,
            "control": str(self.folder / "control"),
            "reports": str(self.folder / "reports"),
        }

    def make_provider(self, keys: Path) -> TrafficModes:
        return AzureEndpoints(self.folder / "state", keys, policy=POLICY)

    def invoke(self, user: str, body: bytes = REQUEST) -> Answer:
        answer, data = self._post("/invocations", body, {USER_KEY_HEADER: user})
        return Answer(
            deployment=answer.headers[DEPLOYMENT_HEADER],
            token=answer.headers.get(FEEDBACK_HEADER, ""),
            factor=float(json.loads(data)["predictions"]["y"][0][0]),
        )

    def report(self, successes: Mapping[str, bool]) -> None:
        entries = [{"token": token, "success": success} for token, success in successes.items()]
        body = json.dumps({"feedback": entries}).encode()
        self._post("/invocations", body, {"content-type": FEEDBACK_TYPE.decode()})

    def _post(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        # The address is read once. Reading it for each request would halve the rate of requests.
        self._address = address = self._address or self.provider.address(self.config)
        if address is None:
            raise urllib.error.URLError("there is no endpoint")
        if self._context is None:
            self._context = ssl.create_default_context()
        given = {"content-type": "application/json", "authorization": key_of(self.config)}
        request = urllib.request.Request(f"{address}{path}", body, {**given, **headers})
        assert urlsplit(address).scheme == "https"
        with urllib.request.urlopen(request, timeout=30, context=self._context) as answer:
            return answer, answer.read()

    def count_changes(self) -> int:
        return sum(method in ("PUT", "PATCH", "DELETE") for method, _ in self.cloud.calls)

    def slow_updates(self) -> None:
        self.cloud.conditions.looks = 60


@contextmanager
def open_sagemaker_fleet(fake: FakeSageMaker, folder: Path) -> Iterator[SageMakerFleet]:
    # fsspec caches clients, and a client of another test uses the address of another store.
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    blue, green = make_models(folder / "models")
    yield SageMakerFleet(fake=fake, folder=folder, blue=blue, green=green)


@contextmanager
def open_azure_fleet(folder: Path) -> Iterator[AzureFleet]:
    blue, green = make_models(folder / "models")
    with AzureCloud(folder / "cloud") as cloud, inside(cloud):
        yield AzureFleet(cloud=cloud, folder=folder, blue=blue, green=green)


def with_options(site: FleetSite, **options: Json) -> FleetSite:
    """Change options of the site's endpoint, as an edited pipeline file does."""
    site.config = replace(site.config, options={**site.config.options, **options})
    return site
