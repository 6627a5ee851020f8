"""One workspace through the SDK's MLClient: reads that are tried again, writes that are tried once.

The SDK's own retries are off, and its requests end after a while. It would send a write again after a newer one of
somebody else; here a write is only repeated after looking whether it is still wanted.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from onnx_ops.adapters.azure import ANSWER_S, Workspace, credential, timeouts
from onnx_ops.adapters.endpoints.azureml_errors import Busy, Gone, explaining
from onnx_ops.errors import InfrastructureError, ServiceUnavailableError
from onnx_ops.plugins import EXTRAS, require

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import ManagedOnlineDeployment, ManagedOnlineEndpoint

T = TypeVar("T")

_SETTLED = frozenset({"succeeded", "failed", "canceled"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long we wait for Azure, in seconds.

    `patience` for an operation (a new deployment takes 5 to 20 minutes), `answers` for a service that fails, `lag`
    until a read shows what was written, between reads from `pause` on and up to `longest`. What is not there is asked
    for `sure` times before that is believed.
    """

    patience: float = 2700.0
    answers: float = 60.0
    lag: float = 60.0
    pause: float = 0.5
    longest: float = 10.0
    sure: int = 3

    def tries(self, within: float) -> Iterator[int]:
        """Counts tries, with growing pauses between them, until time is over; there are at least two."""
        deadline, pause, count = time.monotonic() + within, self.pause, 0
        while count < 2 or time.monotonic() < deadline:
            yield count
            count += 1
            time.sleep(pause)
            pause = min(pause * 1.5, self.longest)


class AzureClient:
    """Endpoints and deployments of a workspace."""

    def __init__(self, place: Workspace, pace: Pace, *, answer_s: float = ANSWER_S) -> None:
        self.place = place
        self.pace = pace
        self.answer_s = answer_s

    @functools.cached_property
    def ml(self) -> MLClient:
        """The SDK's client of the workspace."""
        return _ml_client(self.place, self.answer_s)

    def registry(self, name: str) -> MLClient:
        """A client of the registry of that name, which Azure finds in whatever region it is."""
        return _ml_client(None, self.answer_s, registry=name)

    def connect(self, where: str) -> None:
        """Raises MissingPackageError without extra `azure`; ServiceUnavailableError if the cloud is not identified."""
        require(*EXTRAS["azure"], where=where)
        with explaining(where):
            _ = self.ml

    def endpoint(self, name: str) -> ManagedOnlineEndpoint | None:
        """The endpoint as a read shows it now, which may be as it was a moment ago."""
        found: Any = self.read(f"endpoint {name}", lambda: self.ml.online_endpoints.get(name))
        return found

    def deployments(self, endpoint: str) -> dict[str, ManagedOnlineDeployment]:
        """By name; none if there is no such endpoint."""
        found: Any = self.read(f"endpoint {endpoint}", lambda: list(self.ml.online_deployments.list(endpoint)))
        return {d.name: d for d in found or ()}

    def settled_endpoint(self, name: str) -> ManagedOnlineEndpoint | None:
        """The endpoint once Azure does not change it any more.

        Raises:
            ServiceUnavailableError: Azure is at it for too long.
        """
        return self._settled(f"endpoint {name}", lambda: self.endpoint(name))

    def settled_deployment(self, endpoint: str, name: str) -> ManagedOnlineDeployment | None:
        """Likewise of a deployment."""
        return self._settled(
            f"deployment {name}",
            lambda: self.read(f"deployment {name}", lambda: self.ml.online_deployments.get(name, endpoint)),
        )

    def write(self, where: str, begin: Callable[[], Any], *, instances: int = 1) -> None:
        """Begin an operation and wait for its end, as far as Azure tells it: callers look at what came of it.

        Raises:
            Busy: something else changes it, or there are too many requests; nothing was done.
            Gone: what it needs is not there; nothing was done.
            ServiceUnavailableError: Azure does not answer; the operation may be under way.
            InfrastructureError: it failed.
        """
        try:
            with explaining(where, instances=instances):
                poller = begin()
        except ServiceUnavailableError as error:
            if getattr(error.__cause__, "status_code", None) == HTTPStatus.TOO_MANY_REQUESTS:
                raise Busy(error.what, where=where, why=error.why, remedy=error.remedy) from error
            raise
        # It is under way; a look at it that fails says nothing about it.
        with contextlib.suppress(Gone, ServiceUnavailableError), explaining(where, instances=instances):
            poller.wait(self.pace.patience)
            if poller.done():
                poller.result()

    def read(self, where: str, get: Callable[[], T]) -> T | None:
        """What a read finds; None if it is not there.

        Raises:
            ServiceUnavailableError: Azure does not answer for `pace.answers` seconds.
        """
        last = ServiceUnavailableError("Azure does not answer", where=where)
        for _ in self.pace.tries(self.pace.answers):
            try:
                with explaining(where):
                    return get()
            except Gone:
                return None
            except ServiceUnavailableError as error:
                last = error
        raise last

    def again(self, where: str, do: Callable[[], object]) -> None:
        """Do what may be done twice until it is done.

        Raises:
            ServiceUnavailableError: Azure does not answer for `pace.answers` seconds.
        """
        last = ServiceUnavailableError("Azure does not answer", where=where)
        for _ in self.pace.tries(self.pace.answers):
            try:
                with explaining(where):
                    do()
                return
            except ServiceUnavailableError as error:
                last = error
        raise last

    def _settled(self, where: str, get: Callable[[], T | None]) -> T | None:
        for _ in self.pace.tries(self.pace.patience):
            found = get()
            if found is None or _state(found) in _SETTLED:
                return found
        raise ServiceUnavailableError(
            "Azure is busy with it for too long", where=where, remedy="Look at it in the portal."
        )


def succeeded(found: ManagedOnlineDeployment | ManagedOnlineEndpoint) -> bool:
    return _state(found) == "succeeded"


def _state(found: Any) -> str:
    """The SDK has it as text or as an enumeration, whose text is another."""
    value = found.provisioning_state
    return str(getattr(value, "value", value)).lower()


@functools.cache
def _ml_client(place: Workspace | None, answer_s: float, *, registry: str = "") -> MLClient:
    """A client of a workspace or of a registry."""
    from azure.ai.ml import MLClient

    named = {"registry_name": registry}
    if place is not None:
        named = {
            "subscription_id": place.subscription,
            "resource_group_name": place.resource_group,
            "workspace_name": place.workspace,
        }

    try:
        client = MLClient(
            credential(answer_s),
            **named,
            enable_telemetry=False,
            show_progress=False,
            retry_total=0,
            **timeouts(answer_s),
        )
    except LookupError as error:
        raise InfrastructureError("no such cloud", why=str(error)) from error
    _quieten()
    return client


def _quieten() -> None:
    """The SDK writes dots and remarks to the terminal while it waits, which would stand in the middle of our JSON.

    For one such remark, about a model in a registry, it makes a client of its own, which waits minutes for an answer.
    """
    from azure.ai.ml._utils import _azureml_polling, _endpoint_utils

    _azureml_polling.print = lambda *_, **__: None
    _endpoint_utils.check_default_deployment_template = lambda *_, **__: None
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in ("azure", "msrest", "msal"):
            logging.getLogger(name).setLevel(logging.ERROR)
