"""Random states of endpoints, and the comparison of a dry run with the operation.

The comparison does not use the recorded changes alone. It reads ledger, registry and endpoints
through the ports of the dry run, and again after the operation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from onnx_ops import codec
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.endpoint import EndpointConfig, EndpointState
from onnx_ops.domain.ledger import LedgerEntry, MetricsRecorded
from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.domain.rollout_policy import DAY
from onnx_ops.errors import OnnxOpsError, ServiceUnavailableError
from onnx_ops.ports import Context, EndpointProvider, ModelFiles
from onnx_ops.release.changes import NOTHING, Change, ChangeKind
from onnx_ops.release.dry_run import DryRun
from onnx_ops.release.journal import list_bound_endpoints
from onnx_ops.release.promote import delete_endpoint, promote
from onnx_ops.release.prune import plan_pruning, prune
from onnx_ops.release.reconcile import StepReport, reconcile_each, write_aliases
from onnx_ops.release.rollback import roll_back_each, send_command, withdraw_request
from tests.release.release_parts import (
    AT_ONCE,
    CANARY,
    CHALLENGER,
    CHAMPION,
    MODEL,
    TARGET,
    Scene,
    config_of,
)
from tests.release.release_scenes import GUARDED

ENDPOINTS = ("digits", "digits-b")
CONFIGS = {name: config_of(name) for name in ENDPOINTS}
VERSIONS = ("1", "2", "3", "4", "5")
"""Version 3 has the same release as version 2. Version 5 has failed its gates."""

Operation = Callable[[Context], object]
"""An operation on a context; returns what a command prints."""


def publish_versions(scene: Scene) -> None:
    """Publish the versions 1 to 5."""
    for seed, variant in (("a", "fp32"), ("b", "fp32"), ("b", "int8"), ("c", "fp32")):
        scene.publish(seed, variant=variant)
    scene.publish("d", verdict=Verdict.FAIL)


def reconcile(context: Context, endpoints: Sequence[str]) -> object:
    """Reconcile endpoints as the command does."""
    return _summarize(*reconcile_each(context, endpoints))


def promote_version(context: Context, version: str, *, override: bool) -> object:
    """Promote a version as the command does."""
    reason = "sure" if override else ""
    done = promote(context, MODEL, version, TARGET, override=override, reason=reason)
    return done.did, reconcile(context, done.endpoints)


def roll_back(context: Context, endpoints: Sequence[str], **options: Any) -> object:
    """Roll back endpoints, and write the aliases as the command does in the background."""
    moved, errors = roll_back_each(context, endpoints, reason="slow", timeout_s=60.0, **options)
    pending = {
        name: write_aliases(context, name) for name, one in moved.items() if one.pending_aliases
    }
    return moved, {name: str(error) for name, error in errors.items()}, pending


def abort(context: Context, endpoint: str) -> object:
    """Abort a rollout as the command does."""
    _, errors = roll_back_each(
        context, (endpoint,), reason="slow", candidate_only=True, timeout_s=60.0
    )
    for error in errors.values():
        raise error
    return reconcile(context, (endpoint,))


def command(context: Context, endpoint: str, word: OperatorCommand) -> object:
    """Send a command of an operator, and reconcile."""
    context.registry()
    send_command(context, endpoint, word)
    return reconcile(context, (endpoint,))


def prune_models(context: Context) -> object:
    """Prune the model as the command does, and return the removed versions."""
    done = prune(context, plan_pruning(context, [MODEL], keep=1, older_than_s=DAY))
    return {model: [one.version for one in versions] for model, versions in done.remove.items()}


def _summarize(
    reports: Mapping[str, Sequence[StepReport]], errors: Mapping[str, OnnxOpsError]
) -> object:
    return dict(reports), {name: str(error) for name, error in errors.items()}


def choose_operation(
    random_: random.Random, versions: Sequence[str] = VERSIONS
) -> tuple[str, Operation]:
    """Return a random operation and its name."""
    endpoint, version = random_.choice(ENDPOINTS), random_.choice(versions)
    is_forced, to = random_.random() < 0.3, random_.choice((None, None, version))
    word = random_.choice(tuple(OperatorCommand))
    operations: dict[str, Operation] = {
        "reconcile": lambda context: reconcile(context, list_bound_endpoints(context)),
        "promote": lambda context: promote_version(context, version, override=is_forced),
        "rollback": lambda context: roll_back(context, (endpoint,), to=to, force=is_forced),
        "rollback --all": lambda context: roll_back(context, ENDPOINTS, to=to, pin=False),
        "rollout abort": lambda context: abort(context, endpoint),
        f"rollout {word.value}": lambda context: command(context, endpoint, word),
        "withdraw": lambda context: withdraw_request(context, endpoint, reason="mistaken"),
        "delete": lambda context: delete_endpoint(context, endpoint, reason="old"),
        "prune": prune_models,
    }
    name = random_.choice(tuple(operations))
    return name, operations[name]


def pause_rollout(scene: Scene, random_: random.Random, versions: Sequence[str]) -> Operation:
    """Start a rollout if there is none, and pause it; return the operation that resumes it."""
    endpoint, version = random_.choice(ENDPOINTS), random_.choice(versions)
    with suppress(OnnxOpsError):
        if scene.state(endpoint).roles.candidate is None:
            scene.bind(endpoint, CANARY)
            promote_version(scene.context, version, override=True)
        send_command(scene.context, endpoint, OperatorCommand.PAUSE)
        if random_.random() < 0.5:
            reconcile(scene.context, (endpoint,))
    return lambda context: command(context, endpoint, OperatorCommand.RESUME)


def leave_request(
    scene: Scene, provider: EndpointProvider, random_: random.Random, versions: Sequence[str]
) -> Operation:
    """Request a rollback or a deletion while the provider refuses changes.

    Return the operation that withdraws the request.
    """
    endpoint, version = random_.choice(ENDPOINTS), random_.choice(versions)
    deletes = random_.random() < 0.5
    with suppress(OnnxOpsError):
        if random_.random() < 0.5:
            # Most rollbacks need an earlier version.
            promote_version(scene.context, version, override=True)
        with _refusing(provider, ("apply", "roll_back", "remove")):
            if deletes:
                delete_endpoint(scene.context, endpoint, reason="old")
            else:
                roll_back(scene.context, (endpoint,), force=True)
    return lambda context: withdraw_request(context, endpoint, reason="mistaken")


@contextmanager
def _refusing(provider: EndpointProvider, names: Sequence[str]) -> Iterator[None]:
    """Let calls that change the provider's endpoints fail."""

    def refuse(*_: object, **__: object) -> None:
        raise ServiceUnavailableError("the connection was lost")

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(provider, name, refuse))
        yield


def disturb(scene: Scene, random_: random.Random) -> None:
    """Make one random change to the world that is no operation."""
    endpoint, version = random_.choice(ENDPOINTS), random_.choice(VERSIONS)
    provider, registry = scene.world.provider, scene.world.registry
    match random_.randrange(10):
        case 0:
            provider.down = not provider.down
        case 1:
            registry.down = not registry.down
        case 2:
            scene.world.clock.advance(random_.choice((60.0, DAY, 3 * DAY)))
        case 3:
            scene.set_alias(random_.choice((CHAMPION, CHALLENGER)), version)
        case 4:
            registry.delete_alias(MODEL, CHALLENGER)
        case 5:
            provider.interfere(endpoint, None)
        case 6:
            scene.give_override(version, f"sure {random_.random()}")
        case 7:
            count_requests(scene, random_)
        case _:
            scene.bind(endpoint, random_.choice((AT_ONCE, CANARY, GUARDED)))


def count_requests(scene: Scene, random_: random.Random) -> None:
    """Count requests of all versions, some of which failed, in the present generations.

    The fake counts requests when it is read, so it is read immediately.
    """
    counted = scene.world.provider.counted
    for version in VERSIONS:
        failed = random_.choice((0, 0, 90))
        counted.count(f"v{version}", requests=900, errors=failed, over_p50=400, over_p99=9)
    for name in ENDPOINTS:
        roles = scene.state(name).roles
        names = [one.name for one in (roles.candidate, roles.stable) if one is not None]
        if len(names) == 2:
            counted.read(config_of(name), dict.fromkeys(names))
        else:
            counted.read(config_of(name), {"none": None, "neither": None})


def grow(scene: Scene, random_: random.Random) -> None:
    """Bring a scene into a random state by random operations, some of which fail or are killed."""
    publish_versions(scene)
    for name in ENDPOINTS[: random_.choice((1, 2))]:
        scene.bind(name, random_.choice((AT_ONCE, CANARY, GUARDED)))
    if random_.random() < 0.8:
        # Most endpoints serve a version.
        with suppress(OnnxOpsError):
            for version in random_.sample(VERSIONS[:4], random_.choice((1, 2))):
                promote_version(scene.context, version, override=False)
                reconcile(scene.context, list_bound_endpoints(scene.context))
    for _ in range(random_.randrange(0, 7)):
        with suppress(OnnxOpsError, Died):
            if random_.random() < 0.35:
                disturb(scene, random_)
            elif random_.random() < 0.2:
                with failing(scene.world.provider, random_, error=Died()):
                    choose_operation(random_)[1](scene.context)
            else:
                choose_operation(random_)[1](scene.context)
        scene.restart()
    # For most operations, the services answer.
    if random_.random() < 0.8:
        scene.world.provider.down = scene.world.registry.down = False


class Died(BaseException):
    """The process was killed."""


@contextmanager
def failing(
    provider: EndpointProvider, random_: random.Random, *, error: BaseException
) -> Iterator[list[str]]:
    """Let one of the next effects on the provider's endpoints fail.

    The effect fails before or after it has changed the endpoint. The name of the failed call is
    added to the list.
    """
    failed: list[str] = []
    countdown, reaches = random_.randrange(3), random_.random() < 0.5
    calls = {name: getattr(provider, name) for name in ("apply", "roll_back")}

    def make(name: str) -> Callable[..., None]:
        def call(config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
            nonlocal countdown
            countdown -= 1
            if countdown != -1 or reaches:
                calls[name](config, state, generation=generation)
            if countdown == -1:
                failed.append(name)
                raise error

        return call

    with (
        patch.object(provider, "apply", make("apply")),
        patch.object(provider, "roll_back", make("roll_back")),
    ):
        yield failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What can be read of ledger, registry, endpoints, model folders and store."""

    entries: Mapping[str, tuple[object, ...]]
    aliases: Mapping[str, str] | str
    versions: Mapping[str, Mapping[str, str]] | str
    endpoints: Mapping[str, object]
    folders: tuple[str, ...]
    contents: tuple[str, ...]


def take_snapshot(context: Context, configs: Mapping[str, EndpointConfig]) -> Snapshot:
    """Return what a context shows now."""
    return Snapshot(
        entries={
            name: tuple(map(_comparable_entry, context.ledger.read(name)))
            for name in context.ledger.endpoints()
        },
        aliases=_try(lambda: context.registry().aliases(MODEL)),
        versions=_try(
            lambda: {
                one.version: dict(context.registry().version(MODEL, one.version).tags)
                for one in context.registry().versions(MODEL)
            }
        ),
        endpoints={
            name: _comparable_state(context.provider(config.provider).observe(config))
            for name, config in configs.items()
        },
        folders=tuple(sorted(str(one.digest) for one in context.files.list_folders())),
        contents=tuple(sorted(one.name for one in context.store.contents())),
    )


def _try(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except OnnxOpsError as error:
        return str(error)


def _comparable_entry(entry: LedgerEntry) -> object:
    """Return an entry without the counts of metrics, which change with every request."""
    if isinstance(entry.body, MetricsRecorded):
        return entry.sequence, entry.body.kind
    return codec.dumps(entry)


def _comparable_state(state: EndpointState | None) -> dict[str, Any] | None:
    """Return what an endpoint serves, as far as every provider reports it."""
    if state is None:
        return None
    return {
        "deployments": {d.name: d.manifest for d in state.deployments},
        "weights": {name: weight for name, weight in state.split.weights.items() if weight},
        "copies": {name: percent for name, percent in state.split.shadow.items() if percent},
        "epoch_s": state.split.epoch_s,
        "generation": state.generation,
        "drift": state.drift,
    }


def attempt(operation: Operation, context: Context) -> object:
    """Return the result of an operation, or its error with its exit code."""
    try:
        return operation(context)
    except OnnxOpsError as error:
        return type(error).__name__, error.exit_code, str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A dry run and the operation after it. `differences` is empty if they are equal."""

    changes: tuple[Change, ...]
    result: object
    differences: tuple[str, ...]


def compare(
    scene_context: Context,
    configs: Mapping[str, EndpointConfig],
    operation: Operation,
    temporary: ModelFiles,
) -> Comparison:
    """Run an operation dry, check that nothing changed, run it, and compare."""
    before = take_snapshot(scene_context, configs)
    dry_run = DryRun(scene_context, temporary)
    expected = attempt(operation, dry_run.context)
    predicted = take_snapshot(dry_run.context, configs)
    unchanged = take_snapshot(scene_context, configs)
    actual = attempt(operation, scene_context)
    after = take_snapshot(scene_context, configs)
    differences = [f"written: {text}" for text in _differ(before, unchanged)]
    differences += _differ(predicted, after)
    if expected != actual:
        differences.append(f"result: {expected} != {actual}")
    differences += check_changes(dry_run.changes, before, after)
    return Comparison(changes=dry_run.changes, result=actual, differences=tuple(differences))


def _differ(one: Snapshot, other: Snapshot) -> list[str]:
    return [
        f"{name}: {getattr(one, name)} != {getattr(other, name)}"
        for name in Snapshot.__dataclass_fields__
        if getattr(one, name) != getattr(other, name)
    ]


def check_changes(changes: Sequence[Change], before: Snapshot, after: Snapshot) -> list[str]:
    """Return how the recorded changes differ from the change of the world."""
    written = sum(map(len, after.entries.values())) - sum(map(len, before.entries.values()))
    recorded = sum(change.kind is ChangeKind.LEDGER_ENTRY for change in changes)
    differences = [] if written == recorded else [f"{recorded} entries listed, {written} written"]
    if isinstance(before.aliases, dict) and isinstance(after.aliases, dict):
        moved: dict[str, str] = dict(before.aliases)
        for change in changes:
            if change.kind is ChangeKind.ALIAS:
                alias = change.what.split()[2]
                moved.pop(alias, None)
                if change.after != NOTHING:
                    moved[alias] = change.after
        if moved != after.aliases:
            differences.append(f"aliases listed: {moved}, written: {after.aliases}")
    for name in before.endpoints:
        listed = [c for c in changes if c.subject == name and c.kind is ChangeKind.TRAFFIC]
        was, is_now = (_weights(one.endpoints[name]) for one in (before, after))
        if was != is_now and not listed:
            differences.append(f"the traffic of {name} changed from {was} to {is_now} unlisted")
        if listed and listed[-1].after.partition(", epochs")[0] != _format_weights(is_now):
            differences.append(f"traffic listed: {listed[-1].after}, now {is_now}")
    return differences


def _weights(state: Any) -> Any:
    return None if state is None else state["weights"]


def _format_weights(weights: Mapping[str, int] | None) -> str:
    if weights is None:
        return NOTHING
    return ", ".join(f"{name} {weight} %" for name, weight in sorted(weights.items()))
