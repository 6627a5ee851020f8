"""The provider of replicas over real followers and servers.

The followers read signed tables from a folder.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock
from unittest.mock import patch

import fsspec
import pytest

from onnx_ops import codec
from onnx_ops.adapters.endpoints import replicas
from onnx_ops.adapters.endpoints.replicas import ReplicaEndpoints
from onnx_ops.adapters.files import LocalObjects, ObjectStore, open_objects
from onnx_ops.adapters.replica_files import upload_model
from onnx_ops.domain.artifact import hex_digits
from onnx_ops.domain.endpoint import Deployment, EndpointConfig, TrafficSplit, serves_only
from onnx_ops.domain.rollout_observations import GenerationCounts
from onnx_ops.errors import (
    ConflictError,
    InfrastructureError,
    MissingKeyError,
    ServiceUnavailableError,
    UserError,
)
from onnx_ops.protocol.messages import DEPLOYMENT_HEADER, FEEDBACK_HEADER, UserCountsRequest
from onnx_ops.protocol.replica_reports import ReplicaStatus
from onnx_ops.protocol.replica_tables import (
    DEADLINE_S,
    LEASE_S,
    RollbackTable,
    TableHead,
    TableNumber,
    encode_table,
    plan_tables,
)
from onnx_ops.protocol.server_process import SERVER_FILE, ServerRecord
from onnx_ops.testing.endpoints import Disturbance, EndpointProviderSuite, Killed
from onnx_ops.testing.fakes import FakeSigner
from tests.adapters.replica_site import ReplicaSite, ask_replica, open_site, report_feedback
from tests.support.processes import until
from tests.support.suite import Sweep

SUITE = EndpointProviderSuite()
_CALLS = ("read", "write", "create", "list_names", "list_objects", "upload")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ReplicaSite]:
    site = open_site(tmp_path)
    yield site
    site.stop_all()


class SelfStartedReplicas(ReplicaEndpoints):
    """A provider that starts the replica that a user would start.

    It stops the replica when the endpoint is removed.
    """

    site: ReplicaSite

    def apply(self, *arguments: object, **named: object) -> None:
        super().apply(*arguments, **named)  # type: ignore[arg-type]
        if not self.site.processes:
            self.site.start()
            until(
                lambda: any(
                    one.is_live and one.status.adopted
                    for one in self.list_replicas(self.site.config)
                )
            )

    def remove(self, config: EndpointConfig) -> None:
        self.site.stop_all()
        super().remove(config)


@contextmanager
def disturbed_objects(kind: type[ObjectStore], fault: Disturbance, at: int = 0) -> Iterator[Sized]:
    """Disturb the calls of a kind of store in this process, from call number `at`.

    Yield the list of the calls that were made.
    """
    calls: list[str] = []

    def disturb(name: str) -> Callable[..., object]:
        plain = getattr(kind, name)

        @functools.wraps(plain)
        def call(self: ObjectStore, *arguments: object) -> object:
            number = len(calls)
            calls.append(name)
            if (fault == "error" and number >= at) or (fault != "none" and number > at):
                raise ServiceUnavailableError("injected")
            answer = plain(self, *arguments)
            if fault != "none" and number == at:
                if fault == "kill":
                    raise Killed
                raise ServiceUnavailableError("injected: the answer is lost")
            return answer

        return call

    with ExitStack() as stack:
        for name in _CALLS:
            stack.enter_context(patch.object(kind, name, disturb(name)))
        yield calls


class ReplicaSuite(EndpointProviderSuite):
    """The endpoint suite for replicas; subclasses define the fixture `site`."""

    objects: type[ObjectStore] = LocalObjects

    def disturbed(self, fault: Disturbance, at: int = 0) -> AbstractContextManager[Sized]:
        return disturbed_objects(self.objects, fault, at)

    @pytest.fixture
    def chosen(self, sweep: Sweep) -> Callable[[Iterable[int]], Sequence[int]]:
        return lambda requests: sweep(list(requests)[:7])  # later requests only read reports

    @pytest.fixture
    def provider(self, site: ReplicaSite) -> ReplicaEndpoints:
        provider = SelfStartedReplicas(trusted=site.folder / "trusted")
        provider.site = site
        provider.sign_with(lambda: site.signer)
        return provider

    @pytest.fixture
    def config(self, site: ReplicaSite) -> EndpointConfig:
        return site.config

    @pytest.fixture
    def deployments(self, site: ReplicaSite) -> tuple[Deployment, Deployment]:
        return site.blue, site.green


class TestReplicas(ReplicaSuite):
    pass


@pytest.fixture
def serving(site: ReplicaSite) -> ReplicaSite:
    """Return a site that has served blue, and then green to a tenth of the traffic."""
    site.start()
    site.apply(1, blue=100)
    until(lambda: site.adopted() == TableNumber(1))
    site.apply(2, blue=90, green=10)
    return site


def test_list_memory_returns_measurements_of_reporting_replicas(serving: ReplicaSite) -> None:
    (memory,) = serving.provider.list_memory(serving.config)
    assert (memory.server, memory.workers) == ("r1", 1)
    assert memory.worker_bytes > 0
    serving.stop_all()
    assert not serving.provider.list_memory(serving.config)


class TestFeedback:
    """Two replicas: tokens of the first one's answers are reported to the second."""

    @pytest.fixture
    def both(self, site: ReplicaSite) -> ReplicaSite:
        for name in ("r1", "r2"):
            site.start(name)
        site.apply(1, blue=100)
        until(lambda: all(site.adopted(name) == TableNumber(1) for name in ("r1", "r2")))
        state = replace(site.state(blue=50, green=50), limits_s={"blue": (), "green": ()})
        site.provider.apply(site.config, state, generation=2)
        until(lambda: all(site.adopted(name) == TableNumber(2) for name in ("r1", "r2")))
        return site

    def test_feedback_at_other_replica_counts_for_answering_version(
        self, both: ReplicaSite
    ) -> None:
        answers = [ask_replica(both.address("r1"), user) for user in map(str, range(40))]
        expected = Counter(answer[DEPLOYMENT_HEADER] for answer in answers)
        assert expected.keys() == {"blue", "green"}
        tokens = [answer[FEEDBACK_HEADER] for answer in answers]
        successes, changed = (
            dict.fromkeys(tokens, True),
            {f"{token[:-1]}+": True for token in tokens},
        )
        assert report_feedback(both.address("r2"), successes) == {"counted": 40, "unknown": 0}
        for unknown in (successes, changed):
            assert report_feedback(both.address("r2"), unknown) == {"counted": 0, "unknown": 40}

        def read() -> list[GenerationCounts]:
            """Return the counts that have feedback, after it was reported."""
            counts = both.provider.metrics().read(both.config, {"green": None, "blue": None}).counts
            return [
                each for each in counts if any(tally.feedback for tally in each.tallies.values())
            ]

        (counts,) = until(read)
        assert counts.generation == 2
        assert {name: tally.feedback for name, tally in counts.tallies.items()} == expected
        assert {
            name: sum(by_place["feedback"].events) for name, by_place in counts.blocks.items()
        } == expected

    def test_feedback_key_after_requests_is_stored_only_in_tables(self, both: ReplicaSite) -> None:
        key = both.read_table(1).table.feedback_key
        assert {both.read_table(2, phase).table.feedback_key for phase in (0, 1)} == {key} != {""}
        ask_replica(both.address("r1"), "user")
        until(lambda: list(both.reports_folder.glob("counts/r2~*")))
        files = [
            path
            for place in (both.folder, both.reports_folder)
            for path in place.rglob("*")
            if path.is_file()
        ]
        assert files
        assert not any(key.encode() in path.read_bytes() for path in files)
        assert key not in repr(both.observed())

    def test_feedback_token_after_unsigned_rollback_is_counted(self, both: ReplicaSite) -> None:
        token = ask_replica(both.address("r1"), "user")[FEEDBACK_HEADER]
        back = RollbackTable(endpoint="digits", number=TableNumber(9), to=TableNumber(2))
        both.write_table(back.number, encode_table(back, None))
        until(lambda: both.adopted("r2") == back.number)
        assert report_feedback(both.address("r2"), {token: True}) == {"counted": 1, "unknown": 0}
        assert FEEDBACK_HEADER in ask_replica(both.address("r2"), "user")


class TestWithoutAuthority:
    """Actions of an attacker who can write one of the two locations and has no key."""

    def test_follower_with_table_of_unknown_key_skips_and_names_it(
        self, serving: ReplicaSite
    ) -> None:
        thief = open_site(serving.folder / "thief")
        forged = serving.read_table(2)
        number = TableNumber(9)
        state = replace(
            forged.table.state,
            generation=number.generation,
            split=TrafficSplit(weights={"green": 100}),
        )
        table = replace(
            forged, number=number, table=replace(forged.table, state=state, fallback="")
        )
        serving.write_table(number, encode_table(table, thief.signer))
        serving.write_table(TableNumber(10), encode_table(table, None))
        until(lambda: len(serving.status().skipped) == 2)
        skipped = serving.status().skipped
        assert "not trusted" in skipped["00000009-1.json"]
        assert "the object contains table" in skipped["00000010-1.json"]
        assert serving.adopted() == TableNumber(2)
        observed = serving.observed()
        assert observed.generation == 2
        assert any("table/00000009-1.json is ignored" in text for text in observed.out_of_service)

    def test_follower_with_invalid_table_objects_skips_them(self, serving: ReplicaSite) -> None:
        garbage = (
            b"",
            b"{}",
            b"[]",
            bytes(100),
            b'{"kind": "table", "content": {}}',
            b"9" * 5000,
            b"[" * 9999,
        )
        for number, data in enumerate(garbage, 9):
            serving.write_table(TableNumber(number), data)
        (serving.control_folder / "table" / "readme.txt").write_text("?")
        until(lambda: len(serving.status().skipped) == len(garbage) + 1)
        assert serving.adopted() == TableNumber(2)
        assert serving.observed().generation == 2

    def test_follower_with_unsigned_rollback_serves_stable_version(
        self, serving: ReplicaSite
    ) -> None:
        back = RollbackTable(endpoint="digits", number=TableNumber(9), to=TableNumber(2))
        serving.write_table(back.number, encode_table(back, None))
        until(lambda: serving.adopted() == back.number)
        assert {SUITE.scale(serving.address()) for _ in range(50)} == {2.0}
        assert serves_only(serving.observed(), serving.blue)

    def test_follower_with_invalid_rollback_target_skips_it(self, serving: ReplicaSite) -> None:
        for number, to in ((7, 8), (8, 4), (9, 9)):
            back = RollbackTable(endpoint="digits", number=TableNumber(number), to=TableNumber(to))
            serving.write_table(back.number, encode_table(back, None))
        until(lambda: len(serving.status().skipped) == 3)
        assert serving.adopted() == TableNumber(2)

    def test_follower_with_table_of_other_endpoint_skips_it(self, serving: ReplicaSite) -> None:
        table = replace(serving.read_table(2), endpoint="letters", number=TableNumber(9))
        serving.write_table(TableNumber(9), encode_table(table, serving.signer))
        assert "letters" in until(lambda: serving.status().skipped)["00000009-1.json"]

    def test_follower_with_changed_model_files_does_not_load_them(self, site: ReplicaSite) -> None:
        site.start()
        site.apply(1, blue=100)
        until(lambda: site.adopted() == TableNumber(1))
        upload_model(site.control, Path(site.green.location))
        stored = next(
            (site.control_folder / "models").glob(f"{hex_digits(site.green.manifest)}/files/*")
        )
        stored.write_bytes(Path(site.blue.location, "model.onnx").read_bytes())
        # The next attempt fails too: the previous table names green, which is not loaded.
        for generation in (2, 3, 4):
            with pytest.raises(InfrastructureError, match="replica r1 cannot serve table"):
                site.apply(generation, blue=90, green=10)
        assert {SUITE.scale(site.address()) for _ in range(20)} == {2.0}
        assert site.observed().split.weights["green"] == 0

    def test_replica_rollback_with_forged_reports_serves_stable_version(
        self, serving: ReplicaSite
    ) -> None:
        reports = serving.reports_folder
        forged = replace(serving.status(), replica="r2", start="0" * 12, adopted=TableNumber(99))
        (reports / "status" / "r2.json").write_bytes(codec.dumps(forged))
        (reports / "status" / "r3.json").write_bytes(b"{")
        (reports / "counts" / f"r2~{'0' * 12}.json").write_bytes(b'{"origin": 1}')
        (reports / "epochs").mkdir(exist_ok=True)
        (reports / "epochs" / f"00000005-1~r2~{'0' * 12}.json").write_bytes(b"nothing")
        assert serving.observed().generation == 2
        serving.provider.roll_back(serving.config, serving.state(blue=100, green=0), generation=3)
        assert {SUITE.scale(serving.address()) for _ in range(30)} == {2.0}

    def test_metrics_read_with_impossible_counts_omits_replica_and_reports_its_name(
        self, serving: ReplicaSite
    ) -> None:
        provider, limits_s = serving.provider, {"green": (), "blue": ()}
        request = UserCountsRequest(limits_s=limits_s)
        until(lambda: not provider._read_counts(serving.config, request)[0].failure)
        honest, status = (
            serving.read_counts(),
            replace(serving.status(), replica="r2", start="0" * 12),
        )
        table = honest.tables[-1]
        wrong = replace(table.deployments["green"], statuses={"500": 10**30})
        forged = replace(
            honest, tables=(replace(table, deployments={**table.deployments, "green": wrong}),)
        )
        (serving.reports_folder / "status" / "r2.json").write_bytes(codec.dumps(status))
        (serving.reports_folder / "counts" / f"r2~{'0' * 12}.json").write_bytes(codec.dumps(forged))
        reading = provider.metrics().read(serving.config, {"green": None, "blue": None})
        assert {one.origin for one in reading.counts} == {honest.origin}
        assert reading.failure == "the counts of replica r2 cannot be read"


class TestWithoutKey:
    def test_replica_rollback_of_candidate_without_key_succeeds(self, serving: ReplicaSite) -> None:
        serving.provider.sign_with(lambda: None)
        serving.provider.roll_back(serving.config, serving.state(blue=100, green=0), generation=3)
        assert serving.adopted() == TableNumber(3)
        assert {SUITE.scale(serving.address()) for _ in range(30)} == {2.0}
        written = len(list((serving.control_folder / "table").iterdir()))
        serving.provider.roll_back(serving.config, serving.state(blue=100, green=0), generation=3)
        assert len(list((serving.control_folder / "table").iterdir())) == written

    def test_replica_rollback_of_finished_release_without_key_succeeds(
        self, serving: ReplicaSite
    ) -> None:
        serving.apply(3, green=100, blue=0)
        serving.provider.sign_with(lambda: None)
        serving.provider.roll_back(serving.config, serving.state(blue=100, green=0), generation=4)
        assert serving.adopted() == TableNumber(4)
        assert {SUITE.scale(serving.address()) for _ in range(30)} == {2.0}

    def test_replica_rollback_with_key_that_replicas_do_not_trust_succeeds(
        self, serving: ReplicaSite
    ) -> None:
        serving.apply(3, green=100, blue=0)
        serving.provider.sign_with(FakeSigner)
        serving.provider.roll_back(serving.config, serving.state(blue=100, green=0), generation=4)
        assert serving.adopted() == TableNumber(4)
        assert {SUITE.scale(serving.address()) for _ in range(30)} == {2.0}

    def test_replica_rollback_while_key_service_fails_succeeds(self, serving: ReplicaSite) -> None:
        serving.apply(3, green=100, blue=0)
        remote = mock.Mock(spec=FakeSigner, is_local=False)
        remote.key = serving.signer.key
        remote.sign.side_effect = ServiceUnavailableError("the key's service does not answer")
        serving.provider.sign_with(lambda: remote)
        serving.provider.roll_back(serving.config, serving.state(blue=100, green=0), generation=4)
        assert serving.adopted() == TableNumber(4)
        remote.sign.assert_not_called()
        assert {SUITE.scale(serving.address()) for _ in range(30)} == {2.0}

    def test_replica_change_to_unsigned_state_without_key_raises_missing_key_error(
        self, serving: ReplicaSite
    ) -> None:
        serving.provider.sign_with(lambda: None)
        with pytest.raises(MissingKeyError, match="signing is off"):
            serving.apply(3, blue=50, green=50)
        with pytest.raises(MissingKeyError, match="needs a signed table of its version") as raised:
            serving.provider.roll_back(
                serving.config, serving.state(green=100, blue=0), generation=3
            )
        assert "signing is off" in raised.value.why
        assert 'signing = "required"' in raised.value.remedy
        assert serving.adopted() == TableNumber(2)


class TestFailures:
    def test_replica_apply_with_taken_table_number_raises_conflict_error(
        self, site: ReplicaSite
    ) -> None:
        site.apply(1, blue=100)
        site.write_table(TableNumber(2), b"garbage")
        with pytest.raises(
            ConflictError, match="a different object has the number of table 00000002-1"
        ):
            site.apply(2, blue=100)
        site.apply(3, blue=100)

    def test_replica_apply_of_candidate_without_ready_replica_raises_service_unavailable_error(
        self, site: ReplicaSite, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(replicas, "_PREPARE_S", 2.0)
        site.apply(1, blue=100)
        with pytest.raises(ServiceUnavailableError, match="no replica is registered"):
            site.apply(2, blue=90, green=10)
        site.start()
        until(lambda: site.adopted() == TableNumber(2, 0))
        site.apply(3, blue=90, green=10)
        site.stop(number=signal.SIGKILL)
        site.age_reports(25)
        site.apply(4, blue=100)
        with pytest.raises(ServiceUnavailableError, match="r1 has not reported table") as raised:
            site.apply(5, blue=90, green=10)
        command = f"onnx-ops rollback {site.config.endpoint} --write-off REPLICA --reason WHY"
        assert command in raised.value.remedy

    def test_replica_server_after_follower_kill_serves_until_takeover(
        self, site: ReplicaSite
    ) -> None:
        site.start()
        site.apply(1, blue=100)
        until(lambda: site.adopted() == TableNumber(1))
        start = site.status().start
        site.stop(number=signal.SIGKILL)
        assert SUITE.scale(site.address()) == 2.0
        site.age_reports(25)
        site.apply(2, blue=100)
        site.start()
        until(lambda: site.status().start != start and site.adopted() == TableNumber(2))
        assert SUITE.scale(site.address()) == 2.0

    def test_replica_server_after_kill_is_restarted_by_follower(self, site: ReplicaSite) -> None:
        site.start()
        site.apply(1, blue=100)
        until(lambda: site.adopted() == TableNumber(1))
        record = codec.loads((site.folder / "r1" / SERVER_FILE).read_bytes(), ServerRecord)
        os.kill(record.pid, signal.SIGKILL)
        until(lambda: site.read_record() not in (None, record))
        until(lambda: site.adopted() == TableNumber(1) and site.status().is_healthy)
        until(
            lambda: sum(each.ends for each in site.read_counts().uptimes) == 1,
            "a report of the end",
        )
        assert SUITE.scale(site.address()) == 2.0

    def test_replica_start_without_store_serves_stable_version_from_disk(
        self, site: ReplicaSite
    ) -> None:
        site.start()
        site.apply(1, blue=100)
        until(lambda: site.adopted() == TableNumber(1))
        site.apply(2, blue=10, green=90)
        site.stop()
        away = site.control_folder.rename(site.folder / "away")
        site.control_folder.write_text("no folder")
        site.start()
        until(lambda: site.read_record() is not None)
        until(lambda: SUITE.scale(site.address()) == 2.0)
        assert {SUITE.scale(site.address()) for _ in range(50)} == {2.0}
        site.control_folder.unlink()
        away.rename(site.control_folder)
        until(lambda: site.status().adopted == TableNumber(2) and not site.status().is_final)
        # Since the restart, no reconciliation has confirmed the rollout.
        assert {SUITE.scale(site.address()) for _ in range(50)} == {2.0}
        until(lambda: site.confirm() == {2.0, 3.0})

    def test_replica_stop_reports_end_with_last_counts(self, site: ReplicaSite) -> None:
        site.start()
        site.apply(1, blue=100)
        until(lambda: site.adopted() == TableNumber(1))
        for _ in range(25):
            SUITE.scale(site.address())
        site.stop()
        assert site.status().is_final
        assert site.read_counts().is_final
        assert not any(each.ends for each in site.read_counts().uptimes)
        (counts,) = site.provider._read_counts(site.config, None)
        assert counts.deployments["blue"].statuses["200"] == 25
        assert counts.tables[-1].generation == 1
        assert not site.observed().stragglers


class TestEmptyPlace:
    """Rollbacks while no replica reports: an empty folder, or a killed replica."""

    def test_replica_rollback_without_reporting_replicas_stays_open(
        self, site: ReplicaSite
    ) -> None:
        site.provider.roll_back(site.config, site.state(blue=100), generation=3)
        (straggler,) = site.observed().stragglers
        assert straggler.startswith("only 0 of 1 replicas have reported to ")

    def test_forget_server_during_rollback_removes_killed_replica_from_stragglers(
        self, site: ReplicaSite
    ) -> None:
        site.start()
        site.apply(1, blue=100)
        until(lambda: site.adopted() == TableNumber(1))
        site.apply(2, blue=0, green=100)
        site.stop(number=signal.SIGKILL)
        site.age_reports(60)
        site.provider.roll_back(site.config, site.state(blue=100, green=0), generation=3)
        assert site.observed().stragglers
        site.provider.forget_server(site.config, "r1")
        assert not site.observed().stragglers
        assert [server.state for server in site.provider.list_servers(site.config)] == ["ended"]


def test_replica_apply_after_loss_of_rollback_table_writes_no_load_only_table(
    site: ReplicaSite,
) -> None:
    site.start()
    site.apply(1, blue=100)
    until(lambda: site.adopted() == TableNumber(1))
    site.apply(2, green=100)
    site.provider.roll_back(site.config, site.state(blue=100), generation=3)
    until(lambda: site.adopted() == TableNumber(3))
    site.control.delete(TableNumber(3).name)
    site.apply(4, blue=100)
    until(lambda: site.adopted() == TableNumber(4))
    assert site.control.read(TableNumber(4, 0).name) is None


class TestSilent:
    """Replicas that stopped reporting: one is cut off, and the other has ended."""

    @pytest.fixture
    def cut(
        self, site: ReplicaSite
    ) -> Callable[[str, Sequence[dict[str, int]], int], tuple[str, ...]]:
        """Return a function that observes a rollback after a replica was cut off.

        The replica last reported that it had adopted table `adopted` of the given ones. The
        function returns the stragglers, a long time later.
        """

        def observe(lease: str, splits: Sequence[dict[str, int]], adopted: int) -> tuple[str, ...]:
            site.config = replace(
                site.config, options={**site.config.options, "lease": lease, "replicas": 2}
            )
            for generation, weights in enumerate(splits, 1):
                seen = site.provider._look(site.config)
                _, table = plan_tables(
                    *(site.endpoint, site.state(**weights), generation, seen.newest),
                    digest=seen.digest,
                    limits_s={},
                    is_leased=lease == "leave",
                )
                site.provider._create(site.config, table)
            back = len(splits) + 1
            site.provider._publish_rollback_table(
                site.config, site.provider._look(site.config), site.state(blue=100, green=0), back
            )
            status = ReplicaStatus(
                replica="r1", start="0" * 12, endpoint="digits", adopted=TableNumber(adopted)
            )
            for each in (status, replace(status, replica="r2", is_final=True)):
                open_objects(site.reports_url).write(
                    f"status/{each.replica}.json", codec.dumps(each)
                )
            assert site.observed().stragglers
            site.age_reports(LEASE_S + DEADLINE_S + 1)
            path = site.control_folder / TableNumber(back).name
            os.utime(path, (at := path.stat().st_mtime - LEASE_S - DEADLINE_S - 1, at))
            return site.observed().stragglers

        return observe

    FINISHED = ({"blue": 100}, {"blue": 100, "green": 0}, {"blue": 0, "green": 100})

    def test_replica_rollback_of_finished_release_with_silent_replica_stays_open(
        self, cut: Callable[[str, Sequence[dict[str, int]], int], tuple[str, ...]]
    ) -> None:
        (text,) = cut("serve", self.FINISHED, 3)
        assert "replica r1 reported table 00000003-1, not table 00000004-1" in text

    def test_replica_rollback_of_finished_release_with_expired_lease_completes(
        self, cut: Callable[[str, Sequence[dict[str, int]], int], tuple[str, ...]]
    ) -> None:
        assert cut("leave", self.FINISHED, 3) == ()

    def test_rollback_with_silent_replica_at_unreported_table_stays_open(
        self, cut: Callable[[str, Sequence[dict[str, int]], int], tuple[str, ...]]
    ) -> None:
        # The replica may serve table 3, in which green has all traffic.
        (text,) = cut("serve", self.FINISHED, 2)
        assert "replica r1 reported table 00000002-1, not table 00000004-1" in text

    def test_rollback_with_silent_replica_at_stable_version_completes(
        self, cut: Callable[[str, Sequence[dict[str, int]], int], tuple[str, ...]]
    ) -> None:
        assert cut("serve", ({"blue": 100}, {"blue": 100, "green": 0}), 1) == ()


def test_list_servers_of_replicas_shows_state_of_last_report(site: ReplicaSite) -> None:
    reports = open_objects(site.reports_url)
    for name, is_final in (("r3", False), ("r2", True), ("r1", False)):
        status = ReplicaStatus(
            replica=name,
            start="0" * 12,
            endpoint="digits",
            adopted=None if name == "r1" else TableNumber(7),
            versions={"onnxruntime": "1.30.0"},
            is_final=is_final,
        )
        reports.write(f"status/{name}.json", codec.dumps(status))
    path = site.reports_folder / "status" / "r3.json"
    os.utime(path, (at := path.stat().st_mtime - 25, at))
    servers = site.provider.list_servers(site.config)
    assert [(each.name, each.state, each.table) for each in servers] == [
        ("r1", "reports", ""),
        ("r2", "ended", "00000007-1"),
        ("r3", "silent", "00000007-1"),
    ]
    assert servers[2].age_s >= 25


def test_observe_with_lease_other_than_in_table_reports_drift(site: ReplicaSite) -> None:
    site.apply(1, blue=100)
    assert site.observed().drift == ()
    site.config = replace(site.config, options={**site.config.options, "lease": "leave"})
    assert site.observed().drift == ("lease is serve, not leave",)
    site.apply(2, blue=100)
    assert site.observed().drift == ()


def test_validate_options_with_unknown_lease_raises_user_error(site: ReplicaSite) -> None:
    with pytest.raises(UserError, match="lease"):
        site.provider.validate_options({**site.config.options, "lease": "stay"})


def test_validate_options_with_equal_or_nested_locations_raises_user_error(
    site: ReplicaSite,
) -> None:
    for reports in ("s3://bucket/p", "s3://bucket/p/reports", "s3://bucket"):
        with pytest.raises(UserError, match="nor a parent or subfolder"):
            site.provider.validate_options({"control": "s3://bucket/p/", "reports": reports})


def test_follower_with_invalid_table_head_keeps_table_until_next_apply(site: ReplicaSite) -> None:
    site.start()
    site.apply(1, blue=100)
    until(lambda: site.adopted() == TableNumber(1))
    for head in (
        b"nothing",
        codec.dumps(TableHead(number=TableNumber(77), beat=1)),
        codec.dumps(TableHead(number=TableNumber(0), beat=2)),
    ):
        (site.control_folder / "head.json").write_bytes(head)
        time.sleep(0.6)
        assert site.adopted() == TableNumber(1)
    site.apply(2, blue=100)
    until(lambda: site.adopted() == TableNumber(2))


class TestDiagnosis:
    def diagnose(self, site: ReplicaSite) -> dict[str, tuple[bool, str]]:
        findings = site.provider.diagnose({"digits": site.config.options})
        return {
            finding.check.removeprefix("digits: "): (finding.ok, finding.found)
            for finding in findings
        }

    def test_diagnose_of_served_endpoint_reports_no_problem(self, site: ReplicaSite) -> None:
        site.apply(1, blue=100)
        site.start()
        until(lambda: site.adopted() == TableNumber(1))
        findings = self.diagnose(site)
        assert all(ok for ok, _ in findings.values()), findings
        assert findings["objects among the tables"][1] == "table 00000001-1 is the newest"
        assert not list(site.control_folder.glob("probe/*"))

    def test_diagnose_of_unusable_storage_and_missing_key_names_failed_checks(
        self, site: ReplicaSite
    ) -> None:
        site.write_table(TableNumber(4), b"garbage")
        site.provider.sign_with(lambda: None)
        site.reports_folder.write_text("no folder")
        findings = self.diagnose(site)
        assert {name for name, (ok, _) in findings.items() if ok} == {"tables"}
        assert findings["clocks"][1] == "not compared: no replica reports"
        assert "00000004-1.json" in findings["objects among the tables"][1]

    def test_diagnose_with_clock_skew_names_replica(self, site: ReplicaSite) -> None:
        site.apply(1, blue=100)
        site.start()
        until(lambda: site.adopted() == TableNumber(1))
        site.stop(number=signal.SIGKILL)
        status = replace(site.status(), at=site.status().at - 7200)
        (site.reports_folder / "status" / "r1.json").write_bytes(codec.dumps(status))
        assert self.diagnose(site)["clocks"] == (
            False,
            "different from the store's clock: r1 by -7200 s",
        )


def test_object_store_list_without_credentials_raises_service_unavailable_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    try:
        with pytest.raises(ServiceUnavailableError, match="credentials"):
            open_objects("s3://missing-bucket/place").list_names("table")
    finally:
        # Other tests use other credentials.
        fsspec.get_filesystem_class("s3").clear_instance_cache()
