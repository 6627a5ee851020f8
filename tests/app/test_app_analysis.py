"""The service of analyses, with a fake Prometheus over a socket."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.adapters.files import LocalObjects
from onnx_ops.app.analysis import AnalysisAnswer, ClientCounts
from onnx_ops.domain.rollout_analysis import AnalysisPolicy
from onnx_ops.domain.rollout_observations import RequestCounts
from onnx_ops.errors import (
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
    StorageError,
    UserError,
)
from tests.app.analysis_parts import KEY, POSTED, AnalysisSite, open_site
from tests.support.fake_prometheus import ORIGIN, REQUESTS

SAME = {"canary": (20, 0), "stable": (180, 2)}
WORSE = {"canary": (20, 8), "stable": (180, 2)}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[AnalysisSite]:
    with open_site(tmp_path) as site:
        yield site


def test_observe_of_canary_as_good_as_stable_passes_after_minimum_requests(
    site: AnalysisSite,
) -> None:
    result = site.serve_traffic(4, **SAME)
    assert result.verdict.verdict == "inconclusive"
    assert result.verdict.waits_for == "80 of 100 requests"
    result = site.serve_traffic(1, **SAME)
    assert result.verdict.verdict == "pass"
    assert result.verdict.requests == (100, 900)


def test_observe_of_worse_canary_fails_and_stays_failed(site: AnalysisSite) -> None:
    result = site.serve_traffic(3, **WORSE)
    assert result.verdict.verdict == "fail"
    assert "errors: canary" in result.verdict.reason
    site.clock.advance(10 * 86_400)
    assert site.serve_traffic(30, **SAME).verdict == result.verdict
    assert site.observe(site.restart()).verdict == result.verdict


def test_observe_again_without_new_scrape_keeps_state(site: AnalysisSite) -> None:
    site.serve_traffic(1, **WORSE)
    before = site.observe().state
    site.clock.advance(30)
    assert [site.observe().state for _ in range(3)] == [before] * 3


def test_observe_again_within_recording_interval_sends_no_query(site: AnalysisSite) -> None:
    site.serve_traffic(1, **SAME)
    queries = len(site.prometheus.queries)
    site.pass_time(5)
    site.observe()
    assert len(site.prometheus.queries) == queries


def test_observe_after_restart_of_scraped_target_leaves_interval_out(site: AnalysisSite) -> None:
    before = site.serve_traffic(2, **SAME).state
    site.prometheus.restart()
    site.prometheus.add("a", 5000, 10)
    site.prometheus.add("b", 5000, 4000)
    site.pass_time()
    after = site.observe()
    assert after.state.intervals == before.intervals
    assert (
        after.state.left_out_reason
        == "the origin of the counts changed, as after a restart of a Prometheus target"
    )
    assert after.verdict.verdict == "inconclusive"


def test_observe_of_fallen_counts_leaves_interval_out(site: AnalysisSite) -> None:
    before = site.serve_traffic(2, **SAME).state
    site.prometheus.counts["b", "200"] -= 10
    site.pass_time()
    after = site.observe().state
    assert after.intervals == before.intervals
    assert after.left_out_reason == "counts of revision b fell or contradict each other"


def test_observe_of_first_interval_of_step_leaves_it_out(site: AnalysisSite) -> None:
    site.observe()
    site.prometheus.add("b", 100, 90)
    site.prometheus.add("a", 100)
    site.pass_time()
    result = site.observe()
    assert (result.verdict.verdict, result.state.intervals) == ("inconclusive", ())
    assert result.state.left_out_reason == "the share of traffic before this interval is unknown"


def test_observe_after_changed_traffic_share_leaves_mixed_interval_out(site: AnalysisSite) -> None:
    site.serve_traffic(3, **SAME)
    mixed = site.serve_traffic(1, canary=(60, 0), stable=(140, 2)).state
    assert (len(mixed.intervals), mixed.left_out_reason) == (3, "the share of traffic changed")
    assert len(site.serve_traffic(2, canary=(60, 0), stable=(140, 2)).state.intervals) == 5


def test_observe_of_next_step_waits_for_requests_of_that_step(site: AnalysisSite) -> None:
    assert site.serve_traffic(5, **SAME).verdict.verdict == "pass"
    moved = site.observe(step=1)
    assert moved.verdict.waits_for == "0 of 100 requests"
    assert site.observe(step=0).state.step == 1, "a step never goes back"
    assert site.serve_traffic(1, canary=(100, 1), stable=(100, 1)).verdict.verdict == "pass"


def test_observe_after_long_gap_leaves_interval_out(site: AnalysisSite) -> None:
    site.serve_traffic(2, **SAME)
    site.prometheus.add("b", 400, 100)
    site.pass_time(3600)
    state = site.observe().state
    assert (len(state.intervals), state.left_out_reason) == (2, "3600 s passed without a reading")


def test_observe_after_max_duration_is_inconclusive(site: AnalysisSite) -> None:
    assert site.serve_traffic(5, **SAME).verdict.verdict == "pass"
    site.pass_time(86_200)
    result = site.observe()
    assert result.verdict.verdict == "inconclusive"
    assert result.verdict.reason == "the rollout took longer than max_duration"


def test_observe_of_rollout_without_observation_beyond_max_duration_starts_again(
    site: AnalysisSite,
) -> None:
    site.serve_traffic(5, **SAME)
    site.pass_time(3 * 86_400)
    result = site.observe()
    assert (result.verdict.verdict, result.state.intervals) == ("inconclusive", ())


def forget_canary(site: AnalysisSite) -> None:
    site.prometheus.counts = {k: v for k, v in site.prometheus.counts.items() if k[0] != "b"}


def forget_stable(site: AnalysisSite) -> None:
    site.prometheus.counts = {k: v for k, v in site.prometheus.counts.items() if k[0] != "a"}


def forget_all(site: AnalysisSite) -> None:
    site.prometheus.counts = {}


def lose_origin(site: AnalysisSite) -> None:
    site.prometheus.has_origin = False


def store_twice(site: AnalysisSite) -> None:
    labels = {"instance": "proxy-0", "job": "other", "rev": "b", "code": "200"}
    site.prometheus.extra = [{"metric": {"__name__": REQUESTS, **labels}, "value": [0, "5"]}]


def drop_label(site: AnalysisSite) -> None:
    metric = {"__name__": REQUESTS, "instance": "proxy-1", "rev": "b"}
    site.prometheus.extra = [{"metric": metric, "value": [0, "5"]}]


def answer_nan(site: AnalysisSite) -> None:
    metric = {"__name__": REQUESTS, "instance": "proxy-1", "rev": "b", "code": "200"}
    site.prometheus.extra = [{"metric": metric, "value": [0, "NaN"]}]


def answer_partially(site: AnalysisSite) -> None:
    site.prometheus.warnings = ["a store did not answer"]


def refuse(site: AnalysisSite) -> None:
    site.prometheus.status = 503


def live_in_future(site: AnalysisSite) -> None:
    site.prometheus.at += 1000


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (forget_stable, "no requests of the stable revision a"),
        (forget_all, "no requests of the stable revision a"),
        (lose_origin, f"no series {ORIGIN}"),
        (store_twice, "stored twice (job='proxy', job='other')"),
        (drop_label, "has no label code"),
        (answer_nan, "unexpected response"),
        (answer_partially, "returned warnings"),
        (refuse, "HTTP 503"),
        (live_in_future, "s ahead"),
    ],
)
def test_observe_of_unusable_counts_is_inconclusive_and_records_nothing(
    site: AnalysisSite, break_it: Callable[[AnalysisSite], None], reason: str
) -> None:
    before = site.serve_traffic(5, **SAME)
    assert before.verdict.verdict == "pass"
    break_it(site)
    site.pass_time()
    result = site.observe()
    assert result.verdict.verdict == "inconclusive"
    assert reason in result.verdict.reason
    assert result.state == before.state
    assert not result.is_ready


def test_observe_of_canary_without_traffic_waits(site: AnalysisSite) -> None:
    forget_canary(site)
    result = site.serve_traffic(5, canary=(0, 0), stable=(100, 1))
    assert (result.verdict.verdict, result.verdict.waits_for) == (
        "inconclusive",
        "0 of 100 requests",
    )
    site.prometheus.add("b", 10)
    site.pass_time()
    state = site.observe().state
    assert state.left_out_reason == "the traffic of the canary began within the interval"


def test_observe_with_stale_counts_reports_their_age(site: AnalysisSite) -> None:
    assert site.serve_traffic(5, **SAME).verdict.verdict == "pass"
    site.clock.advance(400)
    result = site.observe()
    assert "the last counts from Prometheus are 400 s old" in result.verdict.reason


def test_observe_of_unknown_analysis_raises_not_found_error(site: AnalysisSite) -> None:
    with pytest.raises(NotFoundError):
        site.service.observe(replace(KEY, analysis="none"), "a", "b")


def test_observe_of_same_revision_twice_raises_user_error(site: AnalysisSite) -> None:
    with pytest.raises(UserError, match="same revision"):
        site.service.observe(KEY, "a", "a")


def test_observe_by_two_instances_records_each_interval_once(site: AnalysisSite) -> None:
    other = site.restart()
    site.observe()
    for minute in range(7):
        site.prometheus.add("a", 100, 1)
        site.prometheus.add("b", 20, 0)
        site.pass_time()
        first, second = (site.service, other) if minute % 2 else (other, site.service)
        assert site.observe(first).state == site.observe(second).state
    assert len(site.observe(other).state.intervals) == 6


def test_observe_while_other_instance_appends_same_interval_records_it_once(
    site: AnalysisSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, create = site.restart(), LocalObjects.create
    site.serve_traffic(1, **SAME)
    site.prometheus.add("b", 20)
    site.prometheus.add("a", 180)
    site.pass_time()

    def lose(self: LocalObjects, name: str, data: bytes) -> bool:
        monkeypatch.setattr(LocalObjects, "create", create)
        site.observe(other)
        return create(self, name, data)

    monkeypatch.setattr(LocalObjects, "create", lose)
    state = site.observe().state
    assert [each.canary.requests for each in state.intervals] == [20, 20]
    assert state == site.observe(other).state


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("call", range(1, 5))
def test_observe_of_worse_canary_with_failing_write_of_state_fails_and_never_passes(
    site: AnalysisSite, monkeypatch: pytest.MonkeyPatch, call: int, is_stored: bool
) -> None:
    create, calls = LocalObjects.create, 0

    def fail(self: LocalObjects, name: str, data: bytes) -> bool:
        nonlocal calls
        calls += 1
        if calls != call:
            return create(self, name, data)
        if is_stored:
            create(self, name, data)
        raise StorageError("the disk is full")

    monkeypatch.setattr(LocalObjects, "create", fail)
    results: list[AnalysisAnswer] = [site.serve_traffic(0, **WORSE)]
    for _ in range(4):
        results.append(site.serve_traffic(1, **WORSE))
        again = site.observe(site.restart())
        if results[-1].verdict.verdict == "fail":
            assert again.verdict == results[-1].verdict
    assert "pass" not in {result.verdict.verdict for result in results}
    assert results[-1].verdict.verdict == "fail"


def test_observe_with_unreadable_or_missing_state_entry_is_inconclusive(site: AnalysisSite) -> None:
    site.serve_traffic(5, **SAME)
    (site.folder / "state" / KEY.folder / "00000003.json").write_bytes(b"{")
    result = site.observe(site.restart())
    assert result.verdict.verdict == "inconclusive"
    (site.folder / "state" / KEY.folder / "00000003.json").unlink()
    assert "the entry is missing" in site.observe(site.restart()).verdict.reason


@pytest.mark.parametrize("second", [1, 1000], ids=["seconds", "milliseconds"])
def test_observe_with_latency_guardrail_fails_slower_canary(tmp_path: Path, second: int) -> None:
    changes = {"guardrails": ["latency_p50"], "prometheus": {"histogram": "http_seconds"}}
    bounds = (0.1 * second, 0.2 * second, 0.4 * second, math.inf)
    with open_site(tmp_path, **changes) as site:
        fast = dict(zip(bounds, (50, 40, 10, 0), strict=True))
        slow = dict(zip(bounds, (10, 30, 60, 0), strict=True))
        for _ in range(3):
            site.prometheus.add_latencies("a", fast)
        site.prometheus.add_latencies("b", dict(zip(bounds, (5, 0, 0, 0), strict=True)))
        site.prometheus.scrape(0.0)
        result = site.observe()
        assert result.state.thresholds is not None
        for _ in range(5):
            site.prometheus.add("a", 100)
            site.prometheus.add("b", 100)
            site.prometheus.add_latencies("a", fast)
            site.prometheus.add_latencies("b", slow)
            site.pass_time()
            result = site.observe()
    assert result.verdict.verdict == "fail"
    assert result.verdict.reason.startswith("latency_p50: ")


def start_posted(site: AnalysisSite) -> AnalysisAnswer:
    return site.service.start(POSTED, "a", "b", AnalysisPolicy(min_requests=(100,)))


def make_counts(
    canary: tuple[int, int], interval: str = "", at: float | None = None
) -> ClientCounts:
    return ClientCounts(
        stable=RequestCounts(requests=1000, errors=10),
        canary=RequestCounts(requests=canary[0], errors=canary[1]),
        interval=interval,
        digest=repr(canary),
        at=at,
    )


def test_add_counts_of_same_interval_twice_records_it_once_and_refuses_other_counts(
    site: AnalysisSite,
) -> None:
    start_posted(site)
    for _ in range(2):
        result = site.service.add_counts(POSTED, make_counts((60, 0), "one"))
        assert result.verdict.waits_for == "60 of 100 requests"
    assert site.service.add_counts(POSTED, make_counts((60, 0), "two")).verdict.verdict == "pass"
    with pytest.raises(RefusedError, match="other counts"):
        site.service.add_counts(POSTED, make_counts((61, 0), "two"))


def test_add_counts_of_cumulative_counts_records_difference_and_refuses_future_counts(
    site: AnalysisSite,
) -> None:
    result = start_posted(site)
    now = site.clock.now()
    for seconds, requests in ((0, 50), (10, 90), (10, 90), (5, 70), (20, 200)):
        counts = make_counts((requests, 0), at=now + seconds)
        counts = replace(
            counts, stable=RequestCounts(requests=10 * requests, errors=requests // 10)
        )
        result = site.service.add_counts(POSTED, counts)
    assert [each.canary.requests for each in result.state.intervals] == [110]
    with pytest.raises(RefusedError, match="in the future"):
        site.service.add_counts(POSTED, make_counts((300, 0), at=now + 100))


def test_start_again_with_other_revisions_raises_refused_error(site: AnalysisSite) -> None:
    start_posted(site)
    assert start_posted(site).verdict.verdict == "inconclusive"
    with pytest.raises(RefusedError, match="other revisions"):
        site.service.start(POSTED, "a", "c", AnalysisPolicy(min_requests=(100,)))


def test_show_of_forgotten_rollout_raises_not_found_error_until_new_start(
    site: AnalysisSite,
) -> None:
    start_posted(site)
    site.service.add_counts(POSTED, make_counts((100, 90), "one"))
    assert site.service.show(POSTED).verdict.verdict == "fail"
    assert [site.service.forget(POSTED), site.service.forget(POSTED)] == [True, False]
    with pytest.raises(NotFoundError):
        site.service.show(POSTED)
    with pytest.raises(NotFoundError):
        site.service.add_counts(POSTED, make_counts((1, 0), "two"))
    assert start_posted(site).verdict.verdict == "inconclusive"
    assert site.service.show(POSTED).verdict.verdict == "inconclusive"


def test_add_counts_for_analysis_of_prometheus_raises_refused_error(site: AnalysisSite) -> None:
    with pytest.raises(RefusedError, match="come from Prometheus"):
        site.service.add_counts(replace(POSTED, analysis="web"), make_counts((1, 0), "one"))


def test_open_traffic_repeated_returns_true_only_for_short_time(site: AnalysisSite) -> None:
    forget_canary(site)
    site.pass_time()
    result = site.observe()
    assert site.service.open_traffic(result)
    assert site.service.open_traffic(site.observe()), "the answer can be lost"
    site.pass_time(200)
    assert not site.service.open_traffic(site.observe())


def test_open_traffic_without_counts_of_stable_returns_false(site: AnalysisSite) -> None:
    forget_all(site)
    site.pass_time()
    assert not site.service.open_traffic(site.observe())


def test_observe_after_restart_restores_many_intervals_with_valid_or_damaged_checkpoint(
    site: AnalysisSite,
) -> None:
    state = site.serve_traffic(150, **SAME).state
    assert site.observe(site.restart()).state == state
    checkpoint = site.folder / "state" / KEY.folder / "checkpoint.json"
    assert checkpoint.exists()
    checkpoint.write_bytes(b"{}")
    assert site.observe(site.restart()).state == state


def test_start_with_failing_store_raises_error_and_observe_returns_its_reason(
    site: AnalysisSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LocalObjects, name: str) -> bytes:
        raise ServiceUnavailableError("the object store does not answer")

    monkeypatch.setattr(LocalObjects, "read", fail)
    with pytest.raises(OnnxOpsError):
        start_posted(site)
    assert "does not answer" in site.observe().verdict.reason
