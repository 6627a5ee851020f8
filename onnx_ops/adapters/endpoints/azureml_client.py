"""Client of Azure ML that uses the SDK's MLClient without the SDK's own retries.

Reads are retried, and each write is sent once. The SDK would repeat a write even after another
client has sent a newer write. Before this client repeats a write, a read must show that the write
is still needed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from onnx_ops.adapters.azure import (
    LOGIN_REMEDY,
    ROLE_REMEDY,
    Workspace,
    build_timeouts,
    get_credential,
    summarize_error,
)
from onnx_ops.adapters.endpoints.azureml_settings import AzureSettings
from onnx_ops.adapters.retry import attempts, converge
from onnx_ops.errors import (
    ConflictError,
    InfrastructureError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
)
from onnx_ops.plugins import EXTRAS, require

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import ManagedOnlineDeployment, ManagedOnlineEndpoint

T = TypeVar("T")

SPARE = 1.2
"""Ratio of the instances that Azure counts to the requested instances.

Azure reserves a fifth of a deployment's instances for upgrades, and counts this reserve.
"""
_TERMINAL_STATES = frozenset({"succeeded", "failed", "canceled"})
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_QUOTA = re.compile(r"quota|OutOfCapacity|not enough (cores|capacity)", re.IGNORECASE)
_NO_CONNECTION = re.compile(
    r"timed out|connection (aborted|refused|reset)|failed to establish", re.IGNORECASE
)
_BUSY = re.compile(r"provisioning state|another operation|is in progress", re.IGNORECASE)


class BusyError(ConflictError):
    """Azure is changing the same resource."""


class GoneError(InfrastructureError):
    """The resource does not exist."""


class UnansweredWriteError(ServiceUnavailableError):
    """Azure did not answer a write, which can still be in progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Time limits and pauses of requests to Azure, in seconds.

    `operation_s` limits an operation (a new deployment takes 5 to 20 minutes). `answer_s` limits
    the retries of a failing service, and `lag_s` the time until a read shows a write. Pauses
    between reads grow from `pause_s` to `longest_s`. A resource counts as missing after
    `confirmations` reads.
    """

    operation_s: float = 2700.0
    answer_s: float = 60.0
    lag_s: float = 60.0
    pause_s: float = 0.5
    longest_s: float = 10.0
    confirmations: int = 3

    def attempts(self, within_s: float) -> Iterator[int]:
        """Yield attempts with growing pauses until the time is over, but at least two."""
        return attempts(within_s, self.pause_s, longest_s=self.longest_s, at_least=2)


class AzureClient:
    """Requests about one endpoint and its deployments.

    `owner` is the endpoint's name in onnx-ops, which tags and errors show.
    """

    def __init__(self, settings: AzureSettings, name: str, owner: str, policy: RetryPolicy) -> None:
        self.settings = settings
        self.workspace = settings.place
        self.name = name
        self.owner = owner
        self.policy = policy

    @functools.cached_property
    def ml(self) -> MLClient:
        """Return the SDK's client of the workspace."""
        return _ml_client(self.workspace, self.settings.api_timeout)

    def registry(self, name: str) -> MLClient:
        """Return a client of the registry with that name, in any region."""
        return _ml_client(None, self.settings.api_timeout, registry=name)

    def connect(self) -> None:
        """Create the SDK's client, which reads the metadata of the cloud."""
        require(*EXTRAS["azure"], where=self.owner)
        with translate_errors(self.owner):
            _ = self.ml

    @property
    def where(self) -> str:
        """Return the location that errors about the endpoint show."""
        return f"endpoint {self.name}"

    def endpoint(self) -> ManagedOnlineEndpoint | None:
        """Read the endpoint. The answer can be slightly stale."""
        return self.read(self.where, lambda: self.ml.online_endpoints.get(self.name))

    def deployments(self) -> dict[str, ManagedOnlineDeployment]:
        """Return the deployments by name; empty if the endpoint does not exist."""
        listed: Any = self.read(
            self.where, lambda: list(self.ml.online_deployments.list(self.name))
        )
        return {deployment.name: deployment for deployment in listed or ()}

    def settled_endpoint(self) -> ManagedOnlineEndpoint | None:
        """Return the endpoint as soon as Azure has completed all changes to it."""
        return self._wait_until_settled(self.where, self.endpoint)

    def settled_deployment(self, name: str) -> ManagedOnlineDeployment | None:
        """Return a deployment as soon as Azure has completed all changes to it."""
        where = f"deployment {name}"
        deployments = self.ml.online_deployments
        return self._wait_until_settled(
            where, lambda: self.read(where, lambda: deployments.get(name, self.name))
        )

    def write(self, where: str, begin: Callable[[], Any], *, instances: int = 1) -> None:
        """Start an operation and wait until it ends. Callers then read its result.

        Raises:
            BusyError: another operation is running, or there are too many requests. Nothing was
                changed.
            GoneError: a resource that the operation needs does not exist. Nothing was changed.
            UnansweredWriteError: Azure does not answer. The operation can still be in progress.
            InfrastructureError: the operation failed.
        """
        try:
            with translate_errors(where, instances=instances):
                poller = begin()
        except ServiceUnavailableError as error:
            throttled = (
                getattr(error.__cause__, "status_code", None) == HTTPStatus.TOO_MANY_REQUESTS
            )
            kind = BusyError if throttled else UnansweredWriteError
            raise kind(error.what, where=where, why=error.why, remedy=error.remedy) from error
        # The operation continues in Azure after an error of a poll, so such an error does not mean
        # that the operation failed.
        with (
            contextlib.suppress(GoneError, ServiceUnavailableError),
            translate_errors(where, instances=instances),
        ):
            poller.wait(self.policy.operation_s)
            if poller.done():
                poller.result()

    def read(self, where: str, get: Callable[[], T]) -> T | None:
        """Return the result of a read; None if the resource does not exist."""
        try:
            return self.retry(where, get)
        except GoneError:
            return None

    def retry(self, where: str, request: Callable[[], T]) -> T:
        """Repeat an idempotent request until Azure answers, or `policy.answer_s` is over."""

        def send() -> tuple[T]:
            with translate_errors(where):
                return (request(),)

        tries = self.policy.attempts(self.policy.answer_s)
        return converge(
            send, tries, lambda: make_unanswered_error(where), retried=(ServiceUnavailableError,)
        )[0]

    def converge(
        self, step: Callable[[], T | None], where: str = "", *, retry_reads: bool = False
    ) -> T:
        """Repeat a step until it returns a result, or `policy.operation_s` is over.

        The step is repeated while Azure is busy, and after an unanswered write. With `retry_reads`,
        the step is also repeated if Azure did not answer a read within `policy.answer_s` seconds.
        """
        retried = (BusyError, ServiceUnavailableError if retry_reads else UnansweredWriteError)
        tries = self.policy.attempts(self.policy.operation_s)
        return converge(
            step, tries, lambda: make_timeout_error(where or self.owner), retried=retried
        )

    def _wait_until_settled(self, where: str, get: Callable[[], T | None]) -> T | None:
        def read_settled() -> tuple[T | None] | None:
            resource = get()
            return (resource,) if resource is None or _state(resource) in _TERMINAL_STATES else None

        tries = self.policy.attempts(self.policy.operation_s)
        return converge(read_settled, tries, lambda: make_timeout_error(where))[0]


def has_succeeded(resource: ManagedOnlineDeployment | ManagedOnlineEndpoint) -> bool:
    """Return whether the last operation on a resource succeeded."""
    return _state(resource) == "succeeded"


@contextlib.contextmanager
def translate_errors(where: str, *, instances: int = 1) -> Iterator[None]:
    """Raise the SDK's errors as errors of onnx-ops.

    `instances` is the number of requested instances.
    """
    from azure.ai.ml.exceptions import MlException
    from azure.core.exceptions import AzureError

    try:
        yield
    except (AzureError, MlException, OSError) as error:
        raise _explain(error, where, instances) from error


def make_unanswered_error(where: str, why: str = "") -> ServiceUnavailableError:
    """Return the error of a service that does not answer."""
    return ServiceUnavailableError(
        "Azure does not answer", where=where, why=why, remedy="Try again."
    )


def make_timeout_error(where: str) -> ServiceUnavailableError:
    """Return the error of a change that did not finish in time."""
    what = "Azure did not finish the change in time"
    return ServiceUnavailableError(what, where=where, remedy="See its state in the portal.")


def _explain(error: BaseException, where: str, instances: int) -> OnnxOpsError:
    from azure.core.exceptions import (
        ClientAuthenticationError,
        HttpResponseError,
        ServiceRequestError,
    )

    status, why = getattr(error, "status_code", None), summarize_error(error)
    if (
        isinstance(error, ClientAuthenticationError)
        and status is None
        and _NO_CONNECTION.search(str(error))
    ):
        return ServiceUnavailableError(
            "the token service does not answer", where=where, why=why, remedy="Try again."
        )
    if isinstance(error, ClientAuthenticationError) or status == 401:
        return RefusedError(
            "Azure does not accept the credentials", where=where, why=why, remedy=LOGIN_REMEDY
        )
    if status == 403:
        return RefusedError(
            "Azure does not permit the operation", where=where, why=why, remedy=ROLE_REMEDY
        )
    if _QUOTA.search(f"{getattr(getattr(error, 'error', None), 'code', '')} {why}"):
        remedy = (
            f"A deployment of {instances} instances needs quota for "
            f"{math.ceil(instances * SPARE)}, "
            "as Azure keeps 20% in reserve. Request more quota in the portal (Quotas, "
            "Machine learning), delete an unused deployment, or choose a smaller size."
        )
        return InfrastructureError("there is not enough quota", where=where, why=why, remedy=remedy)
    if status == 409 or (status == 400 and _BUSY.search(why)):
        return BusyError(
            "Azure is changing this resource",
            where=where,
            why=why,
            remedy="Try again when that change is complete.",
        )
    if status == 404:
        return GoneError("it does not exist", where=where, why=why)
    if (
        status in _TRANSIENT
        or not isinstance(error, HttpResponseError)
        or isinstance(error, ServiceRequestError)
    ):
        return make_unanswered_error(where, why)
    remedy = f"See the log of {where}: az ml online-deployment get-logs, or the portal."
    return InfrastructureError("the operation failed", where=where, why=why, remedy=remedy)


def _state(resource: Any) -> str:
    """Return the provisioning state in lower case.

    The SDK represents the state as text, or as an enumeration whose text differs from its value.
    """
    value = resource.provisioning_state
    return str(getattr(value, "value", value)).lower()


@functools.cache
def _ml_client(workspace: Workspace | None, answer_s: float, *, registry: str = "") -> MLClient:
    """Return a client of a workspace or of a registry."""
    from azure.ai.ml import MLClient
    from azure.ai.ml._utils import _azureml_polling, _endpoint_utils

    scope = {"registry_name": registry}
    if workspace is not None:
        scope = {
            "subscription_id": workspace.subscription,
            "resource_group_name": workspace.resource_group,
            "workspace_name": workspace.workspace,
        }
    try:
        client = MLClient(
            get_credential(answer_s),
            **scope,
            enable_telemetry=False,
            show_progress=False,
            retry_total=0,
            **build_timeouts(answer_s),
        )
    except LookupError as error:
        raise InfrastructureError("the Azure cloud is unknown", why=str(error)) from error
    # The SDK's progress dots and remarks must not appear in the output of onnx-ops, in the terminal
    # or in JSON. Before its remark about a model in a registry, the SDK creates a separate client
    # and waits minutes for an answer.
    _azureml_polling.print = lambda *_, **__: None
    _endpoint_utils.check_default_deployment_template = lambda *_, **__: None
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in ("azure", "msrest", "msal"):
            logging.getLogger(name).setLevel(logging.ERROR)
    return client
