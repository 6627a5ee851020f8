"""What the endpoint serves, as its supervisor knows it, and in which order that may change."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.errors import ConflictError, ServiceUnavailableError, UserError
from onnx_ops.protocol.routing_table import RoutingTable, TableFile, build_next_table
from onnx_ops.serving.shared import Shared, Slots

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edition:
    """A table on its way to the workers or published by them. `slots` are where its deployments are counted."""

    number: int
    table: RoutingTable
    slots: Mapping[str, int]


Prepare = Callable[[Edition], Awaitable[None]]
"""Has every worker load what an edition needs; raises if one of them cannot."""


class Endpoint:
    """The published edition. A change is prepared by all workers, written, and then published by setting one number.

    Args:
        tables: where the table is kept.
        shared: holds the number that the workers look at.
    """

    def __init__(self, tables: TableFile, shared: Shared) -> None:
        self._tables = tables
        self._shared = shared
        self._slots = Slots(shared)
        self._last = 0
        self.current: Edition | None = None

    @property
    def state(self) -> EndpointState | None:
        return None if self.current is None else self.current.table.state

    def restore(self) -> None:
        """Publish the last table again, before there are workers."""
        table = self._tables.read()
        if table is not None:
            self._publish(self._next(table))

    def settled(self, state: EndpointState) -> bool:
        """Whether this very state is published already.

        Raises:
            ConflictError: the generation is older than the current one, or is the current one with other content.
            UserError: the state names no deployment, or more than one model.
        """
        if len({d.model for d in state.deployments}) != 1:
            raise UserError("an endpoint serves deployments of exactly one model")
        if self.state is None:
            return False
        _check_order(self.state, state)
        return self.state == state

    async def publish(self, state: EndpointState, prepare: Prepare) -> Edition:
        """Prepare a state everywhere, write it durably, then publish it. On any error nothing has changed.

        The caller has asked `settled`, and lets nobody else publish meanwhile.

        Raises:
            ServiceUnavailableError: the table could not be written.
            OnnxOpsError: a worker could not prepare it.
        """
        edition = self._next(build_next_table(None if self.current is None else self.current.table, state))
        await prepare(edition)
        # From here to the end nothing may be awaited: a worker that started in between would not know the edition.
        try:
            self._tables.write(edition.table)
        except OSError as error:
            raise ServiceUnavailableError("the table could not be written", why=str(error)) from error
        self._publish(edition)
        _log.info("generation %d is published: %s", state.generation, dict(state.split.weights))
        return edition

    def _next(self, table: RoutingTable) -> Edition:
        self._last += 1
        slots = self._slots.assign(table, None if self.current is None else self.current.table)
        return Edition(number=self._last, table=table, slots=slots)

    def _publish(self, edition: Edition) -> None:
        self.current = edition
        self._shared.edition = edition.number


def _check_order(current: EndpointState, asked: EndpointState) -> None:
    if asked.generation > current.generation:
        return
    if asked.generation < current.generation:
        raise ConflictError(
            f"generation {asked.generation} is older than the published generation {current.generation}",
            remedy="Observe the endpoint again and decide anew.",
        )
    if not asked.is_equivalent(current):
        raise ConflictError(
            f"generation {asked.generation} is published already with another content",
            remedy="Observe the endpoint again and decide anew.",
        )
