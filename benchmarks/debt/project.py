"""A project that several processes open, with one endpoint.

The endpoint serves version 1 first, then version 2 alone or as a canary.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from onnx_ops.adapters.endpoints.azureml import AzureEndpoints
from onnx_ops.adapters.endpoints.azureml_client import RetryPolicy
from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.host import SystemClock
from onnx_ops.adapters.ledgers.log import ObjectLedger
from onnx_ops.app.context import open_project
from onnx_ops.attestation import sign_record
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import Deployment, EndpointConfig, serves_only
from onnx_ops.domain.ledger import Intent, ReleaseState, RollbackRequested
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.release import Publication
from onnx_ops.domain.rollout_policy import DAY, RolloutPolicy
from onnx_ops.errors import ServiceUnavailableError, StillPendingError
from onnx_ops.file_locks import hold_lock
from onnx_ops.ports import Context, Registry, Signer
from onnx_ops.release.promote import bind_endpoint, promote
from onnx_ops.release.reconcile import reconcile_each, reconcile_until_stable
from onnx_ops.release.rollback import roll_back_each
from onnx_ops.release.watch import ReconcileQueue, WatchLoop
from onnx_ops.testing.fakes import FakeRegistry, make_ledger_keys
from onnx_ops.testing.registries import publication

MODEL, TARGET = "linear", "cpu-1t"
POLICY = RetryPolicy(operation_s=20, answer_s=1, lag_s=1, pause_s=0.01, longest_s=0.1)
"""Short waits, since the fake of Azure needs no minutes."""
_WRITES = frozenset({"annotate", "delete_alias", "mirror", "publish", "set_alias"})


class FileRegistry:
    """A registry in a file that several processes share.

    The registry does not answer while a file named `down` lies in the same folder.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._down = file.with_name("down")

    def create(self, registry: FakeRegistry) -> None:
        self._file.write_bytes(pickle.dumps(registry))
        self.answers(True)

    def answers(self, answers: bool) -> None:
        if answers:
            self._down.unlink(missing_ok=True)
        else:
            self._down.touch()

    def opened(self) -> Registry:
        return cast("Registry", self)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments: Any, **options: Any) -> Any:
            if self._down.exists():
                raise ServiceUnavailableError("the registry does not answer")
            with self._alone():
                registry: FakeRegistry = pickle.loads(self._file.read_bytes())  # noqa: S301 (our own)
                result = getattr(registry, name)(*arguments, **options)
                if name in _WRITES:
                    aside = self._file.with_suffix(".new")
                    aside.write_bytes(pickle.dumps(registry))
                    aside.replace(self._file)
            return result

        return call

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with hold_lock(self._file.with_suffix(".lock")):
            yield


class WrongClock(SystemClock):
    """The clock of a machine that is ahead by some seconds.

    `file` holds the seconds by which the clocks of all machines were put forward.
    """

    def __init__(self, ahead_s: float, file: Path) -> None:
        self._ahead_s = ahead_s
        self._file = file

    def now(self) -> float:
        return (
            super().now()
            + self._ahead_s
            + float(self._file.read_text() if self._file.exists() else 0)
        )


@dataclass(frozen=True, kw_only=True)
class Place:
    """The way in which a process opens an endpoint of the project in `root`.

    `environment` holds the variables with which the process reaches the cloud. `shared` is the
    folder of the registry and the ledgers. `machine` is another name for this machine. The clock of
    that machine is ahead by `ahead_s` seconds.
    """

    root: Path
    shared: Path
    config: EndpointConfig
    environment: Mapping[str, str]
    machine: str = ""
    ahead_s: float = 0.0

    @property
    def registry(self) -> FileRegistry:
        return FileRegistry(self.shared / "registry.pickle")

    @property
    def time_file(self) -> Path:
        return self.shared / "time"

    def context(self) -> Context:
        os.environ.update(self.environment)
        project = open_project(self.root)
        clock = WrongClock(self.ahead_s, self.time_file)
        ledger = self.ledger()
        context = replace(
            project.context, registry=self.registry.opened, open_ledger=lambda: ledger, clock=clock
        )
        if self.config.provider == "azureml":
            azure = AzureEndpoints(
                project.settings.endpoints, project.settings.trusted_keys, policy=POLICY
            )
            context = replace(context, provider=lambda _: azure)
        return context

    def ledger(self) -> ObjectLedger:
        """Return the ledger of this endpoint alone, so that endpoints are independent."""
        return ObjectLedger(
            LocalObjects(self.shared / "ledgers" / self.config.endpoint), make_ledger_keys()
        )

    def state(self) -> ReleaseState:
        return self.ledger().state(self.config.endpoint)

    def version(self, number: str) -> Deployment:
        deployment = self.state().known[number]
        return replace(
            deployment, location=open_project(self.root).context.files.place(deployment.manifest)
        )

    def is_requested(self) -> bool:
        return any(
            isinstance(entry.body, RollbackRequested)
            for entry in self.ledger().read(self.config.endpoint)
        )

    def requested_at(self) -> float:
        """Return when the rollback was first requested, in seconds since the epoch."""
        entries = self.ledger().read(self.config.endpoint)
        return next(entry.at for entry in entries if isinstance(entry.body, RollbackRequested))

    def is_paid(self) -> bool:
        """Return whether the rollback took effect and version 2 is rejected.

        Both are read from the ledger.
        """
        state = self.state()
        return state.pending_rollback is None and state.find_rejection(state.known["2"]) is not None

    def intents_for_the_rolled_back(self) -> int:
        """Count the effects after the request that were to give version 2 traffic.

        The effects are the intents that the ledger records.
        """
        bodies = [entry.body for entry in self.ledger().read(self.config.endpoint)]
        requests = [
            number for number, body in enumerate(bodies) if isinstance(body, RollbackRequested)
        ]
        after = bodies[requests[0] :] if requests else []
        return sum(
            isinstance(body, Intent) and bool(body.action.state.split.weights.get("v2"))
            for body in after
        )


def create_project(root: Path) -> FakeRegistry:
    """Make a project with a key.

    Return a registry with two versions that the project has approved.
    """
    (root / "onnx-ops.toml").touch()
    signer = open_project(root).context.signer()
    assert signer is not None
    registry = FakeRegistry()
    for seed in ("a", "b"):
        registry.publish(
            _signed(publication(root / "files", model=MODEL, seed=seed, target=TARGET), signer)
        )
    return registry


def _signed(made: Publication, signer: Signer) -> Publication:
    """Return the publication with decisions signed by the project's own key."""
    variants = (
        replace(
            v,
            signed={
                target: sign_record(decision.record, signer)
                for target, decision in v.signed.items()
            },
        )
        for v in made.variants
    )
    return replace(made, variants=tuple(variants))


def config_of(endpoint: str, provider: str, options: Mapping[str, Json]) -> EndpointConfig:
    return EndpointConfig(
        endpoint=endpoint,
        provider=provider,
        model=MODEL,
        target=TARGET,
        target_digest=digest_bytes(TARGET.encode()),
        pipeline="p",
        options=options,
    )


def serve_first(place: Place, scale_down_delay: float = DAY) -> Context:
    context = place.context()
    bind_endpoint(context, place.config, RolloutPolicy(scale_down_delay=scale_down_delay))
    promote(context, MODEL, "1", TARGET)
    reconcile_until_stable(context, place.config.endpoint)
    return context


def serve_both(place: Place, keep_first: bool) -> None:
    """Let version 1 serve, then version 2.

    Version 1 stays loaded if `keep_first` is true, and is unloaded otherwise.
    """
    context = serve_first(place, DAY if keep_first else 0.0)
    promote(context, MODEL, "2", TARGET)
    reconcile_until_stable(context, place.config.endpoint)
    actual = context.provider(place.config.provider).observe(place.config)
    if (
        actual is None
        or not serves_only(actual, place.version("2"))
        or len(actual.deployments) != 1 + keep_first
    ):
        raise SystemExit(f"version 2 does not serve: {actual}")


def serve_canary(place: Place) -> None:
    """Let version 1 serve, then version 2 beside it with half of the traffic.

    Version 2 gets more traffic only when an operator approves it.
    """
    context = place.context()
    bind_endpoint(context, place.config, RolloutPolicy(steps=(0.5, 1.0)))
    for version in ("1", "2"):
        promote(context, MODEL, version, TARGET)
        reconcile_until_stable(context, place.config.endpoint)
    actual = context.provider(place.config.provider).observe(place.config)
    if actual is None or actual.split.weights != {"v1": 50, "v2": 50}:
        raise SystemExit(f"version 2 does not have half of the traffic: {actual}")


# The functions below run in separate processes, which can be killed.


def request(place: Place, timeout_s: float) -> None:
    """Request a rollback once, as the command does.

    Ends with 0 if the rollback was carried out or is pending.
    """
    _, errors = roll_back_each(
        place.context(), (place.config.endpoint,), reason="a trial", timeout_s=timeout_s
    )
    if not all(isinstance(error, StillPendingError) for error in errors.values()):
        raise SystemExit(f"{errors}")


def repeat_command(place: Place, connection: Connection) -> None:
    """Request the rollback repeatedly; report when each command began and ended."""
    while True:
        connection.send(("began", time.monotonic()))
        roll_back_each(place.context(), (place.config.endpoint,), reason="a trial")
        connection.send(("ended", time.monotonic()))
        time.sleep(0.1)


def repeat_reconcile(place: Place, connection: Connection) -> None:
    del connection
    while True:
        reconcile_each(place.context(), (place.config.endpoint,))
        time.sleep(0.1)


def watch(place: Place, connection: Connection | None = None) -> None:
    del connection
    if place.machine:
        socket.gethostname = lambda: place.machine  # Leases then contain this name.
    WatchLoop(
        place.context(),
        ReconcileQueue(),
        interval_s=0.5,
        endpoints=(place.config.endpoint,),
        on_event=lambda _: None,
    ).run()


def confirm(place: Place) -> None:
    """Check that version 1 still serves after repeated reconciliations.

    Raises:
        SystemExit: version 1 does not serve.
    """
    context, provider = place.context(), place.config.provider
    for _ in range(3):
        reconcile_until_stable(context, place.config.endpoint)
    actual = context.provider(provider).observe(place.config)
    if actual is None or not serves_only(actual, place.version("1")):
        raise SystemExit(f"version 1 does not serve: {actual}")


FOLLOWERS = {"command": repeat_command, "reconcile": repeat_reconcile, "watch": watch}
