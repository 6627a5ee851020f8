"""The deletion of old rollouts of the service of analyses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.adapters.analysis_log import AnalysisLog
from onnx_ops.adapters.files import LocalObjects
from onnx_ops.app.analysis import AnalysisService
from onnx_ops.domain.rollout_analysis import (
    AnalysisPolicy,
    AnalysisState,
    RolloutKey,
    TrafficOpened,
)
from onnx_ops.errors import ConflictError, NotFoundError, StorageError
from tests.app.analysis_parts import KEY, POSTED, AnalysisSite, open_site
from tests.app.test_app_analysis import SAME, WORSE

DAY = 86_400.0
KEEP = 30 * DAY


@pytest.fixture
def site(tmp_path: Path) -> Iterator[AnalysisSite]:
    with open_site(tmp_path) as site:
        yield site


class KilledError(BaseException):
    """The end of a process."""


def list_files(site: AnalysisSite, key: RolloutKey = KEY) -> list[str]:
    """Return the names of the objects of a rollout."""
    folder = site.folder / "state" / key.folder
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def read_anew(site: AnalysisSite) -> AnalysisState:
    """Return the state that an instance without cached states reads."""
    return AnalysisLog(LocalObjects(site.folder / "state"), site.clock).read(KEY)


def interrupt(
    monkeypatch: pytest.MonkeyPatch, change: int, act: Callable[[], None], *, after: bool
) -> list[int]:
    """Run `act` at change number `change` of objects; return a live count of changes."""
    calls = [0]

    def wrap(name: str) -> None:
        original = getattr(LocalObjects, name)

        def changed(self: LocalObjects, *args: object) -> object:
            calls[0] += 1
            is_due = calls[0] == change
            if is_due and not after:
                act()
            result = original(self, *args)
            if is_due and after:
                act()
            return result

        monkeypatch.setattr(LocalObjects, name, changed)

    for name in ("create", "write", "delete"):
        wrap(name)
    return calls


@pytest.mark.parametrize("traffic", [SAME, WORSE], ids=["passed", "failed"])
def test_delete_old_of_rollout_without_counts_for_retention_time_deletes_it(
    site: AnalysisSite, traffic: dict[str, tuple[int, int]]
) -> None:
    recorded_at = site.serve_traffic(5, **traffic).state.recorded_at
    site.pass_time(recorded_at + KEEP - site.clock.now())
    assert site.service.delete_old() == 0
    site.pass_time(60)
    assert site.service.delete_old() == 1
    assert len(list_files(site)) == 2
    site.pass_time(KEEP + 60)
    assert site.service.delete_old() == 0
    assert list_files(site) == []
    assert site.restart().delete_old() == 0


def test_deleted_rollout_is_inconclusive_and_starts_again(site: AnalysisSite) -> None:
    assert site.serve_traffic(5, **SAME).verdict.verdict == "pass"
    site.pass_time(KEEP + 60)
    site.service.delete_old()
    shown = site.restart().show(KEY).verdict
    reason = "the rollout was deleted: nothing was recorded for more than 30 days"
    assert (shown.verdict, shown.reason) == ("inconclusive", reason)
    assert site.observe().verdict.verdict == "inconclusive"
    assert site.serve_traffic(5, **SAME).verdict.verdict == "pass"
    assert read_anew(site) == site.observe(site.restart()).state


def test_show_of_rollout_without_objects_raises_not_found_error_and_observe_starts_it_again(
    site: AnalysisSite,
) -> None:
    site.serve_traffic(5, **SAME)
    for _ in range(2):
        site.pass_time(KEEP + 60)
        site.service.delete_old()
    with pytest.raises(NotFoundError):
        site.service.show(KEY)
    state = site.observe().state
    assert (state.intervals, state.head) == ((), 2)


def test_delete_old_keeps_rollout_in_progress(site: AnalysisSite) -> None:
    policy = AnalysisPolicy(min_requests=(100,), max_duration=30 * DAY)
    site.service.start(POSTED, "a", "b", policy)
    short = AnalysisService(
        replace(site.service._config, keep=DAY),
        site.service._log,
        site.clock,
        {},
    )
    site.pass_time(29 * DAY)
    assert short.delete_old() == 0
    assert site.restart().show(POSTED).state.policy == policy


def test_delete_old_of_forgotten_rollout_keeps_two_objects_and_then_none(
    site: AnalysisSite,
) -> None:
    site.serve_traffic(5, **WORSE)
    site.service.forget(KEY)
    files = list_files(site)
    site.service.delete_old()
    assert list_files(site) == files
    site.pass_time(DAY + 60)
    site.service.delete_old()
    assert len(list_files(site)) == 2
    with pytest.raises(NotFoundError):
        site.restart().show(KEY)
    site.pass_time(KEEP + 60)
    site.service.delete_old()
    assert list_files(site) == []


def delete_twice(site: AnalysisSite) -> None:
    """Let other instances delete what is old, now and after another `keep`."""
    for _ in range(2):
        site.restart().delete_old()
        site.pass_time(KEEP + 60)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("rounds", "change"),
    [*((1, change) for change in range(1, 11)), *((2, change) for change in range(1, 3))],
)
def test_killed_deletion_leaves_complete_state_and_is_continued(
    site: AnalysisSite, monkeypatch: pytest.MonkeyPatch, change: int, rounds: int, after: bool
) -> None:
    site.serve_traffic(5, **SAME)
    site.pass_time(KEEP + 60)
    if rounds == 2:
        site.service.delete_old()
        site.pass_time(KEEP + 60)

    def kill() -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        interrupt(patch, change, kill, after=after)
        with pytest.raises(KilledError):
            site.service.delete_old()
    assert read_anew(site).policy is None or (change, after) == (1, False)
    delete_twice(site)
    delete_twice(site)
    assert list_files(site) == []
    assert site.observe().verdict.verdict == "inconclusive"


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("change", range(1, 10))
def test_read_during_deletion_returns_state_before_or_after_it(
    site: AnalysisSite, monkeypatch: pytest.MonkeyPatch, change: int, after: bool
) -> None:
    assert site.serve_traffic(5, **SAME).verdict.verdict == "pass"
    site.pass_time(KEEP + 60)
    states: list[AnalysisState] = []
    with monkeypatch.context() as patch:
        interrupt(patch, change, lambda: states.append(read_anew(site)), after=after)
        assert site.service.delete_old() == 1
    (state,) = states
    assert (state.policy is None) == ((change, after) != (1, False))


@pytest.mark.parametrize("read", range(1, 11))
def test_read_interrupted_by_deletion_returns_complete_state(
    site: AnalysisSite, monkeypatch: pytest.MonkeyPatch, read: int
) -> None:
    site.serve_traffic(5, **SAME)
    site.pass_time(KEEP + 60)
    original, calls = LocalObjects.read, 0

    def interrupted(self: LocalObjects, name: str) -> bytes | None:
        nonlocal calls
        calls += 1
        if calls == read:
            monkeypatch.setattr(LocalObjects, "read", original)
            site.restart().delete_old()
        return original(self, name)

    monkeypatch.setattr(LocalObjects, "read", interrupted)
    state = read_anew(site)
    assert calls == read
    assert state.policy is None or state.verdict is not None
    assert site.observe(site.restart()).verdict.verdict == "inconclusive"


@pytest.mark.parametrize("change", range(1, 7))
def test_rollout_observed_during_deletion_starts_again_in_both_instances(
    site: AnalysisSite, monkeypatch: pytest.MonkeyPatch, change: int
) -> None:
    site.serve_traffic(5, **WORSE)
    other = site.restart()
    site.observe(other)
    site.pass_time(KEEP + 60)
    answers = []
    with monkeypatch.context() as patch:

        def ask() -> None:
            patch.undo()
            answers.append(site.observe(other))

        interrupt(patch, change, ask, after=True)
        site.service.delete_old()
    site.pass_time()
    assert [each.verdict.verdict for each in answers] == ["inconclusive"]
    assert site.observe().state == site.observe(other).state == read_anew(site)
    assert site.serve_traffic(5, **SAME).verdict.verdict == "pass"


def test_observe_with_state_in_memory_detects_deletion_by_other_instance(
    site: AnalysisSite,
) -> None:
    site.serve_traffic(5, **SAME)
    other = site.restart()
    site.observe(other)
    for _ in range(2):
        site.pass_time(KEEP + 60)
        site.service.delete_old()
    assert site.observe(other).state == site.observe().state
    assert site.observe(other).state.head == 2


def test_observe_after_forget_by_other_instance_starts_again_despite_state_in_memory(
    site: AnalysisSite,
) -> None:
    site.serve_traffic(2, **SAME)
    other = site.restart()
    site.observe(other)
    site.serve_traffic(3, **WORSE)
    site.service.forget(KEY)
    assert site.observe(other).verdict.verdict == "inconclusive"
    assert site.observe(other).state == site.observe().state == read_anew(site)


def test_delete_old_by_two_instances_deletes_each_rollout_once(
    site: AnalysisSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.serve_traffic(5, **SAME)
    site.pass_time(KEEP + 60)
    ended = []
    with monkeypatch.context() as patch:

        def delete() -> None:
            patch.undo()
            ended.append(site.restart().delete_old())

        interrupt(patch, 1, delete, after=False)
        ended.append(site.service.delete_old())
    assert ended == [1, 0]
    assert site.service.delete_old() == 0
    assert len(list_files(site)) == 2


def test_state_with_unreadable_checkpoint_is_read_from_last_start(site: AnalysisSite) -> None:
    site.serve_traffic(5, **SAME)
    site.pass_time(KEEP + 60)
    site.service.delete_old()
    state = site.serve_traffic(3, **SAME).state
    (site.folder / "state" / KEY.folder / "checkpoint.json").write_bytes(b"{")
    assert read_anew(site) == state


@pytest.mark.parametrize("name", ["create", "delete", "list_names"])
def test_delete_old_with_failing_store_deletes_nothing_and_later_continues(
    site: AnalysisSite, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    site.serve_traffic(5, **WORSE)
    site.pass_time(KEEP + 60)
    files = list_files(site)

    def fail(*_: object) -> None:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(LocalObjects, name, fail)
        assert site.service.delete_old() == 0
    assert set(files) <= set(list_files(site))
    for _ in range(2):
        site.service.delete_old()
        site.pass_time(DAY + 60)
    assert len(list_files(site)) == 2


def test_delete_old_with_damaged_rollout_deletes_others(site: AnalysisSite) -> None:
    site.serve_traffic(5, **SAME)
    site.service.start(POSTED, "a", "b", AnalysisPolicy(min_requests=(100,)))
    (site.folder / "state" / POSTED.folder / "00000001.json").write_bytes(b"{")
    site.pass_time(KEEP + 60)
    assert site.service.delete_old() == 1
    assert len(list_files(site)) == 2


def test_delete_old_stops_on_request(site: AnalysisSite) -> None:
    site.serve_traffic(5, **SAME)
    site.pass_time(KEEP + 60)
    assert site.service.delete_old(lambda: True) == 0


def test_append_to_deleted_rollout_raises_conflict_error(site: AnalysisSite) -> None:
    state = site.serve_traffic(5, **SAME).state
    site.pass_time(KEEP + 60)
    site.service.delete_old()
    log = AnalysisLog(LocalObjects(site.folder / "state"), site.clock)
    with pytest.raises(ConflictError):
        log.append(state, TrafficOpened(), site.clock.now())
