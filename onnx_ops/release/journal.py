"""Read and write the ledgers of endpoints, and retry if another writer was first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.ledger import EntryBody, Intent, LedgerEntry, ReleaseState, apply_entry, fold
from onnx_ops.domain.rollout import Action
from onnx_ops.errors import ConflictError, CorruptStateError, LedgerConflictError, NotFoundError
from onnx_ops.ports import Context

MAX_CONFLICT_ATTEMPTS = 10
"""Maximum number of attempts to append an entry while other writers are first.

Each failed attempt means that another writer appended an entry.
"""
_Result = TypeVar("_Result")


def retry_on_conflict(attempt: Callable[[], _Result]) -> _Result:
    """Call `attempt`, and call it again if another writer was first.

    `attempt` reads the ledger, decides and appends an entry.

    Raises:
        LedgerConflictError: other writers were first at every attempt.
    """
    for _ in range(MAX_CONFLICT_ATTEMPTS - 1):
        with suppress(LedgerConflictError):
            return attempt()
    return attempt()


@dataclass(slots=True)
class Journal:
    """The state of one endpoint, updated by the entries that are appended through it."""

    context: Context
    state: ReleaseState
    actor: str

    @classmethod
    def open(cls, context: Context, endpoint: str, *, actor: str = "") -> Journal:
        """Read the ledger of an endpoint; raise CorruptStateError if it is damaged."""
        return cls(context, context.ledger.state(endpoint), actor or context.host.actor())

    @classmethod
    def update(
        cls,
        context: Context,
        endpoint: str,
        change: Callable[[Journal], _Result],
        *,
        actor: str = "",
    ) -> _Result:
        """Call `change` with the endpoint's journal, and return its result.

        The call is repeated with a fresh journal if another writer appended first (see
        `retry_on_conflict`).
        """
        return retry_on_conflict(lambda: change(cls.open(context, endpoint, actor=actor)))

    @property
    def config(self) -> EndpointConfig:
        """The endpoint's config.

        Raises:
            NotFoundError: no pipeline has bound the endpoint.
        """
        if self.state.config is None:
            known = ", ".join(list_bound_endpoints(self.context)) or "none"
            raise NotFoundError(
                "there is no endpoint of this name",
                where=self.state.endpoint,
                remedy=f"Known endpoints: {known} (ledger: {self.context.ledger.place}). "
                "An endpoint is bound by the first `onnx-ops run` that deploys it.",
            )
        return self.state.config

    def require_idle(self) -> None:
        """Raise ConflictError while another running process holds the lease."""
        if (intent := self.active_intent()) is not None:
            raise ConflictError(
                f"{intent.holder} is changing this endpoint",
                where=self.state.endpoint,
                why=intent.action.why,
                remedy="Try again when the change has finished.",
            )

    def active_intent(self) -> Intent | None:
        """Return the open intent if it still reserves the endpoint, or None.

        The result is None if no intent is open, the lease has expired, or its process is dead.
        """
        intent = self.state.open_intent
        if (
            intent is None
            or self.context.clock.now() >= intent.expires_at
            or not self.context.host.alive(intent.holder)
        ):
            return None
        return intent

    def append(self, body: EntryBody, *, actor: str = "") -> int:
        """Append an entry after the last known entry, and return its sequence.

        Raises:
            LedgerConflictError: another writer appended first; nothing was changed.
            MissingKeyError: the entry grants something, and no trusted key can sign it here.
        """
        entry = LedgerEntry(
            endpoint=self.state.endpoint,
            sequence=self.state.head + 1,
            at=self.context.clock.now(),
            actor=actor or self.actor,
            body=body,
        )
        self.context.ledger.append(entry)
        self.state = apply_entry(self.state, entry)
        return entry.sequence


def list_bound_endpoints(context: Context) -> tuple[str, ...]:
    """Return the endpoints that a pipeline has bound.

    Endpoints with a damaged ledger are included, because they can be bound.
    """
    names = (name for name in context.ledger.endpoints() if "@" not in name)
    return tuple(
        name
        for name in names
        if read_readable_state(context, name).config is not None or find_corruption(context, name)
    )


def read_readable_state(context: Context, endpoint: str) -> ReleaseState:
    """Return the state from the readable part of the ledger.

    If the ledger is damaged, the state lacks later entries and can be outdated.
    """
    try:
        return context.ledger.state(endpoint)
    except CorruptStateError:
        return fold(endpoint, context.ledger.read_intact(endpoint))


def find_corruption(context: Context, endpoint: str) -> CorruptStateError | None:
    """Return the error of reading the endpoint's state, or None if it is readable."""
    try:
        context.ledger.state(endpoint)
    except CorruptStateError as error:
        return error
    return None


def list_sibling_states(context: Context, model: str, target: str) -> tuple[ReleaseState, ...]:
    """Return the readable state of each endpoint bound to a model and target."""
    states = (
        read_readable_state(context, name) for name in context.ledger.endpoints() if "@" not in name
    )
    return tuple(
        s
        for s in states
        if s.config is not None and (s.config.model, s.config.target) == (model, target)
    )


def pin_aliases(context: Context, config: EndpointConfig, action: Action) -> Action:
    """Return a rollback action, without aliases if several endpoints share them."""
    return (
        replace(action, aliases={})
        if len(list_sibling_states(context, config.model, config.target)) > 1
        else action
    )


def format_stream_name(model: str, target: str) -> str:
    """Return the name of the ledger for a model and target without an endpoint."""
    return f"{model}@{target}"


def parse_stream_name(name: str) -> tuple[str, str] | None:
    """Return the model and target of a ledger, or None for an endpoint's ledger."""
    model, at, target = name.rpartition("@")
    return (model, target) if at else None
