"""Client of Azure ML: requests to Azure Resource Manager, and the SDK's MLClient.

Plain requests read endpoints and deployments. They also change traffic, tags, instance counts and
autoscaling. The SDK creates and deletes endpoints and deployments, and manages models and
environments. Its import takes about 7 s of CPU time, so it is loaded only for these operations.

`read` and `retry` repeat requests that Azure cannot serve now. `write` and `put_endpoint` send a
change once. The SDK's own retries would repeat a change even after another client has sent a newer
one. The callers of both methods repeat a change only if a read shows that it is still needed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from onnx_ops.adapters.azure import (
    LOGIN_REMEDY,
    Workspace,
    build_timeouts,
    get_credential,
    get_management_url,
    is_unanswered_token_request,
    make_role_remedy,
    make_token_error,
    request_resource,
    summarize_error,
)
from onnx_ops.adapters.endpoints.azureml_options import AzureOptions
from onnx_ops.adapters.endpoints.azureml_resources import (
    AzureResource,
    OnlineDeployment,
    OnlineEndpoint,
)
from onnx_ops.adapters.retry import attempts, converge
from onnx_ops.errors import (
    ConflictError,
    InfrastructureError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
)

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

T = TypeVar("T")
R = TypeVar("R", bound=AzureResource)

API_VERSION = "api-version=2024-04-01"
"""Version of the API of workspaces, as a query."""

SPARE = 1.2
"""Ratio of the instances that count against the quota to the requested instances.

Azure reserves a fifth of a deployment's instances for upgrades, and counts this reserve.
"""
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_CAPACITY = re.compile(
    r"OutOfCapacity|AllocationFailed|SkuNotAvailable|(not enough|lack of) .*capacity", re.IGNORECASE
)
_QUOTA = re.compile(r"quota|not enough cores", re.IGNORECASE)
_REFUSAL = re.compile(r"HTTP (\d{3}) ?(.*)", re.DOTALL)
"""Pattern of the reason in a refusal: the HTTP status, and Azure's message."""
_BUSY = re.compile(r"provisioning state|another operation|is in progress", re.IGNORECASE)
_ANY_WORKSPACE = Workspace(
    subscription="SUBSCRIPTION", resource_group="GROUP", workspace="WORKSPACE"
)
_NEW_MACHINE = (
    "For an existing endpoint, another `instance_type` needs a new measurement: "
    "see `onnx-ops docs cloud-traffic`."
)


class BusyError(ConflictError):
    """Azure refused a change: it is changing the resource, or gets too many requests."""


class GoneError(InfrastructureError):
    """Azure refused a request because its resource does not exist."""


class UnansweredWriteError(ServiceUnavailableError):
    """A write whose result is unknown; it can still be in progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Time limits and pauses of requests to Azure, in seconds.

    `operation_s` limits an operation (a new deployment takes 5 to 20 minutes). `answer_s` limits
    the retries of a failing service, and `lag_s` the time until a read shows a write. Pauses
    between attempts grow from `pause_s` to `longest_s`. An endpoint for which this machine stores
    no generation is treated as missing after `confirmations` reads fail to find it.
    """

    operation_s: float = 2700.0
    answer_s: float = 60.0
    lag_s: float = 60.0
    pause_s: float = 0.5
    longest_s: float = 10.0
    confirmations: int = 3

    def attempts(self, within_s: float, *, at_least: int = 2) -> Iterator[int]:
        """Yield attempts with growing pauses within a time, and at least `at_least`."""
        return attempts(within_s, self.pause_s, longest_s=self.longest_s, at_least=at_least)


class AzureClient:
    """Client for one endpoint and its deployments.

    `owner` is the endpoint's name in onnx-ops, which tags and errors show.
    """

    def __init__(self, options: AzureOptions, name: str, owner: str, policy: RetryPolicy) -> None:
        self.options = options
        self.workspace = options.place
        self.name = name
        self.owner = owner
        self.policy = policy

    @functools.cached_property
    def ml(self) -> MLClient:
        """The SDK's client of the workspace.

        If the SDK lacks the settings of the cloud, the creation of the client requests the
        cloud's metadata.
        """
        with translate_errors(self.owner):
            return _ml_client(self.workspace, self.options.api_timeout)

    def registry(self, name: str) -> MLClient:
        """Return a client of the registry with that name, in any region."""
        return _ml_client(None, self.options.api_timeout, registry=name)

    @property
    def where(self) -> str:
        """Location that errors about the endpoint show."""
        return f"endpoint {self.name}"

    @property
    def path(self) -> str:
        """Resource id of the endpoint in Azure Resource Manager."""
        return f"{self.workspace.path}/onlineEndpoints/{self.name}"

    def deployment_path(self, name: str) -> str:
        """Return the resource id of a deployment."""
        return f"{self.path}/deployments/{name}"

    def request(
        self,
        path: str,
        *,
        where: str,
        method: str = "GET",
        document: object = None,
        instances: int = 1,
        role_remedy: str = "",
    ) -> Any:
        """Send one request to Azure Resource Manager; return its answer.

        Args:
            path: path of a resource, with the version of the API if it is not `API_VERSION`.
            where: location that errors show.
            method: method of the request.
            document: document to send.
            instances: number of requested instances, for errors.
            role_remedy: remedy for a missing permission; empty to select it by Azure's answer.

        Raises:
            OnnxOpsError: Azure refuses the request, or does not answer. `_explain_answer` selects
                the type of the error for a refusal.
        """
        url = path if "api-version=" in path else f"{path}?{API_VERSION}"
        try:
            return request_resource(
                url, method=method, document=document, api_timeout_s=self.options.api_timeout
            )
        except ServiceUnavailableError as error:
            if error.remedy:
                # The error has a remedy if there is no token, or if a proxy has answered.
                error.where = error.where or self.owner
                raise
            raise make_unanswered_error(where, error.why) from error
        except RefusedError as error:
            match = _REFUSAL.match(error.why)
            if match is None:
                # An error about a missing token has no HTTP status.
                error.where = error.where or self.owner
                raise
            status, why = int(match[1]), error.why
            role_remedy = role_remedy or make_role_remedy(why)
            raise _explain_answer(
                status, why, where, role_remedy=role_remedy, instances=instances
            ) from error

    def endpoint(self) -> OnlineEndpoint | None:
        """Read the endpoint; None if it does not exist. The answer can be stale."""
        document = self.read(self.where, lambda: self.request(self.path, where=self.where))
        return None if document is None else OnlineEndpoint(document)

    def deployments(self) -> dict[str, OnlineDeployment]:
        """Return the deployments by name; empty if the endpoint does not exist."""
        documents: list[Any] = []
        path: str | None = f"{self.path}/deployments"
        while path is not None:
            page: Any = self.read(
                self.where, functools.partial(self.request, path, where=self.where)
            )
            documents += (page or {}).get("value", ())
            following = str((page or {}).get("nextLink") or "")
            base = get_management_url()
            path = following.removeprefix(base) if following.startswith(f"{base}/") else None
        return {one.name: one for one in map(OnlineDeployment, documents)}

    def settled_endpoint(self) -> OnlineEndpoint | None:
        """Wait until Azure has completed all changes to the endpoint, and return it.

        The result is None if the endpoint does not exist.
        """
        return self._wait_until_settled(self.where, self.endpoint)

    def settled_deployment(self, name: str) -> OnlineDeployment | None:
        """Wait until Azure has completed all changes to a deployment, and return it.

        The result is None if the deployment does not exist.
        """
        where, path = f"deployment {name}", self.deployment_path(name)

        def get() -> OnlineDeployment | None:
            document = self.read(where, lambda: self.request(path, where=where))
            return None if document is None else OnlineDeployment(document)

        return self._wait_until_settled(where, get)

    def put_endpoint(self, document: object) -> None:
        """Send a changed endpoint once; Azure accepts the change before completing it.

        Raises:
            OnnxOpsError: the errors of `write`.
        """
        try:
            self.request(self.path, where=self.where, method="PUT", document=document)
        except ServiceUnavailableError as error:
            raise _make_write_error(error, "HTTP 429" in error.why) from error

    def write(self, where: str, begin: Callable[[], Any], *, instances: int = 1) -> None:
        """Start an operation, and wait for its end, at most `policy.operation_s` seconds.

        A poll that Azure cannot serve also ends the wait. Callers then read the result of the
        operation.

        Raises:
            BusyError: another operation is running, or there are too many requests. Nothing was
                changed.
            GoneError: a resource that the operation needs does not exist. Nothing was changed.
            UnansweredWriteError: Azure does not answer, or reports a temporary error. The operation
                can still be in progress.
            RefusedError: Azure does not accept the credentials or permit the operation.
            InfrastructureError: the operation failed.
        """
        try:
            with translate_errors(where, instances=instances):
                poller = begin()
        except ServiceUnavailableError as error:
            status = getattr(error.__cause__, "status_code", None)
            raise _make_write_error(error, status == HTTPStatus.TOO_MANY_REQUESTS) from error
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
        """Repeat an idempotent request until Azure serves it, or `policy.answer_s` is over."""

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

        The step is repeated while Azure is busy, and after an `UnansweredWriteError`. With
        `retry_reads`, the step is also repeated if Azure could not serve a read within
        `policy.answer_s` seconds.
        """
        retried = (BusyError, ServiceUnavailableError if retry_reads else UnansweredWriteError)
        tries = self.policy.attempts(self.policy.operation_s)
        return converge(
            step, tries, lambda: make_timeout_error(where or self.owner), retried=retried
        )

    def _wait_until_settled(self, where: str, get: Callable[[], R | None]) -> R | None:
        def read_settled() -> tuple[R | None] | None:
            resource = get()
            return (resource,) if resource is None or resource.is_settled else None

        tries = self.policy.attempts(self.policy.operation_s)
        return converge(read_settled, tries, lambda: make_timeout_error(where))[0]


@contextlib.contextmanager
def translate_errors(where: str, *, instances: int = 1) -> Iterator[None]:
    """Raise the SDK's errors as errors of onnx-ops.

    `instances` is the number of requested instances.
    """
    from azure.core.exceptions import AzureError

    try:
        yield
    except (AzureError, OSError, *_list_sdk_errors()) as error:
        raise _explain(error, where, instances) from error


def _list_sdk_errors() -> tuple[type[Exception], ...]:
    """Return the base of azure-ai-ml's errors; empty if the package is not imported."""
    module = sys.modules.get("azure.ai.ml.exceptions")
    return () if module is None else (module.MlException,)


def make_unanswered_error(where: str, why: str = "") -> ServiceUnavailableError:
    """Return the error of a service that does not answer, or refuses for now."""
    return ServiceUnavailableError(
        "Azure does not serve the request now", where=where, why=why, remedy="Try again."
    )


def make_timeout_error(where: str) -> ServiceUnavailableError:
    """Return the error of a change that did not finish in time."""
    what = "Azure did not finish the change in time"
    return ServiceUnavailableError(
        what, where=where, remedy="See the state of the resource in the Azure portal."
    )


def format_log_command(
    workspace: Workspace = _ANY_WORKSPACE, endpoint: str = "ENDPOINT", name: str = "DEPLOYMENT"
) -> str:
    """Return the command that shows a deployment's log; by default, with placeholders."""
    return (
        f"`az ml online-deployment get-logs --name {name} --endpoint-name {endpoint} "
        f"--workspace-name {workspace.workspace} --resource-group {workspace.resource_group} "
        f"--subscription {workspace.subscription}`"
    )


def _make_write_error(error: ServiceUnavailableError, is_throttled: bool) -> OnnxOpsError:
    """Return the error of a write: Azure refused it for now, or its result is unknown."""
    kind = BusyError if is_throttled else UnansweredWriteError
    return kind(error.what, where=error.where, why=error.why, remedy=error.remedy)


def _explain(error: BaseException, where: str, instances: int) -> OnnxOpsError:
    from azure.core.exceptions import (
        ClientAuthenticationError,
        HttpResponseError,
        ServiceRequestError,
    )

    why, is_unauthorized = summarize_error(error), isinstance(error, ClientAuthenticationError)
    if is_unauthorized and is_unanswered_token_request(error):
        return make_token_error(error, where)
    status = HTTPStatus.UNAUTHORIZED if is_unauthorized else getattr(error, "status_code", None)
    is_answer = isinstance(error, HttpResponseError) and not isinstance(error, ServiceRequestError)
    code = getattr(getattr(error, "error", None), "code", "")
    # Azure's code and the denied action can follow the first line.
    role_remedy = make_role_remedy(str(error))
    return _explain_answer(
        status,
        why,
        where,
        role_remedy=role_remedy,
        code=code,
        instances=instances,
        is_answer=is_answer,
    )


def _explain_answer(
    status: int | None,
    why: str,
    where: str,
    *,
    role_remedy: str,
    code: str = "",
    instances: int = 1,
    is_answer: bool = True,
) -> OnnxOpsError:
    """Return the error for an answer of Azure.

    Args:
        status: status of the answer, if there is one.
        why: text of the answer.
        where: location that the error shows.
        role_remedy: remedy for a missing permission.
        code: Azure's code of the error, if it is not part of `why`.
        instances: number of requested instances.
        is_answer: whether Azure answered; False if the request failed before an answer.
    """
    if status == HTTPStatus.UNAUTHORIZED:
        return RefusedError(
            "Azure does not accept the credentials", where=where, why=why, remedy=LOGIN_REMEDY
        )
    if status == HTTPStatus.FORBIDDEN:
        return RefusedError(
            "Azure does not permit the operation", where=where, why=why, remedy=role_remedy
        )
    if (shortage := _explain_shortage(f"{code} {why}", why, where, instances)) is not None:
        return shortage
    is_busy = status == HTTPStatus.BAD_REQUEST and _BUSY.search(why)
    if status == HTTPStatus.CONFLICT or is_busy:
        return BusyError(
            "Azure refused the request because of the resource's current state",
            where=where,
            why=why,
            remedy="Try again when other changes of the resource are complete.",
        )
    if status == HTTPStatus.NOT_FOUND:
        return GoneError("it does not exist", where=where, why=why)
    if status in _TRANSIENT or not is_answer:
        return make_unanswered_error(where, why)
    remedy = (
        f"See {where} in the Azure portal. {format_log_command()} shows the log of a deployment."
    )
    return InfrastructureError("the operation failed", where=where, why=why, remedy=remedy)


def _explain_shortage(
    text: str, why: str, where: str, instances: int
) -> InfrastructureError | None:
    """Return the error if instances or quota are missing; None for other causes.

    Args:
        text: Azure's code and message.
        why: reason that the error shows.
        where: location that the error shows.
        instances: number of requested instances.
    """
    if _CAPACITY.search(text):
        return InfrastructureError(
            "Azure has no free capacity for this instance size in the region",
            where=where,
            why=why,
            remedy="More quota does not help. Set another `instance_type`, use a workspace in "
            f"another region, or try again later. {_NEW_MACHINE}",
        )
    if _QUOTA.search(text):
        remedy = (
            f"For `instances: {instances}`, the quota must cover "
            f"{math.ceil(instances * SPARE)} instances, "
            "as Azure keeps 20% in reserve. Request more quota in the portal (Quotas, "
            "Machine learning), delete an unused deployment, or choose a smaller size. "
            f"{_NEW_MACHINE}"
        )
        return InfrastructureError("there is not enough quota", where=where, why=why, remedy=remedy)
    return None


@functools.cache
def _ml_client(workspace: Workspace | None, answer_s: float, *, registry: str = "") -> MLClient:
    """Return a client of a workspace or of a registry.

    Raises:
        InfrastructureError: the name of the Azure cloud is unknown to the SDK.
    """
    from azure.ai.ml import MLClient
    from azure.ai.ml._utils import _azureml_polling, _endpoint_utils
    from azure.ai.ml.exceptions import MlException

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
    except (LookupError, MlException) as error:
        remedy = "Set AZUREML_CURRENT_CLOUD to a name that `az cloud list --output table` lists."
        raise InfrastructureError(
            "the name of the Azure cloud is unknown", why=str(error), remedy=remedy
        ) from error
    # azure-ai-ml 1.35.2 prints a dot at each poll, which would break the JSON output of onnx-ops.
    # Its check of a registry model only logs a message, but first creates a client of the registry
    # and waits minutes for an answer. No option turns off the dots or the check; the check is from
    # https://github.com/Azure/azure-sdk-for-python/pull/44261
    _azureml_polling.print = lambda *_, **__: None
    _endpoint_utils.check_default_deployment_template = lambda *_, **__: None
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in ("azure", "msrest", "msal"):
            logging.getLogger(name).setLevel(logging.ERROR)
    return client
