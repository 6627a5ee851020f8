"""A fake Azure ML on loopback.

The real SDK calls it over HTTPS, and real inference servers answer. It implements what the provider
needs, and the restrictions of Azure that cause faults:

- long-running operations and `Updating` conflicts,
- requests that set all traffic to zero by mistake,
- deployments that cannot be deleted while they have traffic,
- a quota of which a fifth is reserved,
- reads that lag behind, throttling and broken connections.

It follows the SDK's requests and Azure's documentation. It was not compared with Azure itself.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.adapters.host import SystemClock
from onnx_ops.domain.quantities import Json
from onnx_ops.ports import Clock
from tests.support.clouds.azureml_blobs import Blobs
from tests.support.clouds.azureml_control import CONTAINER, Conditions, Control
from tests.support.clouds.azureml_monitor import MODEL_ERROR, Monitor
from tests.support.clouds.azureml_resources import refuse, reply
from tests.support.clouds.azureml_roles import Request, is_allowed, requests_of
from tests.support.clouds.azureml_web import FAULTS, Call, Fault, Reply, Web
from tests.support.clouds.containers import BROKEN, Containers

SUBSCRIPTION, GROUP, WORKSPACE = "00000000-0000-0000-0000-000000000001", "group", "workspace"
TOKEN = "token-of-the-fake"  # noqa: S105 (it opens nothing)
_PIN = "azureml-model-deployment"
_MODEL_STATUS = "ms-azureml-model-error-statuscode"
_OWN_HEADERS = frozenset(
    {_PIN, "authorization", "connection", "content-length", "host", "transfer-encoding"}
)
"""Headers that the front end does not forward to a container."""
_STRIDE = 37
"""Step between the percent values of consecutive requests.

It is coprime to 100: a hundred consecutive requests take every percent once, and consecutive values
are far apart.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRule:
    """Fault of one request of the control plane or the storage.

    It happens before or after the effect of the request.
    """

    fault: Fault
    after: bool = False


class AzureCloud:
    """One workspace with a datastore.

    A process with the variables of `environment` uses it.

    Args:
        folder: folder for the certificate.
        clock: clock by which requests are counted.
        containers: containers of the deployments; real servers by default.
    """

    def __init__(
        self, folder: Path, *, clock: Clock | None = None, containers: Containers | None = None
    ) -> None:
        self._containers = containers or Containers(
            model_variable="AZUREML_MODEL_DIR", port_variable="ONNX_OPS_PORT"
        )
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._served = 0
        self._running: Counter[tuple[str, str]] = Counter()
        self._web = Web(folder, self.answer)
        self.calls: list[tuple[str, str]] = []
        """Method and path of every request to the control plane and the storage."""
        self.denied: list[Request] = []
        """Requested actions that `infra/azure` does not permit."""
        self.fault_rule: Callable[[int, Call], FaultRule | None] = lambda *_: None
        """Called with the number of the request, from 0.

        Other requests continue meanwhile.
        """
        self.token_faults: list[Fault] = []
        """Faults of the next requests for a token, in order."""
        self.reset()

    def reset(self) -> None:
        """Forget all resources, blobs, requests and faults."""
        path = (
            f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}"
            f"/providers/Microsoft.MachineLearningServices/workspaces/{WORKSPACE}"
        )
        self.blobs, self.monitor = Blobs(), Monitor(self._clock)
        self.control = Control(self._web.url, path, self.blobs, self._containers)
        self.calls.clear()
        self.denied.clear()
        self.token_faults.clear()
        self.fault_rule = lambda *_: None

    def use(self, containers: Containers, clock: Clock) -> None:
        """Forget everything, and continue with other containers and another clock."""
        self._containers, self._clock = containers, clock
        self.reset()

    @property
    def conditions(self) -> Conditions:
        return self.control.conditions

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the variables with which a process uses this server as Azure.

        They include a managed identity.
        """
        return {
            "REGISTRY_DISCOVERY_ENDPOINT_URL": f"{self._web.url}/",
            "ARM_CLOUD_METADATA_URL": f"{self._web.url}/metadata/endpoints?api-version=2019-05-01",
            "REQUESTS_CA_BUNDLE": str(self._web.certificate),
            "SSL_CERT_FILE": str(self._web.certificate),
            "IDENTITY_ENDPOINT": f"{self._web.url}/identity",
            "IDENTITY_HEADER": "fake",
            "AZURE_TOKEN_CREDENTIALS": "ManagedIdentityCredential",
        }

    @property
    def options(self) -> Mapping[str, Json]:
        """Return the options of an endpoint in this cloud."""
        return {
            "traffic": "native",
            "subscription": SUBSCRIPTION,
            "resource_group": GROUP,
            "workspace": WORKSPACE,
            "image": "registry.example/onnx-ops:1",
            "instance_type": "Standard_DS3_v2",
            "blob_url": f"{self._web.url}/blobs",
        }

    def routes(self, endpoint: str) -> list[dict[str, int]]:
        """Return every traffic split that took effect since the endpoint was made.

        The oldest split is first.
        """
        return self.control.routes.get(endpoint, [])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the state of the cloud after the block."""
        names = ("resources", "routes", "mirrors", "nodes", "keys", "_operations")
        with self._lock:
            # No operation may be under way: operations contain functions that change resources.
            state = {name: copy.copy(getattr(self.control, name)) for name in names}
            bodies = {
                path: copy.deepcopy(resource.body)
                for path, resource in self.control.resources.items()
            }
            routes = copy.deepcopy(self.control.routes)
            shared = dict(self.control.registries.models)
            autoscale = dict(self.control.autoscale.settings)
            blobs = (dict(self.blobs.data), dict(self.blobs.md5))
        try:
            yield
        finally:
            with self._lock:
                for name, value in state.items():
                    setattr(self.control, name, value)
                for path, resource in self.control.resources.items():
                    resource.body, resource.left, resource.stale = bodies[path], 0, 0
                self.control.routes = routes
                self.control.registries.models = shared
                self.control.autoscale.settings = autoscale
                self.blobs.data, self.blobs.md5 = blobs
                self.control.conditions = Conditions()
                self.fault_rule = lambda *_: None

    def __enter__(self) -> AzureCloud:
        return self

    def __exit__(self, *_: object) -> None:
        self._web.close()
        self._containers.stop()

    def answer(self, call: Call) -> Reply | None:
        """Answer a request of any service; None closes the connection."""
        if call.path.startswith("/metadata/"):
            login = {"loginEndpoint": f"{self._web.url}/", "audiences": [f"{self._web.url}/"]}
            described = {
                "name": "Loopback",
                "portal": "https://portal.azure.com",
                "resourceManager": f"{self._web.url}/",
                "authentication": login,
                "suffixes": {"storage": "core.windows.net"},
            }
            return reply(200, [described])
        if call.path == "/identity":
            if self.token_faults:
                return FAULTS[self.token_faults.pop(0)]
            expires = str(int(SystemClock().now()) + 86_400)
            known = call.headers.get("x-identity-header") == "fake"
            token = {
                "access_token": TOKEN,
                "expires_on": expires,
                "resource": "azure",
                "token_type": "Bearer",
            }
            return reply(200, token) if known else refuse(401, "Unauthorized", "who are you?")
        if call.path.startswith("/score/"):
            return self._score(call)
        if call.headers.get("authorization") != f"Bearer {TOKEN}":
            return refuse(401, "AuthenticationFailed", "Authentication failed.")
        with self._lock:
            number = len(self.calls)
            self.calls.append((call.method, call.path))
        fault_rule = self.fault_rule(number, call)
        with self._lock:
            if fault_rule is None:
                return self._managed(call)
            if fault_rule.after:
                self._managed(call)
            return FAULTS[fault_rule.fault]

    def _managed(self, call: Call) -> Reply:
        for request in requests_of(call):
            if not is_allowed(request):
                self.denied.append(request)
                message = (
                    "The client does not have authorization to perform action "
                    f"'{request.action}' over scope."
                )
                return refuse(403, "AuthorizationFailed", message)
        if call.path.startswith("/blobs/"):
            return self.blobs.answer(call, call.path.removeprefix(f"/blobs/{CONTAINER}").strip("/"))
        if call.path.endswith("/providers/Microsoft.Insights/metrics"):
            return self.monitor.answer(call)
        return self.control.answer(call)

    def _score(self, call: Call) -> Reply:
        endpoint = call.path.split("/")[2]
        with self._lock:
            self.control.elapse()
            if endpoint not in self.control.keys:
                return refuse(404, "NotFound", "There is no such endpoint.")
            if call.headers.get("authorization") != f"Bearer {self.control.keys[endpoint]}":
                return refuse(401, "Unauthorized", "The key is wrong.")
            pinned = call.headers.get(_PIN)
            splits = self.routes(endpoint)
            chosen = pinned or (self._drawn(splits[-1]) if splits else None)
            node = self.control.nodes.get((endpoint, chosen or ""))
            copies = [] if pinned else list(self.control.mirrors.get(endpoint, {}).items())
            mirrored = [
                self.control.nodes[endpoint, name]
                for name, percent in copies
                if self._served % 100 < percent
            ]
        if node is None or chosen is None:
            return refuse(404, "NotFound", "No deployment takes the request.")
        place = (endpoint, chosen)
        with self._lock:
            if self._running[place] >= self.control.concurrency(endpoint, chosen):
                self.monitor.count(endpoint, chosen, 429, 0.0)
                return refuse(429, "TooManyRequests", "All instances are busy.")
            self._running[place] += 1
        headers = {
            name: value for name, value in call.headers.items() if name.lower() not in _OWN_HEADERS
        }
        answer = node.invoke(call.body, headers)
        with self._lock:
            self._running[place] -= 1
        self.monitor.count(endpoint, chosen, answer.status, answer.seconds)
        for other in mirrored:
            other.invoke(call.body, headers)
        fields = {name: v for name, v in answer.headers.items() if name.startswith("x-")}
        fields[_PIN] = chosen
        if answer.status in (200, BROKEN):
            return Reply(status=answer.status, body=answer.body, headers=fields)
        return Reply(
            status=MODEL_ERROR,
            body=answer.body,
            headers={**fields, _MODEL_STATUS: str(answer.status)},
        )

    def _drawn(self, split: Mapping[str, int]) -> str | None:
        self._served += 1
        at = self._served * _STRIDE % 100
        for name, percent in sorted(split.items()):
            if at < percent:
                return name
            at -= percent
        return None
