"""Keeps the lease of an effect for as long as the effect is under way: a cloud takes twenty minutes for an update.

Reading and writing the ledger of one endpoint: intent before effect, outcome after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from onnx_ops.attestation import verify_authority
from onnx_ops.domain.endpoint import EndpointConfig, EndpointState, serves_only
from onnx_ops.domain.ledger import (
    ActionOutcome,
    EntryBody,
    Intent,
    LeaseRenewed,
    LedgerEntry,
    ReleaseState,
    apply_entry,
    fold,
)
from onnx_ops.domain.rollout import Action
from onnx_ops.errors import (
    ConflictError,
    CorruptStateError,
    InfrastructureError,
    LedgerConflictError,
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
)
from onnx_ops.ports import Clock, Ports
from onnx_ops.release.decision_policy import REJECTED_REMEDY, find_rejection_reason

LEASE_S = 120.0
"""How long an intent keeps other drivers away. A holder that is seen to be dead loses it at once."""
LEASE_CHECK_INTERVAL_S = 1.0
"""How often the time is looked at, in seconds of this machine."""


@contextmanager
def renew_lease_during(renew: Callable[[], bool], clock: Clock) -> Iterator[None]:
    """Renew a lease that was taken just now, each time that half of it is over, until the block ends.

    It is done beside the block, which may stand in a request of an SDK for long. So a process that was killed or
    stopped does not renew, and is overtaken after one lease.

    Args:
        renew: false once the lease is somebody else's; what it raises is tried again at the next look.
    """
    over = threading.Event()
    keeper = threading.Thread(target=_keep, args=(renew, clock, over), name="lease", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()


def _keep(renew: Callable[[], bool], clock: Clock, over: threading.Event) -> None:
    due = clock.now() + LEASE_S / 2
    while not over.wait(LEASE_CHECK_INTERVAL_S):
        now = clock.now()
        if now < due:
            continue
        try:
            if not renew():
                return
        except OnnxOpsError:
            continue
        due = now + LEASE_S / 2


Effect: TypeAlias = Callable[[int], None]

_Result = TypeVar("_Result")


@dataclass(slots=True)
class Journal:
    """The state of one endpoint, kept current by what is appended through it."""

    ports: Ports
    state: ReleaseState
    actor: str

    @classmethod
    def open(cls, ports: Ports, endpoint: str, *, actor: str = "") -> Journal:
        """Raises CorruptStateError if the ledger cannot be read."""
        return cls(ports, ports.ledger.state(endpoint), actor or ports.host.actor())

    @property
    def config(self) -> EndpointConfig:
        """Raises NotFoundError if no pipeline has bound this endpoint."""
        if self.state.config is None:
            known = ", ".join(list_bound_endpoints(self.ports)) or "none"
            raise NotFoundError(
                "no endpoint of that name",
                where=self.state.endpoint,
                remedy=f"Known endpoints: {known} (ledger: {self.ports.ledger.place}). "
                "An endpoint is bound by the first `onnx-ops run` that deploys it.",
            )
        return self.state.config

    def require_idle(self) -> None:
        """Raises ConflictError while the lease of a driver that lives is open."""
        if (intent := self.at_work()) is None:
            return
        raise ConflictError(
            f"{intent.holder} is changing this endpoint",
            where=self.state.endpoint,
            why=intent.action.why,
            remedy="Try again when that is done.",
        )

    def append(self, body: EntryBody, *, actor: str = "") -> int:
        """Write one entry after the last one known; returns its sequence. `actor` is answerable if it is another.

        Raises:
            LedgerConflictError: somebody else wrote first; nothing was changed.
        """
        entry = LedgerEntry(
            endpoint=self.state.endpoint,
            sequence=self.state.head + 1,
            at=self.ports.clock.now(),
            actor=actor or self.actor,
            body=body,
        )
        self.ports.ledger.append(entry)
        self.state = apply_entry(self.state, entry)
        return entry.sequence

    def at_work(self) -> Intent | None:
        """What is open, as long as it is a lease; None if nothing is, or its driver died."""
        intent = self.state.open_intent
        if intent is None or self.ports.clock.now() >= intent.expires_at or not self.ports.host.alive(intent.holder):
            return None
        return intent

    def perform(self, action: Action, effect: Effect | None = None) -> None:
        """Intent, effect, outcome. The lease is kept meanwhile.

        An effect that failed may have taken place all the same, as an answer can be lost: then the endpoint shows it.
        The way back counts as done only once it was observed.

        Args:
            action: what is to be done.
            effect: how, given the intent's sequence; by default the provider applies the action's state.

        Raises:
            LedgerConflictError: somebody else acted in between; what they wrote counts.
            RefusedError: it brings what nobody has approved; nothing was done.
            OnnxOpsError: the effect failed; the outcome says so and the roles stay as they were.
        """
        config = self.config
        if effect is None:
            self._allow(action)
        holder = self.ports.host.holder()
        expires = self.ports.clock.now() + LEASE_S
        sequence = self.append(Intent(action=action, holder=holder, expires_at=expires))
        with renew_lease_during(lambda: self.renewed(sequence), self.ports.clock):
            failure = self._attempt(config, action, sequence, effect)
            if (failure is not None or action.is_rollback) and not self._shows(config, action, failure):
                failure = failure or ServiceUnavailableError(
                    "the endpoint was not observed where it should be yet", where=config.endpoint
                )
                self._conclude(ActionOutcome(of=sequence, ok=False, detail=str(failure)))
                raise failure
        self._conclude(ActionOutcome(of=sequence, ok=True))

    def _attempt(
        self, config: EndpointConfig, action: Action, sequence: int, effect: Effect | None
    ) -> OnnxOpsError | None:
        try:
            if effect is not None:
                effect(sequence)
            else:
                state = with_generation(action.state, sequence)
                self.ports.provider(config.provider).apply(config, state, generation=sequence)
        except OnnxOpsError as error:
            return error
        except OSError as error:
            return InfrastructureError(
                "the endpoint cannot be changed",
                where=config.endpoint,
                why=str(error),
                remedy="Free the disk, or give back access to what the reason names.",
            )
        return None

    def _allow(self, action: Action) -> None:
        """Whatever the ledger says: only what a trusted key has signed for this model and target is ever applied.

        Raises:
            RefusedError: a deployment is not approved, or a candidate was rolled back here and nobody overrode that.
        """
        state, config, verifier = self.state, self.config, self.ports.verifier()
        for deployment in action.state.deployments:
            about = verify_authority(deployment, verifier)
            if (about.model, about.target) != (config.model, config.target):
                raise RefusedError(
                    f"it was approved for {about.model} on {about.target}",
                    where=f"{config.endpoint}, which serves {config.model} on {config.target}",
                    why=f"the ledger names {deployment.name}",
                    remedy="Somebody has changed the ledger; restore it from a backup.",
                )
        for role in (action.roles.stable, action.roles.candidate):
            if role is not None and (why := find_rejection_reason(state, role, config.target, verifier)) is not None:
                raise RefusedError(
                    f"{role.name} was rolled back here", where=config.endpoint, why=why, remedy=REJECTED_REMEDY
                )

    def _shows(self, config: EndpointConfig, action: Action, failure: OnnxOpsError | None) -> bool:
        """Whether the endpoint does what the action asks for. After a conflict that is somebody else's doing."""
        if isinstance(failure, ConflictError):
            return False
        try:
            actual = self.ports.provider(config.provider).observe(config)
        except OnnxOpsError:
            return False
        if actual is None:
            return False
        return serves_only(actual, action.state.leader()) if action.is_rollback else actual.is_equivalent(action.state)

    def renewed(self, sequence: int) -> bool:
        """Let the lease of the intent in entry `sequence` last from now on; false if it is not the open one any more.

        Raises:
            LedgerConflictError: somebody else wrote just now; call again.
        """
        endpoint = self.state.endpoint
        there = Journal(self.ports, self.ports.ledger.state(endpoint), self.actor)
        if there.state.open_intent is None or there.state.generation != sequence:
            return False
        there.append(LeaseRenewed(of=sequence, expires_at=self.ports.clock.now() + LEASE_S))
        return True

    def _conclude(self, outcome: ActionOutcome) -> None:
        """Write the outcome, after whatever else was appended meanwhile.

        Raises:
            LedgerConflictError: another intent has overtaken this one, or somebody else has concluded it.
        """
        while True:
            try:
                self.append(outcome)
            except LedgerConflictError:
                self.state = self.ports.ledger.state(self.state.endpoint)
                if self.state.open_intent is None or self.state.generation != outcome.of:
                    raise
            else:
                return


def with_generation(state: EndpointState, generation: int) -> EndpointState:
    return EndpointState(deployments=state.deployments, split=state.split, generation=generation)


def list_bound_endpoints(ports: Ports) -> tuple[str, ...]:
    """Names of all endpoints that a pipeline has bound; with those whose ledger is damaged, as they may be bound."""
    names = (name for name in ports.ledger.endpoints() if "@" not in name)
    return tuple(
        name
        for name in names
        if read_readable_state(ports, name).config is not None or find_corruption(ports, name) is not None
    )


def read_readable_state(ports: Ports, endpoint: str) -> ReleaseState:
    """State by as much of the ledger as can be read. Of a damaged one, what the endpoint is bound to can be believed,
    and nothing that moves."""
    try:
        return ports.ledger.state(endpoint)
    except CorruptStateError:
        return fold(endpoint, ports.ledger.read_intact(endpoint))


def find_corruption(ports: Ports, endpoint: str) -> CorruptStateError | None:
    """Why the endpoint's state cannot be read."""
    try:
        ports.ledger.state(endpoint)
    except CorruptStateError as error:
        return error
    return None


def list_sibling_states(ports: Ports, model: str, target: str) -> tuple[ReleaseState, ...]:
    """State of every endpoint that serves this model on this target, as far as it is `read_readable_state`."""
    states = (read_readable_state(ports, name) for name in ports.ledger.endpoints() if "@" not in name)
    return tuple(s for s in states if s.config is not None and (s.config.model, s.config.target) == (model, target))


def pin_aliases(ports: Ports, config: EndpointConfig, action: Action) -> Action:
    """The way back on one of several endpoints is its own; the aliases speak for all of them."""
    return replace(action, aliases={}) if len(list_sibling_states(ports, config.model, config.target)) > 1 else action


def format_stream_name(model: str, target: str) -> str:
    """Ledger of a model and target that no endpoint serves."""
    return f"{model}@{target}"


def parse_stream_name(name: str) -> tuple[str, str] | None:
    """Model and target of such a ledger; None for the ledger of an endpoint."""
    model, at, target = name.rpartition("@")
    return (model, target) if at else None
