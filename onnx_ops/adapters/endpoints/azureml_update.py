"""Changes of an endpoint in Azure that can continue after a kill.

The process can be killed between any two requests.

Deployments are created first. Then tags and traffic change in one request, and deletions come last.
Azure has no ETag for endpoints. Therefore each change of traffic follows a read that shows no later
generation, and is read back. Both happen under a lock of this machine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from onnx_ops.adapters.endpoints.azureml_client import (
    AzureClient,
    BusyError,
    GoneError,
    UnansweredWriteError,
    make_timeout_error,
)
from onnx_ops.adapters.endpoints.azureml_deployments import AzureDeployments
from onnx_ops.adapters.endpoints.azureml_models import AzureModels
from onnx_ops.adapters.endpoints.azureml_plan import (
    GENERATION,
    OWNER,
    STATE,
    TrafficPlan,
    plan_names,
    read_deployment_names,
    read_generation,
)
from onnx_ops.adapters.endpoints.azureml_resources import OnlineDeployment, OnlineEndpoint
from onnx_ops.adapters.files import exclusive_lock
from onnx_ops.adapters.retry import converge
from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.errors import ConflictError, InfrastructureError, OnnxOpsError, RefusedError
from onnx_ops.scratch import write_durably

_log = logging.getLogger(__name__)


class SentGeneration:
    """The last generation that this machine sent, and a lock, in one folder.

    Azure's reads can be stale. A read that shows an older generation than the stored one is
    repeated.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "azureml.generation"

    def lock(self) -> AbstractContextManager[None]:
        """Return the lock under which processes of this machine change the traffic.

        If another process keeps the lock for 120 s, ConflictError is raised.
        """
        return exclusive_lock(self._folder / "azureml.lock", 120.0, where=self._folder.name)

    @property
    def value(self) -> int | None:
        """The stored generation; None if no generation is stored.

        The value is 0 after the creation of an endpoint. After the deletion of an endpoint, none is
        stored.
        """
        try:
            text = self._path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        return int(text) if text.isdecimal() else None

    def raise_to(self, generation: int) -> None:
        """Store a generation before it is sent, unless a later one is stored.

        If a crash prevents the request, reads show an older generation. Such reads are trusted
        after `RetryPolicy.lag_s` seconds.
        """
        self.store(max(generation, self.value or 0))

    def store(self, generation: int | None) -> None:
        """Replace the stored generation; None deletes it."""
        if generation is None:
            self._path.unlink(missing_ok=True)
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(self._path, str(generation).encode())


def _is_current(tags: Mapping[str, str], sent: int | None) -> bool:
    """Return whether an endpoint's tags show the sent generation or a later one.

    The result is also True if this machine has sent none, or the owner tag is missing.
    """
    # onnx-ops creates an endpoint together with its owner tag. If the tag is missing, another tool
    # has created the endpoint or changed its tags, so the read counts as current.
    return sent is None or read_generation(tags) >= sent or OWNER not in tags


class AzureEndpoint:
    """One endpoint in Azure: current reads, and changes in the order of generations."""

    def __init__(self, client: AzureClient, sent: SentGeneration) -> None:
        self.client = client
        self.models = AzureModels(client)
        self.deployments = AzureDeployments(client, self.models)
        self._sent = sent
        self._owner = client.owner

    def read(self) -> OnlineEndpoint | None:
        """Wait until a read shows this machine's last write, and return the endpoint.

        After `RetryPolicy.lag_s` seconds, the last read is returned. The result is None if the
        endpoint does not exist.

        Raises:
            RefusedError: this project does not own the endpoint.
            ServiceUnavailableError: Azure cannot serve the request.
        """
        endpoint = self._read_current()
        if endpoint is not None:
            self._require_own(endpoint)
        return endpoint

    def _read_current(self) -> OnlineEndpoint | None:
        """Read the endpoint until the read shows what this machine sent.

        Reads are repeated only within the time for which they can be stale.
        """
        policy, sent = self.client.policy, self._sent.value
        within_s, at_least = (0.0, policy.confirmations) if sent is None else (policy.lag_s, 2)
        endpoint = None
        for count in policy.attempts(within_s, at_least=at_least):
            endpoint = self.client.endpoint()
            if endpoint is not None and _is_current(endpoint.tags, sent):
                return endpoint
            is_confirmed = sent is None and count + 1 >= policy.confirmations
            if endpoint is None and is_confirmed:
                return None
        # Stale reads end before this time, so Azure did not get the last write, or another tool has
        # undone it. The stored generation is replaced, so that the next read does not wait for the
        # effect of this write.
        self._sent.store(None if endpoint is None else read_generation(endpoint.tags))
        return endpoint

    def _require_own(self, endpoint: OnlineEndpoint) -> None:
        """Raise RefusedError if this project does not own an endpoint."""
        owners = {endpoint.tags.get(OWNER)}
        if owners == {None}:
            # If another tool overwrote the tags of the endpoint, the tags of its deployments show
            # the owner.
            owners = {resource.tags.get(OWNER) for resource in self.client.deployments().values()}
        if self._owner in owners and owners <= {self._owner, None}:
            return
        raise RefusedError(
            f"endpoint {self.client.name} exists in the workspace, "
            "but this project does not own it",
            where=self._owner,
            why=f"its tag {OWNER} must be {self._owner}; if the tag is missing, its deployments "
            "must name only this owner",
            remedy="Choose another `name` in the options, or delete the endpoint in Azure. "
            "If this project owns the endpoint, set the tag of the endpoint.",
        )

    def apply(self, plan: TrafficPlan) -> None:
        """Create deployments, route traffic, and delete unneeded deployments.

        If all deployments are ready, the first change is the request that routes traffic.
        """

        def step() -> dict[str, OnlineDeployment] | None:
            before = self.client.deployments()
            if not all(self.deployments.is_ready(before.get(name)) for name in plan.deployments):
                self._ensure_exists(plan)
                for name, deployment in plan.deployments.items():
                    self.deployments.ensure(name, deployment)
            try:
                self.route(plan)
            except GoneError:  # Another client has deleted the endpoint or a deployment.
                return None
            return before

        tries = self.client.policy.attempts(self.client.policy.operation_s)
        # Only deployments that existed before the change are deleted, because a client with a later
        # generation can be creating other deployments now.
        for name, resource in converge(
            step, tries, lambda: make_timeout_error(self._owner)
        ).items():
            if name in plan.deployments or resource.tags.get(OWNER) != self._owner:
                continue
            try:
                endpoint = self.read()
                if endpoint is None or not _matches(endpoint, plan):
                    return
                self.deployments.delete(name)
            except OnnxOpsError as error:
                # The next call tries again, since the deployment then exists before the change.
                _log.warning("deployment %s was not deleted: %s", name, error)

    def route(self, plan: TrafficPlan) -> None:
        """Send the endpoint's tags and traffic in one request, and read them back.

        Raises:
            ConflictError: a later generation was applied, or another state of this generation; or
                Azure stays busy.
            GoneError: the endpoint or one of the deployments does not exist.
            RefusedError: this project does not own the endpoint.
            InfrastructureError: the change failed in Azure, or was not completed in time.
        """

        def step() -> bool | None:
            with self._sent.lock():
                endpoint = self._require_settled()
                self._fence(endpoint, plan)
                if _matches(endpoint, plan):
                    return True
                self._write(endpoint, plan)
                return self._is_shown(plan) or None

        self.client.converge(step, retry_reads=True)

    def restore(self, state: EndpointState, generation: int) -> bool:
        """Give all traffic to the leader of `state` with the second request.

        The first request reads the endpoint. Return whether the endpoint is in the requested state.
        The result is False if the applied state does not contain the leader with the present
        options. It is also False with another owner, a change in progress, a stale read, a
        deployment that does not run, or a failed write. The caller then makes the change in several
        steps.

        Raises:
            ConflictError: a later generation was applied, or another state of this generation.
            InfrastructureError: Azure accepted the change, but failed to complete it, or does not
                answer later reads.
        """
        with self._sent.lock():
            try:
                document = self.client.request(self.client.path, where=self.client.where)
                endpoint = OnlineEndpoint(document)
                plan = self._plan_restore(endpoint, state, generation)
                if plan is None:
                    return False
                self._fence(endpoint, plan)
                if not _matches(endpoint, plan):
                    self._write(endpoint, plan)
            except (BusyError, InfrastructureError, RefusedError):
                return False
            if not _matches(endpoint, plan) and not self._is_shown(plan):
                return False
        # Azure checks only the deployments that get traffic. The tags also list deployments without
        # traffic.
        deployments = self.client.deployments()
        running = {name for name, one in deployments.items() if one.has_succeeded}
        return running.issuperset(read_deployment_names(plan.tags))

    def remove(self) -> None:
        """Delete the endpoint, its deployments, and the files of their models."""

        def step() -> bool | None:
            if self.read() is None:
                return True
            try:
                self.client.settled_endpoint()
                self.deployments.remove_autoscaling()
                endpoints = self.client.ml.online_endpoints
                self.client.write(
                    self.client.where, lambda: endpoints.begin_delete(self.client.name)
                )
            except (BusyError, UnansweredWriteError):
                self._sent.store(None)
                raise
            except GoneError:
                pass
            self._sent.store(None)
            return None

        self.client.converge(step)
        self._sent.store(None)
        for name in self.models.stored():
            self.models.delete(name)

    def _ensure_exists(self, plan: TrafficPlan) -> None:
        """Create the endpoint without traffic if it is missing or incomplete."""
        from azure.ai.ml.entities import (
            IdentityConfiguration,
            ManagedIdentityConfiguration,
            ManagedOnlineEndpoint,
        )

        def step() -> bool | None:
            endpoint = self.read()
            if endpoint is not None:
                self._fence(endpoint, plan)
                settled = endpoint if endpoint.is_settled else self.client.settled_endpoint()
                if settled is not None and (settled.has_succeeded or settled.traffic):
                    return True
            name, options = self.client.name, self.client.options
            identity = IdentityConfiguration(type="system_assigned")
            if options.identity:
                assigned = [ManagedIdentityConfiguration(resource_id=options.identity)]
                identity = IdentityConfiguration(
                    type="user_assigned", user_assigned_identities=assigned
                )
            tags, endpoints = {OWNER: self._owner}, self.client.ml.online_endpoints
            desired = ManagedOnlineEndpoint(
                name=name, auth_mode=options.auth, identity=identity, tags=tags
            )
            with self._sent.lock():
                self._sent.raise_to(0)
                self.client.write(
                    self.client.where, lambda: endpoints.begin_create_or_update(desired)
                )
            return None

        self.client.converge(step)

    def _plan_restore(
        self, endpoint: OnlineEndpoint, state: EndpointState, generation: int
    ) -> TrafficPlan | None:
        """Return the plan of a rollback; None if a change of traffic is not possible.

        It is possible if the read is current, this project owns the settled endpoint, and the
        applied state contains the leader with the present options.
        """
        tags, name = endpoint.tags, self.deployments.name(state.leader())
        is_plain = (
            tags.get(OWNER) == self._owner
            and endpoint.is_settled
            and _is_current(tags, self._sent.value)
        )
        try:
            listed = read_deployment_names(tags) if is_plain else []
        except ValueError:  # onnx-ops has not applied any state to this endpoint.
            return None
        if name not in listed:
            return None
        return plan_names(listed, {name: 100}, generation=generation, since=state.generation)

    def _write(self, endpoint: OnlineEndpoint, plan: TrafficPlan) -> None:
        """Send tags and traffic once; keep the other settings that were just read."""
        foreign = {
            key: value for key, value in endpoint.tags.items() if not key.startswith("onnx-ops-")
        }
        tags = {**foreign, OWNER: self._owner, **plan.tags}
        before = self._sent.value
        self._sent.raise_to(plan.generation)
        try:
            self.client.put_endpoint(endpoint.build_update(tags, plan.traffic))
        except UnansweredWriteError:
            raise
        except OnnxOpsError:
            # The request had no effect in Azure, so the former generation applies again.
            self._sent.store(before)
            raise

    def _is_shown(self, plan: TrafficPlan) -> bool:
        """Wait until reads show a change that Azure accepted; return whether they do.

        Raises:
            ConflictError: a later generation, or another state of this generation, was applied
                meanwhile.
            InfrastructureError: Azure could not complete the change.
        """
        for _ in self.client.policy.attempts(self.client.policy.lag_s):
            endpoint = self.client.settled_endpoint()
            if endpoint is None:  # The read is stale, or another client has deleted the endpoint.
                continue
            self._fence(endpoint, plan)
            if _matches(endpoint, plan):
                return True
            is_sent = all(endpoint.tags.get(key) == value for key, value in plan.tags.items())
            if is_sent and endpoint.state == "failed":
                raise InfrastructureError(
                    "Azure could not change the traffic",
                    where=self._owner,
                    remedy="See the activity log of the endpoint in the portal.",
                )
        return False

    def _require_settled(self) -> OnlineEndpoint:
        """Wait until Azure has completed all changes, and return the endpoint.

        Raises:
            GoneError: the endpoint does not exist.
            RefusedError: this project does not own the endpoint.
        """
        endpoint = self.read()
        if endpoint is not None and not endpoint.is_settled:
            self.client.settled_endpoint()
            endpoint = self.read()
        if endpoint is None:
            raise GoneError("the endpoint does not exist", where=self._owner)
        return endpoint

    def _fence(self, endpoint: OnlineEndpoint, plan: TrafficPlan) -> None:
        generation = read_generation(endpoint.tags)
        if generation > plan.generation:
            what = f"generation {generation} is already applied and is later than {plan.generation}"
            raise ConflictError(what, where=self._owner)
        if generation == plan.generation and endpoint.tags.get(STATE) != plan.tags[STATE]:
            raise ConflictError(
                f"another state of generation {generation} is already applied", where=self._owner
            )


def _matches(endpoint: OnlineEndpoint, plan: TrafficPlan) -> bool:
    """Return whether the endpoint already has the plan's traffic and tags.

    A generation from `since` up to that of the plan is accepted, if `since` is set.
    """
    wanted, generation = dict(plan.tags), read_generation(endpoint.tags)
    if 0 < plan.since <= generation < plan.generation:
        wanted[GENERATION] = str(generation)
    same_tags = all(endpoint.tags.get(key) == value for key, value in wanted.items())
    return (
        same_tags
        and endpoint.has_succeeded
        and not endpoint.mirror_traffic
        and endpoint.traffic == dict(plan.traffic)
    )
