"""Notifications: no kill, outage or concurrent process loses one."""

from __future__ import annotations

import contextlib
import functools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_ops.domain.ledger import (
    LedgerEntry,
    NotificationSent,
    OperatorCommandSent,
    RolloutPaused,
    fold,
)
from onnx_ops.domain.notification import (
    REPEAT_INTERVAL_S,
    Notification,
    NotificationKind,
    list_pending_notifications,
)
from onnx_ops.domain.rollout import ActionKind, OperatorCommand, Wait, WaitKind, plan_abort
from onnx_ops.errors import LedgerConflictError, OnnxOpsError, ServiceUnavailableError
from onnx_ops.release.journal import Journal
from onnx_ops.release.notify import (
    DeliveryResult,
    NotificationLoop,
    send_pending,
    send_pending_each,
    send_test_message,
)
from onnx_ops.release.reconcile import reconcile_until_stable, record_pause
from onnx_ops.release.rollback import request_and_carry_out
from onnx_ops.testing.fakes import FakeNotifier
from tests.release.release_parts import CHAMPION, Scene
from tests.release.release_scenes import copies_of, misled, on_trial, serving
from tests.support.faults import Faults, Killed
from tests.support.golden import Golden

CHAT = "chat"


def with_chat(scene: Scene) -> tuple[Scene, FakeNotifier]:
    chat = scene.world.notifiers[CHAT] = FakeNotifier()
    return scene, chat


def alarm(scene: Scene, why: str = "errors: 28/800 -> ROLL BACK") -> None:
    """Record an alarm, as a driver does when a guardrail fires."""
    journal = Journal.open(scene.context, "digits")
    request_and_carry_out(journal, plan_abort(journal.state.roles, "cpu", why=why, reject=True))


def retry(scene: Scene) -> None:
    """Roll out the same version again, as an operator requests with an override."""
    # An override of the same moment would be identical to the first override.
    scene.world.clock.advance(1)
    scene.promote("3", override=True, reason="again")
    scene.reconcile()


def whats(chat: FakeNotifier) -> list[NotificationKind]:
    return [notice.what for notice in chat.received]


def test_send_pending_after_rollback_notifies_once_and_records_it() -> None:
    scene, chat = with_chat(on_trial())
    send_pending(scene.context, "digits")
    before = len(chat.received)
    alarm(scene)
    (deliveries,) = send_pending(scene.context, "digits")
    assert [notice.what for notice in deliveries.sent] == [NotificationKind.ROLLED_BACK]
    assert len(chat.received) == before + 1
    assert scene.state().notified == {CHAT: deliveries.sent[0].sequence}
    assert send_pending(scene.context, "digits") == (
        DeliveryResult(endpoint="digits", notifier=CHAT),
    )


def test_send_pending_without_notifier_keeps_ledger() -> None:
    scene = on_trial()
    head = scene.state().head
    assert send_pending(scene.context, "digits") == ()
    assert scene.state().head == head


def test_send_pending_to_new_notifier_skips_old_history() -> None:
    scene = on_trial()
    alarm(scene)
    scene.world.clock.advance(REPEAT_INTERVAL_S + 1)
    scene, chat = with_chat(scene)
    send_pending(scene.context, "digits")
    assert chat.received == []
    retry(scene)
    alarm(scene)
    send_pending(scene.context, "digits")
    assert NotificationKind.ROLLED_BACK in whats(chat)


def test_pending_notification_after_notifier_outage_is_delivered() -> None:
    scene, chat = with_chat(on_trial())
    chat.down = True
    alarm(scene)
    (deliveries,) = send_pending(scene.context, "digits")
    assert "does not answer" in deliveries.error
    scene.world.clock.advance(10 * REPEAT_INTERVAL_S)
    chat.down = False
    send_pending(scene.context, "digits")
    assert whats(chat)[-1] is NotificationKind.ROLLED_BACK


def test_send_pending_with_one_failed_notifier_reaches_others() -> None:
    scene, chat = with_chat(on_trial())
    mail = scene.world.notifiers["mail"] = FakeNotifier()
    mail.down = True
    alarm(scene)
    deliveries = send_pending(scene.context, "digits")
    assert [(one.notifier, bool(one.error)) for one in deliveries] == [
        (CHAT, False),
        ("mail", True),
    ]
    count = len(chat.received)
    mail.down = False
    send_pending(scene.context, "digits")
    assert len(chat.received) == count
    assert mail.received == chat.received


def test_send_pending_without_registry_sends_rollback_notification() -> None:
    scene, chat = with_chat(on_trial())
    alarm(scene)
    scene.world.registry.down = True
    send_pending(scene.context, "digits")
    assert whats(chat)[-1] is NotificationKind.ROLLED_BACK


def test_notification_link_points_to_registry_page(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, chat = with_chat(on_trial())
    monkeypatch.setattr(
        scene.world.registry, "where", lambda model: f"https://registry.example/{model}"
    )
    send_pending(scene.context, "digits")
    assert chat.received[-1].link == "https://registry.example/digits"


def test_refused_alias_set_again_is_notified_once() -> None:
    scene, chat = with_chat(misled(CHAMPION))
    for _ in range(3):
        reconcile_until_stable(scene.context, "digits")
        scene.set_alias(CHAMPION, "2")
        send_pending(scene.context, "digits")
    assert whats(chat).count(NotificationKind.REFUSED) == 1


def drive(scene: Scene) -> None:
    """Reconcile as a driver with a notifier does, with an alarm in the pass."""
    if scene.state().roles.candidate is not None:
        alarm(scene)
    reconcile_until_stable(scene.context, "digits")
    send_pending(scene.context, "digits")


def test_rollback_notification_after_kill_is_sent_once_or_twice() -> None:
    copies = copies_of(lambda: with_chat(on_trial())[0])
    whole = copies()
    whole.faults = counted = Faults()
    drive(whole)
    assert counted.moments > 20
    twice = 0
    for moment in range(counted.moments):
        scene = copies()
        scene.faults = Faults(at=moment)
        with contextlib.suppress(Killed):
            drive(scene)
        scene.restart()
        drive(scene)
        rolled = whats(scene.world.notifiers[CHAT]).count(NotificationKind.ROLLED_BACK)
        assert 1 <= rolled <= 2, f"killed at moment {moment} of {counted.moments}"
        twice += rolled == 2
    assert 1 <= twice <= 6, "only a kill between sending and writing it down may repeat a message"


TRIALS = functools.cache(functools.partial(copies_of, on_trial))
STORIES = st.lists(
    st.tuples(
        st.sampled_from(["alarm", "notify", "down", "operator", "words", "hour", "drive"]),
        st.none() | st.integers(0, 12),
    ),
    min_size=1,
    max_size=14,
)


def play(scene: Scene, chat: FakeNotifier, deed: str) -> None:
    if deed == "alarm":
        if scene.state().roles.candidate is None:
            retry(scene)
        alarm(scene, why=f"alarm after entry {scene.state().head}")
    elif deed == "operator":
        with contextlib.suppress(OnnxOpsError):
            scene.roll_back()
    elif deed == "words":
        with contextlib.suppress(OnnxOpsError):
            scene.say(OperatorCommand.ADVANCE)
    elif deed == "drive":
        reconcile_until_stable(scene.context, "digits")
    elif deed == "down":
        chat.down = not chat.down
    elif deed == "hour":
        scene.world.clock.advance(REPEAT_INTERVAL_S * 1.5)
    if deed in ("alarm", "notify", "drive"):
        send_pending(scene.context, "digits")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(story=STORIES)
def test_automatic_rollback_in_random_history_is_notified(
    story: list[tuple[str, int | None]],
) -> None:
    """Other events, kills of any process and outages of the notifier occur meanwhile."""
    scene, chat = with_chat(TRIALS()())
    send_pending(scene.context, "digits")
    for deed, kill in story:
        scene.faults = None if kill is None else Faults(at=kill)
        try:
            play(scene, chat, deed)
        except Killed:
            scene.restart()
        except OnnxOpsError:
            pass
        scene.faults = None
    chat.down = False
    reconcile_until_stable(scene.context, "digits")
    send_pending(scene.context, "digits")
    due = [
        n
        for n in list_pending_notifications("digits", scene.world.ledger.read("digits"))
        if n.what is NotificationKind.ROLLED_BACK
    ]
    rolled = automatic(scene.world.ledger.read("digits"))
    assert {notice.sequence for notice in due} == rolled
    assert rolled <= {notice.sequence for notice in chat.received}


def automatic(entries: tuple[LedgerEntry, ...]) -> set[int]:
    """Return the sequence numbers of the outcomes of alarms.

    They are read from the entries alone.
    """
    found, state = set(), fold("digits", ())
    for number, entry in enumerate(entries):
        body, opened = entry.body, state.open_intent
        if (
            body.kind == "outcome"
            and opened is not None
            and body.of == state.generation
            and body.ok
        ):
            alarmed = opened.action.kind is ActionKind.ABORT and opened.action.why.startswith(
                "alarm"
            )
            pending = state.pending_rollback
            if alarmed and pending is not None and not pending.by_operator:
                found.add(entry.sequence)
        state = fold("digits", entries[: number + 1])
    return found


def test_concurrent_send_pending_loses_no_notification() -> None:
    scene, chat = with_chat(on_trial())
    alarm(scene)
    threads = [
        threading.Thread(target=send_pending, args=(scene.world.context(f"p{n}"), "digits"))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    due = list_pending_notifications("digits", scene.world.ledger.read("digits"))
    assert {notice.sequence for notice in due} == {notice.sequence for notice in chat.received}
    assert NotificationKind.ROLLED_BACK in whats(chat)
    assert scene.state().notified[CHAT] == max(notice.sequence for notice in chat.received)


def test_send_pending_with_ledger_conflicts_succeeds() -> None:
    scene, chat = with_chat(on_trial())
    append = scene.world.ledger.append
    busy = [3]

    def late(entry: LedgerEntry) -> None:
        if isinstance(entry.body, NotificationSent) and busy[0]:
            busy[0] -= 1
            Journal.open(scene.world.context("other"), "digits").append(
                OperatorCommandSent(command=OperatorCommand.PAUSE)
            )
            raise LedgerConflictError("another writer was first")
        append(entry)

    scene.world.ledger.append = late  # type: ignore[method-assign]
    (deliveries,) = send_pending(scene.context, "digits")
    assert (deliveries.error, busy) == ("", [0])
    assert chat.received


def test_approval_wait_is_notified_once_per_step(golden: Golden) -> None:
    scene, chat = with_chat(on_trial())
    send_pending(scene.context, "digits")
    golden("reasons", chat.received[-1].headline)
    for n in range(3):
        wait = Wait(why=f"v3 has 10 % of traffic: waits {n}", kind=WaitKind.APPROVAL)
        record_pause(Journal.open(scene.context, "digits"), wait)
        send_pending(scene.context, "digits")
    assert whats(chat).count(NotificationKind.WAITING) == 1
    scene.say(OperatorCommand.ADVANCE)
    scene.reconcile_some()
    send_pending(scene.context, "digits")
    assert whats(chat).count(NotificationKind.WAITING) == 2


@pytest.mark.parametrize("kind", [WaitKind.IDLE, WaitKind.ANALYZING])
def test_record_pause_of_idle_or_analyzing_wait_writes_nothing(kind: WaitKind) -> None:
    scene = on_trial()
    before = scene.state()
    record_pause(Journal.open(scene.context, "digits"), Wait(why="", kind=kind))
    assert scene.state() == before


def test_record_pause_after_operator_pause_writes_nothing() -> None:
    scene = on_trial()
    scene.say(OperatorCommand.PAUSE)
    before = scene.state()
    record_pause(Journal.open(scene.context, "digits"), Wait(why="paused", kind=WaitKind.PAUSED))
    assert scene.state() == before
    assert before.pause is None


def test_recorded_pause_remains_after_endpoint_restore() -> None:
    scene = on_trial()
    journal = Journal.open(scene.context, "digits")
    journal.append(RolloutPaused(wait=WaitKind.INCONCLUSIVE, step=0, why="no traffic"))
    scene.world.provider.interfere("digits", None)
    scene.reconcile_some()
    assert scene.traffic() == {"v2": 90, "v3": 10}
    assert scene.state().pause is not None


def test_send_pending_each_with_notifier_bug_returns_error(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, _ = with_chat(serving("a"))

    def broken(_: Notification) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(scene.world.notifiers[CHAT], "send", broken)
    (deliveries,) = send_pending_each(scene.context, ("digits",))
    assert deliveries.error == "a bug"


def test_send_test_message_calls_all_notifiers() -> None:
    scene, chat = with_chat(Scene())
    scene.world.notifiers["mail"] = mail = FakeNotifier()
    mail.down = True
    deliveries = send_test_message(scene.context)
    assert [(one.notifier, bool(one.error)) for one in deliveries] == [
        (CHAT, False),
        ("mail", True),
    ]
    assert whats(chat) == [NotificationKind.TEST]


class Passes:
    """A notification loop whose passes a test triggers."""

    def __init__(self, scene: Scene) -> None:
        self.deliveries: list[DeliveryResult] = []
        self.loop = NotificationLoop(
            scene.context,
            interval_s=5.0,
            endpoints=lambda: ("digits",),
            on_result=self.deliveries.append,
        )

    def __call__(self, times: int) -> None:
        for _ in range(times):
            self.loop.send_all()


def test_notifier_outage_is_retried_with_backoff_and_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, chat = with_chat(on_trial())
    alarm(scene)
    tries: list[Notification] = []

    def down(notice: Notification) -> None:
        tries.append(notice)
        raise ServiceUnavailableError("does not answer", where="chat")

    monkeypatch.setattr(chat, "send", down)
    passes = Passes(scene)
    passes(100)
    assert 8 < len(tries) < 20, "each minute at the latest"
    assert [one.error for one in passes.deliveries] == ["chat: does not answer"]
    monkeypatch.undo()
    passes(13)
    assert whats(chat)[-1] is NotificationKind.ROLLED_BACK
    assert passes.deliveries[-1].sent


def test_notification_loop_after_bug_sends_pending_when_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, chat = with_chat(on_trial())
    stopped = threading.Event()
    loop = NotificationLoop(
        scene.context, interval_s=3600.0, endpoints=lambda: ("digits",), on_result=lambda _: None
    )
    calls: list[int] = []
    look = loop.send_all

    def broken_once() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("a bug")
        look()

    monkeypatch.setattr(loop, "send_all", broken_once)
    thread = threading.Thread(target=loop.run, args=(stopped,))
    thread.start()
    alarm(scene)
    stopped.set()
    thread.join(30)
    assert not thread.is_alive()
    assert whats(chat)[-1] is NotificationKind.ROLLED_BACK
