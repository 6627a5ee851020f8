"""Webhook deliveries in any mix, and the reconciler that follows the registry.

Deliveries are genuine, late, doubled, reordered, replayed or forged. A second reconciler receives
no webhook. It polls the registry whenever a delivery wakes the first one. Both must end in the same
state. A delivery is therefore only a hint, and its claims change nothing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onnx_ops.adapters.web.webhook_receiver import WebhookReceiver
from onnx_ops.domain.decision import Verdict
from onnx_ops.protocol.webhooks import (
    ID_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    TOLERANCE_S,
    sign_delivery,
)
from onnx_ops.release.endpoint_calls import MAX_PAUSE_S
from onnx_ops.release.watch import ReconcileQueue, WatchLoop
from onnx_ops.testing.fakes import FakeClock
from tests.release.release_parts import CHALLENGER, MODEL, Scene
from tests.release.release_scenes import copies_of, end_of

SECRET = "a secret of some length"  # noqa: S105 (of a test)
FAILED = "3"
"""A version that has not passed its gates."""

_NUMBERS = itertools.count()
"""Numbers of deliveries: a receiver accepts each number once."""

Step = tuple[str, int | str]

moves = st.tuples(st.just("move"), st.sampled_from(["1", "2", FAILED, ""]))
deliveries = st.tuples(st.just("deliver"), st.integers(0, 9))
forgeries = st.tuples(
    st.just("forge"), st.sampled_from(["secret", "body", "id", "time", "unsigned"])
)
pauses = st.tuples(st.just("wait"), st.sampled_from([1, 200, 301]))
looks = st.tuples(st.just("look"), st.just(0))


@dataclass(frozen=True)
class Delivery:
    """A delivery of MLflow, as a listener on the network could record it."""

    number: int
    at: float
    body: bytes

    def headers(self, secret: str = SECRET) -> dict[str, str]:
        name, timestamp = f"d-{self.number}", str(int(self.at))
        return {
            ID_HEADER: name,
            TIMESTAMP_HEADER: timestamp,
            SIGNATURE_HEADER: sign_delivery(secret, name, timestamp, self.body),
        }


@dataclass
class Stage:
    """Two reconcilers, of which one receives webhooks, and all sent deliveries."""

    listening: Scene
    other: Scene
    queue: ReconcileQueue
    clock: FakeClock
    post: Callable[[bytes, Mapping[str, str]], int]
    sent: list[Delivery] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.watchers = [
            # At this interval no pass is skipped after a failure, so both make the same passes.
            WatchLoop(
                scene.context,
                ReconcileQueue(),
                interval_s=MAX_PAUSE_S,
                on_event=lambda report: None,
            )
            for scene in (self.listening, self.other)
        ]

    def move(self, version: str) -> None:
        """Move the alias as a person does, and record MLflow's delivery."""
        for scene in (self.listening, self.other):
            if version:
                scene.set_alias(CHALLENGER, version)
            else:
                scene.world.registry.delete_alias(MODEL, CHALLENGER)
        self.asked.add(version)
        data = {"name": MODEL, "alias": CHALLENGER, "version": version}
        self.sent.append(
            Delivery(next(_NUMBERS), self.clock.now(), json.dumps({"data": data}).encode())
        )

    def deliver(self, number: int) -> None:
        if not self.sent:
            return
        delivery = self.sent[number % len(self.sent)]
        old = self.clock.now() - int(delivery.at) > TOLERANCE_S
        assert self.post(delivery.body, delivery.headers()) == (400 if old else 204)

    def forge(self, how: str) -> None:
        last = (
            self.sent[-1]
            if self.sent
            else Delivery(0, self.clock.now(), b'{"data": {"name": "digits"}}')
        )
        body, headers = last.body, last.headers("another secret" if how == "secret" else SECRET)
        if how == "body":
            body = body.replace(b'"version": "', b'"version": "9') + b" "
        elif how == "id":
            headers[ID_HEADER] = "d-new"
        elif how == "time":
            headers[TIMESTAMP_HEADER] = str(int(self.clock.now()) + 1)
        elif how == "unsigned":
            del headers[SIGNATURE_HEADER]
        assert self.post(body, headers) == 401

    def wait(self, seconds: int) -> None:
        for clock in (self.clock, self.listening.world.clock, self.other.world.clock):
            clock.advance(seconds)

    def look(self, _: int) -> None:
        models = self.queue.wait(0)
        assert models <= {MODEL}
        if models:
            self.watchers[0].reconcile_models(models)
            self.watchers[1].reconcile_all()


@pytest.fixture(scope="module")
def copies() -> Callable[[], Scene]:
    """Return copies of a scene in which nothing serves.

    Versions 1 and 2 have passed, and version 3 has not.
    """

    def setup() -> Scene:
        scene = Scene()
        scene.bind()
        scene.publish("a")
        scene.publish("b")
        scene.publish("c", verdict=Verdict.FAIL)
        return scene

    return copies_of(setup)


@dataclass
class Listener:
    """A receiver that adds models to the last of `queues`, and a function that posts to it."""

    queues: list[ReconcileQueue]
    clock: FakeClock
    post: Callable[[bytes, Mapping[str, str]], int]


@pytest.fixture(scope="module")
def listener() -> Iterator[Listener]:
    import httpx

    queues, clock = list[ReconcileQueue](), FakeClock()

    def wake(model: str) -> None:
        queues[-1].add(model)

    receiver = WebhookReceiver(
        "127.0.0.1", 0, secret=SECRET, clock=clock, wake=wake, refused=lambda why: None, metrics=str
    )
    with receiver, httpx.Client() as client:
        yield Listener(
            queues,
            clock,
            lambda body, headers: (
                client.post(receiver.address, content=body, headers=headers).status_code
            ),
        )


@pytest.mark.parametrize("examples", [6, pytest.param(500, marks=pytest.mark.nightly)])
def test_webhook_deliveries_of_any_kind_end_in_same_state_as_polling(
    examples: int, copies: Callable[[], Scene], listener: Listener
) -> None:
    woken = 0

    # A few random examples possibly contain no delivery with an effect.
    @settings(max_examples=examples, deadline=None, derandomize=examples < 100)
    @example(
        [step for n, v in enumerate("331") for step in (("move", v), ("deliver", n), ("look", 0))]
    )
    @given(
        steps=st.lists(
            st.one_of(moves, deliveries, forgeries, pauses, looks), min_size=8, max_size=25
        )
    )
    def check(steps: list[Step]) -> None:
        nonlocal woken
        listener.queues.append(ReconcileQueue())
        stage = Stage(copies(), copies(), listener.queues[-1], listener.clock, listener.post)
        for name, about in (*steps, ("look", 0)):
            getattr(stage, name)(about)
        assert end_of(stage.listening) == end_of(stage.other)
        applied = {
            d.version
            for _, state in stage.listening.world.provider.applied
            for d in state.deployments
        }
        assert applied <= stage.asked - {FAILED}
        woken += len(applied)

    check()
    assert woken, "no delivery led to anything"
