"""What the server serves now, and how that changes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.errors import Conflict, NotFound, OnnxOpsError, ServiceUnavailable, UserError
from onnx_ops.protocol.table import Table, follow
from onnx_ops.serving.models import LoadedModel, load_model
from onnx_ops.serving.router import Router
from onnx_ops.serving.table import TableFile

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One published table with everything that a request needs. A request keeps the one it began with.

    `failed` names deployments of the table that could not be loaded after a restart, and why.
    """

    table: Table
    router: Router
    models: Mapping[str, LoadedModel]
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        return self.table.state.deployments[0].model

    def loaded(self, name: str) -> LoadedModel:
        """Raises ServiceUnavailable if that deployment could not be loaded."""
        if name not in self.models:
            raise ServiceUnavailable(f"deployment {name!r} is not loaded", why=self.failed.get(name, ""))
        return self.models[name]

    def version(self, version: str) -> LoadedModel:
        """Raises NotFound if no deployment holds that version."""
        for deployment in self.table.state.deployments:
            if deployment.version == version:
                return self.loaded(deployment.name)
        raise NotFound(f"model {self.model!r} has no version {version!r} here")


class Endpoint:
    """Holds the current snapshot. Reading it is free; changing it is serialised."""

    def __init__(self, tables: TableFile, load: Callable[[Deployment], LoadedModel] = load_model) -> None:
        self._tables = tables
        self._load = load
        self._changing = threading.Lock()
        self._snapshot: Snapshot | None = None

    @property
    def snapshot(self) -> Snapshot | None:
        return self._snapshot

    def current(self) -> Snapshot:
        """Raises ServiceUnavailable before the first publication."""
        if self._snapshot is None:
            raise ServiceUnavailable("no deployment is published here yet")
        return self._snapshot

    def restore(self) -> None:
        """Serve the last published table. Deployments that cannot be loaded any more are recorded as failed."""
        table = self._tables.read()
        if table is None:
            return
        models: dict[str, LoadedModel] = {}
        failed: dict[str, str] = {}
        for deployment in table.state.deployments:
            try:
                models[deployment.name] = self._load(deployment)
            except OnnxOpsError as error:
                _log.error("deployment %s could not be loaded: %s", deployment.name, error)
                failed[deployment.name] = str(error)
        self._snapshot = Snapshot(table=table, router=Router.of(table), models=models, failed=failed)

    def publish(self, state: EndpointState) -> Snapshot:
        """Load what is missing, write the table durably, then serve it. On any error nothing has changed.

        Raises:
            Conflict: the generation is older than the current one, or is the current one with other content.
            UserError: the state names no deployment or more than one model.
            ServiceUnavailable: the table could not be written.
            OnnxOpsError: a deployment could not be loaded (see `load_model`).
        """
        if len({d.model for d in state.deployments}) != 1:
            raise UserError("an endpoint serves deployments of exactly one model")
        with self._changing:
            before = self._snapshot
            if before is not None:
                _check_order(before.table.state, state)
                if not before.failed and before.table.state == state:
                    return before
            return self._replace(before, state)

    def _replace(self, before: Snapshot | None, state: EndpointState) -> Snapshot:
        table = follow(None if before is None else before.table, state)
        ready = {} if before is None else {m.deployment: m for m in before.models.values()}
        models = {d.name: ready[d] if d in ready else self._load(d) for d in state.deployments}
        try:
            self._tables.write(table)
        except OSError as error:
            raise ServiceUnavailable("the table could not be written", why=str(error)) from error
        self._snapshot = Snapshot(table=table, router=Router.of(table), models=models)
        _log.info("generation %d is published: %s", state.generation, dict(state.split.weights))
        return self._snapshot


def _check_order(current: EndpointState, asked: EndpointState) -> None:
    if asked.generation > current.generation:
        return
    if asked.generation < current.generation:
        raise Conflict(
            f"generation {asked.generation} is older than the published generation {current.generation}",
            remedy="Observe the endpoint again and decide anew.",
        )
    if not asked.same_as(current):
        raise Conflict(
            f"generation {asked.generation} is published already with another content",
            remedy="Observe the endpoint again and decide anew.",
        )
