"""The ledger entries that lead to notifications, and the texts of these."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnx_ops.domain.ledger import (
    ActionOutcome,
    EntryBody,
    RollbackRequested,
    RolloutPaused,
    VersionRefused,
)
from onnx_ops.domain.notification import (
    REPEAT_INTERVAL_S,
    Notification,
    NotificationKind,
    Severity,
    build_test_notification,
    list_pending_notifications,
)
from onnx_ops.domain.rollout import Action, ActionKind, WaitKind, plan_abort, plan_rollback
from tests.domain.test_domain_ledger import CONFIGURED, FINISH, FIRST, START, intent, log, version
from tests.support.golden import Golden

LINE = (
    "errors: canary 28/800 (3.50%) vs stable 67/7200 (0.93%); evidence 346211:1 (limit 60:1) "
    "-> ROLL BACK"
)
ALARM = plan_abort(START.roles, "cpu", why=LINE, reject=True)
ON_TRIAL: tuple[EntryBody | Action, ...] = (CONFIGURED, FIRST, START)
"""Five entries: version 1 serves, and version 2 is on trial."""


def derive(*bodies: EntryBody | Action, after: int = 0) -> list[Notification]:
    return list(list_pending_notifications("digits", log(*bodies), after=after))


def only(*bodies: EntryBody | Action) -> Notification:
    """Return the only notification of the bodies that follow `ON_TRIAL`."""
    (found,) = derive(*ON_TRIAL, *bodies, after=5)
    return found


def test_notification_of_automatic_rollback_is_critical_with_reason_and_undo(
    golden: Golden,
) -> None:
    found = only(ALARM)
    assert (found.what, found.severity, found.sequence) == (
        NotificationKind.ROLLED_BACK,
        Severity.CRITICAL,
        7,
    )
    assert found.why == LINE
    assert found.commands == {
        "Undo": 'onnx-ops promote digits/2 --target cpu --override --reason "..."'
    }
    golden("tables", "\n".join([found.title, *found.lines]))


@pytest.mark.parametrize(
    "bodies",
    [
        (RollbackRequested(action=ALARM, by_operator=True), ALARM),
        (RollbackRequested(action=ALARM, by_operator=True), intent(ALARM), ALARM),
    ],
    ids=["at once", "finished by a driver"],
)
def test_notification_of_abort_by_operator_is_warning(
    bodies: tuple[EntryBody | Action, ...],
) -> None:
    found = only(*bodies)
    assert (found.what, found.severity) == (NotificationKind.OPERATOR, Severity.WARNING)
    assert "by an operator" in found.headline


def test_notification_of_rollback_by_operator_includes_undo_command() -> None:
    back = plan_rollback(FINISH.roles, version(1), "cpu", why="wrong on sevens")
    *_, found = derive(CONFIGURED, FINISH, RollbackRequested(action=back, by_operator=True), back)
    assert found.what is NotificationKind.OPERATOR
    assert found.commands == {"Undo": "onnx-ops rollback digits --to 2 --force"}


def test_notification_of_automatic_rollback_of_finished_rollout_is_critical() -> None:
    back = plan_rollback(FINISH.roles, version(1), "cpu", why="the alarm went off")
    *_, found = derive(CONFIGURED, FINISH, RollbackRequested(action=back), back)
    assert (found.what, found.severity) == (NotificationKind.ROLLED_BACK, Severity.CRITICAL)
    assert found.headline == "v2 was rolled back, and v1 has all traffic"


def test_notification_of_withdrawn_candidate_is_info() -> None:
    found = only(plan_abort(START.roles, "cpu", why="no longer requested", reject=False))
    assert (found.what, found.severity) == (NotificationKind.WITHDRAWN, Severity.INFO)


def test_notification_of_finished_rollout_includes_undo_command() -> None:
    found = only(FINISH)
    assert (found.what, found.commands) == (
        NotificationKind.FINISHED,
        {"Undo": "onnx-ops rollback digits"},
    )


def test_rollout_start_after_first_deployment_causes_no_notification() -> None:
    assert derive(*ON_TRIAL)[0].headline == "first deployment: v1"
    assert len(derive(*ON_TRIAL)) == 1, "a start is no news"


@pytest.mark.parametrize(
    ("wait", "what", "text"),
    [
        (WaitKind.INCONCLUSIVE, NotificationKind.WAITING, "v2 waits for an operator at step 1"),
        (WaitKind.PAUSED, NotificationKind.PAUSED, "v2 is paused at step 1"),
        (WaitKind.APPROVAL, NotificationKind.WAITING, "v2 waits for approval at step 1"),
    ],
)
def test_notification_of_paused_rollout_includes_advance_and_abort_commands(
    wait: WaitKind, what: NotificationKind, text: str
) -> None:
    found = only(RolloutPaused(wait=wait, step=0, why="no traffic"))
    assert (found.what, found.headline, found.why) == (what, text, "no traffic")
    assert found.commands["Advance"] == "onnx-ops rollout advance digits"
    assert found.commands["Abort"] == "onnx-ops rollout abort digits"


def test_notification_of_refused_alias_gives_reason_and_command(golden: Golden) -> None:
    found = only(
        VersionRefused(
            alias="champion-cpu", version="9", reason="gate size failed", restored_to="1"
        )
    )
    assert (found.what, found.why) == (NotificationKind.REFUSED, "gate size failed")
    golden("tables", found.headline)
    assert found.commands["See"] == "onnx-ops explain digits/9 --target cpu"


def test_notification_of_failed_abort_is_critical_and_of_failed_finish_warning() -> None:
    found = only(intent(ALARM), ActionOutcome(of=6, ok=False, detail="cannot be reached"))
    assert (found.what, found.severity) == (NotificationKind.TROUBLE, Severity.CRITICAL)
    assert found.headline == "abort failed and is still pending"
    found = only(intent(FINISH), ActionOutcome(of=6, ok=False, detail="cannot be reached"))
    assert (found.severity, found.why) == (Severity.WARNING, "cannot be reached")


def test_notification_of_restored_endpoint_is_trouble() -> None:
    repair = replace(
        START, kind=ActionKind.RESTORE, why="the endpoint does not report its expected state"
    )
    assert only(repair).what is NotificationKind.TROUBLE


def test_outcome_of_superseded_intent_causes_no_notification() -> None:
    assert (
        derive(*ON_TRIAL, intent(FINISH), intent(ALARM), ActionOutcome(of=6, ok=True), after=5)
        == []
    )


def test_repeated_failures_notify_once_per_hour_and_rollbacks_each_time() -> None:
    failing: list[EntryBody] = []
    for _ in range(4):
        failing += [intent(ALARM), ActionOutcome(of=6 + len(failing), ok=False, detail="down")]
    assert len(derive(*ON_TRIAL, *failing, after=5)) == 1
    entries = log(*ON_TRIAL, *failing)
    late = [replace(e, at=e.at + (REPEAT_INTERVAL_S if e.sequence > 9 else 0)) for e in entries]
    assert [found.sequence for found in list_pending_notifications("digits", late, after=5)] == [
        7,
        11,
    ]
    again = (ALARM, START)
    assert len(derive(*ON_TRIAL, *again, ALARM, after=5)) == 2


def test_repeated_pause_causes_no_second_notification() -> None:
    body = RolloutPaused(wait=WaitKind.INCONCLUSIVE, step=0, why="no traffic")
    assert derive(*ON_TRIAL, body, body, after=6) == []


def test_notification_reason_is_one_line_of_limited_length() -> None:
    found = only(
        RolloutPaused(wait=WaitKind.INCONCLUSIVE, step=0, why="a\n\nb  c " + "word " * 500)
    )
    assert "\n" not in found.why
    assert found.why.startswith("a b c word")
    assert len(found.why) <= 400


def test_notification_before_binding_of_endpoint_has_no_commands() -> None:
    (found,) = derive(
        VersionRefused(alias="champion-cpu", version="9", reason="no", restored_to=None)
    )
    assert found.commands == {}
    assert found.headline.endswith("the alias was removed")


def test_build_test_notification_names_itself_as_test() -> None:
    found = build_test_notification("onnx-ops", at=1.0, actor="me")
    assert found.what is NotificationKind.TEST
    assert "test" in found.title
    assert found.lines[-1] == "By me"
