"""States of an endpoint in which a reconciler has work.

`end_of` returns what must be equal in the end.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.endpoint import EndpointConfig, EndpointState
from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.domain.rollout_policy import DAY, Guardrail, RolloutPolicy
from onnx_ops.errors import ConflictError, StillPendingError
from onnx_ops.ports import Context
from onnx_ops.testing.fakes import FakeWorld
from tests.release.release_parts import CANARY, CHALLENGER, CHAMPION, MODEL, Scene, effects

GUARDED = RolloutPolicy(
    steps=(0.1, 0.5, 1.0),
    min_requests=(200,),
    guardrails=(
        Guardrail(name="errors"),
        Guardrail(name="latency_p50"),
        Guardrail(name="latency_p99"),
    ),
)


def copies_of(setup: Callable[[], Scene]) -> Callable[[], Scene]:
    """Return a function that makes equal copies of the scene that `setup` returns.

    `setup` is called only once.
    """
    kept = pickle.dumps(setup())

    def copy() -> Scene:
        scene: Scene = pickle.loads(kept)  # noqa: S301 (our own)
        return scene

    return copy


def interrupted(scene: Scene, call: Callable[[], object], *, reaches: bool = False) -> None:
    """Call a function whose process is killed during its effect on the endpoint."""
    provider, apply = scene.world.provider, scene.world.provider.apply

    def die(config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        if reaches:
            apply(config, state, generation=generation)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(provider, "apply", die)
        patched.setattr(provider, "roll_back", die)
        with pytest.raises(KeyboardInterrupt):
            call()


def request_while_down(scene: Scene, ask: Callable[[Scene], object] = Scene.roll_back) -> None:
    """Request an operation while the endpoint cannot be reached."""
    scene.world.provider.down = True
    with pytest.raises(StillPendingError):
        ask(scene)
    scene.world.provider.down = False


def refused_while_at_work(scene: Scene, call: Callable[[Context], object]) -> None:
    """Check that a second process is refused while the first changes the endpoint.

    The first process is then killed during its effect.
    """

    def interfere(*_: object, **__: object) -> None:
        with pytest.raises(ConflictError, match="changing this endpoint"):
            call(scene.world.context("process-2"))
        raise KeyboardInterrupt

    scene.promote(scene.publish("c"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scene.world.provider, "apply", interfere)
        with pytest.raises(KeyboardInterrupt):
            scene.reconcile()
    scene.restart()


def serving(*seeds: str, world: FakeWorld | None = None) -> Scene:
    scene = Scene() if world is None else Scene(world=world)
    scene.bind()
    for seed in seeds:
        scene.serve(scene.publish(seed))
    return scene


def on_trial(*words: OperatorCommand) -> Scene:
    """Return a scene in which version 2 has replaced 1, and version 3 is on trial."""
    scene = on_trial_in(serving("a", "b"))
    for word in words:
        scene.say(word)
        scene.reconcile()
    return scene


def on_trial_in(scene: Scene) -> Scene:
    """Put the next version on trial."""
    scene.bind(policy=CANARY)
    scene.promote(scene.publish("c"))
    scene.reconcile()
    return scene


def with_candidate(scene: Scene, *, verdict: Verdict = Verdict.PASS) -> Scene:
    scene.publish("new", verdict=verdict)
    return scene


def pair() -> Scene:
    """Return a scene with two endpoints that have served version 1.

    The first one now serves version 2, which the second one does not serve yet.
    """
    scene = Scene()
    scene.bind("digits-a")
    scene.bind("digits-b")
    scene.promote(scene.publish("a"))
    scene.reconcile_all()
    scene.promote(scene.publish("b"))
    scene.reconcile("digits-a")
    return scene


def withdrawn() -> Scene:
    scene = on_trial()
    scene.world.registry.delete_alias(MODEL, CHALLENGER)
    return scene


def misled(alias: str) -> Scene:
    scene = with_candidate(serving("a"), verdict=Verdict.FAIL)
    scene.set_alias(alias, "2")
    return scene


def rolled_back_alone() -> Scene:
    scene = serving("a", "b")
    scene.world.registry.down = True
    scene.roll_back()
    scene.world.registry.down = False
    return scene


def past_its_time() -> Scene:
    scene = serving("a", "b")
    scene.world.clock.advance(DAY)
    return scene


def lost() -> Scene:
    scene = on_trial()
    scene.world.provider.interfere("digits", None)
    return scene


def moved_by_hand() -> Scene:
    scene = with_candidate(serving("a"))
    scene.set_alias(CHAMPION, "2")
    return scene


def begun(policy: RolloutPolicy = GUARDED) -> Scene:
    """Return a scene in which version 1 serves and version 2 has begun its rollout."""
    scene = asked_for(policy)
    scene.reconcile()
    return scene


def asked_for(policy: RolloutPolicy = GUARDED) -> Scene:
    """Return a scene in which version 1 serves and version 2 is requested.

    Metrics will decide about version 2.
    """
    scene = Scene()
    scene.bind(policy=policy)
    scene.promote(scene.publish("a"))
    scene.reconcile()
    scene.promote(scene.publish("b"))
    return scene


def counted_out(bad: bool) -> Scene:
    """Return a scene with enough requests for a decision about version 2.

    The version was not evaluated yet.
    """
    scene = begun()
    counted = scene.world.provider.counted
    counted.count("v1", requests=9000, errors=9, over_p50=4500, over_p99=90)
    counted.count("v2", requests=1000, errors=100 if bad else 1, over_p50=500, over_p99=10)
    return scene


def end_of(scene: Scene) -> dict[str, object]:
    """Return everything that must be equal after every disturbance."""
    names = scene.world.ledger.endpoints()
    states = {name: scene.state(name) for name in names}
    return {
        "aliases": scene.aliases(),
        "roles": {name: state.roles for name, state in states.items()},
        "pending": {name: state.pending_aliases for name, state in states.items()},
        "written": {name: state.aliases for name, state in states.items()},
        "rejected": {name: state.rejected for name, state in states.items()},
        "command": {name: state.command for name, state in states.items()},
        "open": {name: state.open_intent for name, state in states.items()},
        "effects": {name: effects(scene.world.ledger.read(name)) for name in names},
        "traffic": {name: scene.traffic(name) for name in names},
        "changes": [(name, state.split.weights) for name, state in scene.world.provider.applied],
    }
