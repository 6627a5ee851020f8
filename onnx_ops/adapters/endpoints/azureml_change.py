"""Changing an endpoint in Azure, so that it may be killed between any two requests and begun again.

The order is what keeps traffic at 100 % throughout: deployments first, then tags and traffic in one request, and only
then is taken away what has no traffic any more. There is no ETag, so every write follows a read that shows no later
generation, under a lock of this machine, and is read back.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from onnx_ops.adapters.endpoints.azureml_client import AzureClient, succeeded
from onnx_ops.adapters.endpoints.azureml_deployments import Deployments
from onnx_ops.adapters.endpoints.azureml_errors import Busy, Gone
from onnx_ops.adapters.endpoints.azureml_memory import Memory
from onnx_ops.adapters.endpoints.azureml_models import AzureModels
from onnx_ops.adapters.endpoints.azureml_plan import (
    OWNER,
    STATE,
    Plan,
    generation_of,
    without_ours,
)
from onnx_ops.adapters.endpoints.azureml_settings import AzureSettings
from onnx_ops.errors import ConflictError, OnnxOpsError, RefusedError, ServiceUnavailableError

if TYPE_CHECKING:
    from azure.ai.ml.entities import ManagedOnlineDeployment, ManagedOnlineEndpoint

_log = logging.getLogger(__name__)
_LOCK_S = 120.0


class Change:
    """Everything that changes one endpoint.

    Args:
        name: the endpoint's name in Azure.
        owner: its name here, which stands in its tags.
    """

    def __init__(
        self, client: AzureClient, settings: AzureSettings, models: AzureModels, memory: Memory, name: str, owner: str
    ) -> None:
        self.deployments = Deployments(client, settings, models, name, owner)
        self._client = client
        self._settings = settings
        self._models = models
        self._memory = memory
        self._name = name
        self._owner = owner

    def to(self, plan: Plan) -> None:
        """Raises ConflictError if a later generation was applied, or another state of this one."""
        last = ServiceUnavailableError("Azure is busy with it for too long", where=self._owner)
        for _ in self._client.pace.tries(self._client.pace.patience):
            self._exists(plan)
            before = self._client.deployments(self._name)
            for name, deployment in plan.deployments.items():
                self.deployments.runs(name, deployment)
            try:
                self.routed(plan)
            except Gone as error:  # somebody took a deployment away meanwhile
                last = ServiceUnavailableError("a deployment went away meanwhile", where=self._owner, why=str(error))
                continue
            self._tidy(plan, before)
            return
        raise last

    def present(self) -> ManagedOnlineEndpoint | None:
        """The endpoint, no older than what was sent from this machine, unless that never arrived."""
        pace, sent = self._client.pace, self._memory.generation
        found = None
        for count in pace.tries(pace.pause * pace.sure if sent is None else pace.lag):
            found = self._client.endpoint(self._name)
            if found is not None and (sent is None or generation_of(found.tags or {}) >= sent):
                break
            if found is not None and OWNER not in (found.tags or {}):
                break  # not a read that is behind: ours had this tag from its start
            if found is None and sent is None and count + 1 >= pace.sure:
                break
        else:
            self._memory.believe(None if found is None else generation_of(found.tags or {}))
        if found is not None and not self._is_ours(found):
            raise RefusedError(
                f"an endpoint {self._name} stands in the workspace that is not ours",
                where=self._owner,
                why=f"neither its tag {OWNER} nor that of a deployment in it says {self._owner}",
                remedy="Choose another `name` in its settings, or delete that endpoint; if it is ours, tag it so.",
            )
        return found

    def _is_ours(self, found: ManagedOnlineEndpoint) -> bool:
        """Whether its tag says so; or, where another tool has written tags of its own, the tags of its deployments."""
        tags = found.tags or {}
        if OWNER in tags:
            return str(tags[OWNER]) == self._owner
        owners = {(one.tags or {}).get(OWNER) for one in self._client.deployments(self._name).values()}
        return self._owner in owners and owners <= {self._owner, None}

    def removed(self) -> None:
        """Delete the endpoint with all of its deployments, and their files."""
        last: OnnxOpsError = ServiceUnavailableError("it could not be ended", where=self._owner)
        for _ in self._client.pace.tries(self._client.pace.patience):
            if self.present() is None:
                break
            try:
                self._client.settled_endpoint(self._name)
                self.deployments.let_go()
                self._client.write(
                    f"endpoint {self._name}", lambda: self._client.ml.online_endpoints.begin_delete(self._name)
                )
            except (Busy, ServiceUnavailableError) as error:
                last = error
            except Gone:
                pass
            self._memory.believe(None)
        else:
            raise last
        self._memory.believe(None)
        for model in self._models.kept():
            self._models.discard(model.name)

    def _exists(self, plan: Plan) -> None:
        """Create the endpoint if it is not there. Only then is anything sent that has no traffic in it."""
        last: OnnxOpsError = ServiceUnavailableError("it could not be created", where=self._owner)
        for _ in self._client.pace.tries(self._client.pace.patience):
            found = self.present()
            if found is not None:
                self._fence(found, plan)
                settled = self._client.settled_endpoint(self._name)
                if settled is not None and (succeeded(settled) or settled.traffic):
                    return
            try:
                with self._memory.alone(_LOCK_S):
                    self._memory.sending(0)
                    self._client.write(f"endpoint {self._name}", self._creation)
            except (Busy, ServiceUnavailableError) as error:
                last = error
        raise last

    def _creation(self) -> Any:
        from azure.ai.ml.entities import IdentityConfiguration, ManagedIdentityConfiguration, ManagedOnlineEndpoint

        given = self._settings.identity
        identity = IdentityConfiguration(
            type="user_assigned" if given else "system_assigned",
            user_assigned_identities=[ManagedIdentityConfiguration(resource_id=given)] if given else None,
        )
        return self._client.ml.online_endpoints.begin_create_or_update(
            ManagedOnlineEndpoint(
                name=self._name, auth_mode=self._settings.auth, identity=identity, tags={OWNER: self._owner}
            )
        )

    def routed(self, plan: Plan) -> None:
        """Tags and traffic in one request: get, change, put, read back. Its deployments must run already.

        Raises:
            Gone: one of the deployments is not there.
        """
        last: OnnxOpsError = ServiceUnavailableError("Azure is busy with it for too long", where=self._owner)
        for _ in self._client.pace.tries(self._client.pace.patience):
            try:
                with self._memory.alone(_LOCK_S):
                    if self._shows(plan) or (self._put(plan) and self._becomes(plan)):
                        return
            except (Busy, ServiceUnavailableError) as error:
                last = error
        raise last

    def _shows(self, plan: Plan) -> bool:
        found = self.present()
        if found is None:
            raise Gone("the endpoint went away", where=self._owner)
        self._fence(found, plan)
        return _is(found, plan)

    def _becomes(self, plan: Plan) -> bool:
        return any(self._shows(plan) for _ in self._client.pace.tries(self._client.pace.lag))

    def _put(self, plan: Plan) -> bool:
        if self._client.settled_endpoint(self._name) is None:
            raise Gone("the endpoint went away", where=self._owner)
        running = {name for name, found in self._client.deployments(self._name).items() if succeeded(found)}
        if lost := sorted(set(plan.deployments) - running):
            raise Gone(f"{', '.join(lost)} went away", where=self._owner)
        endpoint = self.present()
        if endpoint is None:
            raise Gone("the endpoint went away", where=self._owner)
        self._fence(endpoint, plan)
        endpoint.tags = {**without_ours(endpoint.tags or {}), OWNER: self._owner, **plan.tags}
        endpoint.traffic = dict(plan.traffic)
        endpoint.mirror_traffic = {}  # what a person has set
        before = self._memory.generation
        self._memory.sending(plan.generation)
        try:
            self._client.write(
                f"endpoint {self._name}", lambda: self._client.ml.online_endpoints.begin_create_or_update(endpoint)
            )
        except Busy:  # it was not taken, so no read has to be waited for that shows it
            self._memory.believe(before)
            raise
        return True

    def _tidy(self, plan: Plan, before: dict[str, ManagedOnlineDeployment]) -> None:
        """Delete what this state does not need. A rollback does not fail for that: what stays is found by `leftovers`.

        Only what stood there before: a driver with a later generation may be making deployments at this moment.
        """
        for name, found in before.items():
            if name in plan.deployments or (found.tags or {}).get(OWNER) != self._owner:
                continue
            try:
                endpoint = self.present()
                if endpoint is None or not _is(endpoint, plan):
                    return
                self.deployments.deleted(name)
            except OnnxOpsError as error:
                _log.warning("deployment %s stays for now: %s", name, error)

    def _fence(self, endpoint: ManagedOnlineEndpoint, plan: Plan) -> None:
        there = generation_of(endpoint.tags or {})
        if there > plan.generation:
            raise ConflictError(
                f"generation {there} was applied already, later than {plan.generation}", where=self._owner
            )
        if there == plan.generation and (endpoint.tags or {}).get(STATE) != plan.digest:
            raise ConflictError(f"another state of generation {there} was applied already", where=self._owner)


def _is(endpoint: ManagedOnlineEndpoint, plan: Plan) -> bool:
    tags = endpoint.tags or {}
    traffic = {name: int(percent) for name, percent in (endpoint.traffic or {}).items() if int(percent)}
    same = all(tags.get(key) == value for key, value in plan.tags.items())
    return same and succeeded(endpoint) and not is_mirrored(endpoint) and traffic == dict(plan.traffic)


def is_mirrored(endpoint: ManagedOnlineEndpoint) -> bool:
    """Return whether somebody has Azure copy its requests."""
    return any(int(percent) for percent in (endpoint.mirror_traffic or {}).values())
