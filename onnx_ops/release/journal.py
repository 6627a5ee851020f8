"""Reading and writing the ledger of one endpoint: the intent before an effect, the outcome after it; and retries.

An open intent is the lease of the endpoint. It is renewed while the effect is in progress, since a cloud update can
take twenty minutes. A killed process no longer renews it, and another one takes over when the lease expires.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from onnx_ops.attestation import verify_authority
from onnx_ops.domain.endpoint import EndpointConfig, EndpointState, serves_only
from onnx_ops.domain.ledger import (
    ActionOutcome,
    AliasSelection,
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
from onnx_ops.ports import Context
from onnx_ops.release.decision_policy import REJECTED_REMEDY, find_rejection_reason

LEASE_S = 120.0
"""How long an intent excludes other processes. A holder that is known to be dead loses it at once."""
LEASE_CHECK_INTERVAL_S = 1.0
"""How often the thread that renews the lease checks the time, in seconds of this machine."""
MAX_CONFLICT_ATTEMPTS = 10
"""Attempts to append after losing to another writer. Each loss means that the other writer made progress."""
COMMAND_TIMEOUT_S = 4.0
"""Seconds that a command waits for endpoints. An operator needs an answer within ten, start of Python included."""
MAX_PAUSE_S = 60.0
"""Longest pause between two attempts, in seconds."""

Effect: TypeAlias = Callable[[int], None]
_Result = TypeVar("_Result")


def retry_on_conflict(attempt: Callable[[], _Result]) -> _Result:
    """Call `attempt`, which reads the ledger, decides and appends; repeat it if another writer was first.

    Raises:
        LedgerConflictError: other writers were first each time.
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
        """Read the ledger of an endpoint. Raises CorruptStateError if it is damaged."""
        return cls(context, context.ledger.state(endpoint), actor or context.host.actor())

    @classmethod
    def update(
        cls, context: Context, endpoint: str, change: Callable[[Journal], _Result], *, actor: str = ""
    ) -> _Result:
        """Call `change` with the endpoint's journal, again each time that another writer appended first."""
        return retry_on_conflict(lambda: change(cls.open(context, endpoint, actor=actor)))

    @property
    def config(self) -> EndpointConfig:
        """The endpoint's config. Raises NotFoundError if no pipeline has bound it."""
        if self.state.config is None:
            known = ", ".join(list_bound_endpoints(self.context)) or "none"
            raise NotFoundError(
                "no endpoint of that name",
                where=self.state.endpoint,
                remedy=f"Known endpoints: {known} (ledger: {self.context.ledger.place}). "
                "An endpoint is bound by the first `onnx-ops run` that deploys it.",
            )
        return self.state.config

    def require_idle(self) -> None:
        """Raise ConflictError while another live process holds the lease."""
        if (intent := self.active_intent()) is not None:
            raise ConflictError(
                f"{intent.holder} is changing this endpoint",
                where=self.state.endpoint,
                why=intent.action.why,
                remedy="Try again when it has finished.",
            )

    def active_intent(self) -> Intent | None:
        """Return the open intent while it is a lease; None if none is open, it expired, or its holder died."""
        intent = self.state.open_intent
        if (
            intent is None
            or self.context.clock.now() >= intent.expires_at
            or not self.context.host.alive(intent.holder)
        ):
            return None
        return intent

    def append(self, body: EntryBody, *, actor: str = "") -> int:
        """Append an entry after the last known one, and return its sequence.

        Raises:
            LedgerConflictError: another writer appended first; nothing was changed.
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

    def perform(self, action: Action, effect: Effect | None = None, *, selected: AliasSelection | None = None) -> None:
        """Record the intent, apply the action to the endpoint, and record the outcome. Renews the lease meanwhile.

        A failed effect may still have taken place, because an answer can be lost; the observed endpoint then shows it.
        A rollback is complete only once it was observed.

        Args:
            effect: performs the action, given the intent's sequence; by default applies the action's state.
            selected: the alias that the action follows.

        Raises:
            LedgerConflictError: another process acted meanwhile; its record counts.
            RefusedError: the action deploys something that is not approved; nothing was done.
            OnnxOpsError: the effect failed; the outcome records it, and the roles stay as they were.
        """
        config = self.config
        if effect is None:
            self._require_approved(action)
        expires_at = self.context.clock.now() + LEASE_S
        holder = self.context.host.holder()
        sequence = self.append(Intent(action=action, holder=holder, expires_at=expires_at, selected=selected))
        with self._renewing_lease(sequence):
            failure: OnnxOpsError | None = None
            try:
                if effect is not None:
                    effect(sequence)
                else:
                    state = replace(self.locate(action.state, sequence), limits_s=self._list_limits(action))
                    self.context.provider(config.provider).apply(config, state, generation=sequence)
            except OnnxOpsError as error:
                failure = error
            except OSError as error:
                failure = InfrastructureError(
                    "the endpoint could not be changed",
                    where=config.endpoint,
                    why=str(error),
                    remedy="Free disk space, or restore access to the file that the reason names.",
                )
            if (failure is not None or action.is_rollback) and (missing := self._find_missing(config, action, failure)):
                failure = failure or ServiceUnavailableError(
                    "the rollback was not observed at the endpoint yet", where=config.endpoint, why=missing
                )
                self._conclude(ActionOutcome(of=sequence, ok=False, detail=str(failure)))
                raise failure
        self._conclude(ActionOutcome(of=sequence, ok=True))

    def renew_lease(self, sequence: int) -> bool:
        """Extend the lease of intent `sequence`. Return False if that intent is no longer open.

        Raises:
            LedgerConflictError: another writer appended just now; call again.
        """
        current = Journal(self.context, self.context.ledger.state(self.state.endpoint), self.actor)
        if current.state.open_intent is None or current.state.generation != sequence:
            return False
        current.append(LeaseRenewed(of=sequence, expires_at=self.context.clock.now() + LEASE_S))
        return True

    def locate(self, state: EndpointState, generation: int) -> EndpointState:
        """Return a state of the ledger with the folders of its files and a generation, as a provider gets it.

        The ledger's own folders are not used: an attacker who can write there could name any.
        """
        place = self.context.files.place
        deployments = tuple(replace(d, location=place(d.manifest)) for d in state.deployments)
        return replace(state, deployments=deployments, generation=generation)

    def _require_approved(self, action: Action) -> None:
        """Require that a trusted key has signed what the action deploys for this model and target."""
        state, config, verifier = self.state, self.config, self.context.verifier()
        for deployment in action.state.deployments:
            about = verify_authority(deployment, verifier)
            if (about.model, about.target) != (config.model, config.target):
                raise RefusedError(
                    f"it was approved for {about.model} on {about.target}",
                    where=f"{config.endpoint}, which serves {config.model} on {config.target}",
                    why=f"the ledger names {deployment.name}",
                    remedy="The ledger was altered; restore it from a backup.",
                )
        for role in (action.roles.stable, action.roles.candidate):
            if role is not None and (why := find_rejection_reason(state, role, config.target, verifier)) is not None:
                where = config.endpoint
                raise RefusedError(f"{role.name} was rolled back here", where=where, why=why, remedy=REJECTED_REMEDY)

    def _list_limits(self, action: Action) -> Mapping[str, tuple[float, ...]]:
        """Return the latencies above which the requests of both versions of a rollout are counted."""
        stable, candidate, fixed = action.roles.stable, action.roles.candidate, self.state.thresholds
        if stable is None or candidate is None or not self.state.policy.is_analyzed:
            return {}
        if fixed is None or fixed.candidate != candidate.manifest or fixed.thresholds is None:
            return {candidate.name: (), stable.name: ()}
        slower = fixed.slower or fixed.thresholds
        return {candidate.name: slower.list_limits(), stable.name: fixed.thresholds.list_limits()}

    def _find_missing(self, config: EndpointConfig, action: Action, failure: OnnxOpsError | None) -> str:
        """Return why the endpoint does not show the action's state; empty if it does.

        After a conflict another process may have set it.
        """
        if isinstance(failure, ConflictError):
            return str(failure)
        try:
            observed = self.context.provider(config.provider).observe(config)
        except OnnxOpsError as error:
            return str(error)
        if observed is None:
            return "it does not answer"
        if action.is_rollback and serves_only(observed, action.state.leader()):
            return "; ".join(observed.stragglers)
        is_applied = not action.is_rollback and observed.is_equivalent(action.state)
        return "" if is_applied else "it serves another state"

    def _conclude(self, outcome: ActionOutcome) -> None:
        """Append the outcome after any newer entries, unless the intent was replaced or concluded."""
        while True:
            try:
                self.append(outcome)
                return
            except LedgerConflictError:
                self.state = self.context.ledger.state(self.state.endpoint)
                if self.state.open_intent is None or self.state.generation != outcome.of:
                    raise

    @contextmanager
    def _renewing_lease(self, sequence: int) -> Iterator[None]:
        """Renew the lease in a thread each time that half of it is over, until the block ends."""
        ended, clock = threading.Event(), self.context.clock

        def keep() -> None:
            due = clock.now() + LEASE_S / 2
            while not ended.wait(LEASE_CHECK_INTERVAL_S):
                now = clock.now()
                if now < due:
                    continue
                try:
                    if not self.renew_lease(sequence):
                        return
                except OnnxOpsError:  # tried again at the next check
                    continue
                due = now + LEASE_S / 2

        thread = threading.Thread(target=keep, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class Backoff:
    """Skip passes over a failing operation: none at first, then 1, 3, 7 … up to `MAX_PAUSE_S`."""

    def __init__(self, interval_s: float) -> None:
        self._most = max(int(MAX_PAUSE_S / interval_s) - 1, 0)
        self._failures = 0
        self._skip = 0

    def is_due(self) -> bool:
        """Return whether to try in this pass. Call it once per pass."""
        if self._skip:
            self._skip -= 1
            return False
        return True

    def record(self, *, failed: bool) -> None:
        """Record the result of an attempt."""
        self._skip = min((1 << self._failures) - 1, self._most) if failed else 0
        self._failures = min(self._failures + 1, 30) if failed else 0


def call_each(
    names: Iterable[str], call: Callable[[str], _Result]
) -> tuple[dict[str, _Result], dict[str, OnnxOpsError]]:
    """Call a function with each name, and return results and errors by name: a failure does not stop the others."""
    results: dict[str, _Result] = {}
    errors: dict[str, OnnxOpsError] = {}
    for name in names:
        try:
            results[name] = call(name)
        except OnnxOpsError as error:
            errors[name] = error
    return results, errors


def run_concurrently(
    calls: Mapping[str, Callable[[], _Result]], timeout_s: float, on_timeout: Callable[[str], OnnxOpsError]
) -> dict[str, _Result | OnnxOpsError]:
    """Run each call in a separate thread; return its result or error by name.

    A call that exceeds the time limit continues until this process ends; `on_timeout` returns the error to report for
    it.

    Raises:
        BaseException: a call raised an exception other than `OnnxOpsError`.
    """
    results: dict[str, _Result | BaseException] = {}

    def run(name: str, call: Callable[[], _Result]) -> None:
        try:
            results[name] = call()
        except BaseException as error:  # raised again in the caller's thread
            results[name] = error

    threads = [threading.Thread(target=run, args=item, name="release-call", daemon=True) for item in calls.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    completed: dict[str, _Result | OnnxOpsError] = {}
    for name in calls:
        result = results[name] if name in results else on_timeout(name)
        if isinstance(result, BaseException) and not isinstance(result, OnnxOpsError):
            raise result
        completed[name] = result
    return completed


def list_bound_endpoints(context: Context) -> tuple[str, ...]:
    """Return the endpoints that a pipeline has bound, and those with a damaged ledger, which may be bound."""
    names = (name for name in context.ledger.endpoints() if "@" not in name)
    return tuple(
        name
        for name in names
        if read_readable_state(context, name).config is not None or find_corruption(context, name)
    )


def read_readable_state(context: Context, endpoint: str) -> ReleaseState:
    """Return the state from the readable part of the ledger. Only the binding of a damaged one is reliable."""
    try:
        return context.ledger.state(endpoint)
    except CorruptStateError:
        return fold(endpoint, context.ledger.read_intact(endpoint))


def find_corruption(context: Context, endpoint: str) -> CorruptStateError | None:
    """Return why the endpoint's state cannot be read, or None."""
    try:
        context.ledger.state(endpoint)
    except CorruptStateError as error:
        return error
    return None


def list_sibling_states(context: Context, model: str, target: str) -> tuple[ReleaseState, ...]:
    """Return the readable state of every endpoint that serves this model on this target."""
    states = (read_readable_state(context, name) for name in context.ledger.endpoints() if "@" not in name)
    return tuple(s for s in states if s.config is not None and (s.config.model, s.config.target) == (model, target))


def pin_aliases(context: Context, config: EndpointConfig, action: Action) -> Action:
    """Return a rollback without alias writes if several endpoints share the aliases."""
    return replace(action, aliases={}) if len(list_sibling_states(context, config.model, config.target)) > 1 else action


def format_stream_name(model: str, target: str) -> str:
    """Return the name of the ledger of a model and target that no endpoint serves."""
    return f"{model}@{target}"


def parse_stream_name(name: str) -> tuple[str, str] | None:
    """Return the model and target of such a ledger; None for the ledger of an endpoint."""
    model, at, target = name.rpartition("@")
    return (model, target) if at else None
