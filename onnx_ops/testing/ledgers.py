"""Conformance suite for ledgers. Subclass `LedgerSuite` with an `opener` fixture.

class TestMyLedger(LedgerSuite):
    @pytest.fixture
    def opener(self, tmp_path) -> Opener: ...

An opener opens the same ledger at every call. The suite also calls it in other processes, which
compete for entries and are killed. Therefore it must be possible to pickle the opener. For a ledger
within one process, set `processes` to False.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, get_args

import pytest

from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.attestation import Envelope, EnvelopeSignature
from onnx_ops.domain.endpoint import Deployment, EndpointConfig
from onnx_ops.domain.ledger import (
    ActionOutcome,
    AliasesWritten,
    AliasSelection,
    EndpointAbandoned,
    EndpointBound,
    EndpointDeleted,
    EntryBody,
    Intent,
    LeaseRenewed,
    LedgerAdopted,
    LedgerEntry,
    LedgerOrigin,
    MetricsRecorded,
    NotificationSent,
    OperatorCommandSent,
    OverrideRecorded,
    ReleaseLeft,
    ReleaseState,
    RequestWithdrawn,
    RollbackRequested,
    RolloutPaused,
    ServerWrittenOff,
    ThresholdsFixed,
    VersionRefused,
    VersionSelected,
    fold,
)
from onnx_ops.domain.rollout import (
    Action,
    ActionKind,
    OperatorCommand,
    Roles,
    WaitKind,
    build_split_state,
)
from onnx_ops.domain.rollout_observations import (
    EpochUnits,
    GenerationCounts,
    LatencyQuantiles,
    LatencyThresholds,
    MetricsReading,
    RequestCounts,
    ShadowCounts,
    UnitCounts,
    UserBlocks,
)
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.errors import LedgerConflictError
from onnx_ops.ports import Ledger

Opener = Callable[[], Ledger]

WRITERS = 8
ROUNDS = 5
KILLS = 12
TIMEOUT_S = 60.0
ENDPOINT = "digits"


def entry(
    sequence: int, body: EntryBody, *, endpoint: str = ENDPOINT, actor: str = "tester"
) -> LedgerEntry:
    """Return a ledger entry with this sequence number and body."""
    return LedgerEntry(
        endpoint=endpoint, sequence=sequence, at=1.5 * sequence, actor=actor, body=body
    )


def command_entry(sequence: int, *, reason: str = "", actor: str = "tester") -> LedgerEntry:
    """Return an entry with a command of an operator."""
    return entry(
        sequence, OperatorCommandSent(command=OperatorCommand.ADVANCE, reason=reason), actor=actor
    )


def one_of_each() -> tuple[EntryBody, ...]:
    """Return bodies of all kinds but the deletion, in an order that a ledger accepts."""
    digest = digest_bytes(b"content")
    served = Deployment(
        name="v1",
        model="m",
        version="1",
        variant="fp32",
        release=digest,
        manifest=digest,
        location="/models/1",
    )
    config = EndpointConfig(
        endpoint=ENDPOINT,
        provider="local",
        model="m",
        target="cpu",
        target_digest=digest,
        pipeline="p",
        options={"port": 8080, "name": "ü", "share": 0.5, "on": True},
    )
    action = Action(
        kind=ActionKind.FIRST,
        state=build_split_state(None, served, 100),
        roles=Roles(stable=served),
        why="first deployment",
        aliases={"champion-cpu": "1", "challenger-cpu": None},
        reject=(digest,),
    )
    reading = MetricsReading(
        origin="server 7",
        at=60.5,
        tallies={
            "v1": RequestCounts(requests=900, errors=9),
            "v2": RequestCounts(requests=100, over_p50=51, over_p99=2, timed=98),
        },
        shadow=ShadowCounts(compared=10, differing=1),
        quantiles={"v1": LatencyQuantiles(p50_s=0.002, p99_s=0.008)},
    )
    counts = GenerationCounts(
        origin="server 7",
        generation=2,
        tallies=reading.tallies,
        blocks={"v2": {"feedback": UserBlocks(requests=(3, 0, 1), events=(1, 0, 1))}},
    )
    units = EpochUnits(
        generation=2,
        epoch=29_405_131,
        units={"errors": UnitCounts(candidate=(9, 0, 1), stable=(80,))},
    )
    selected = AliasSelection(alias="challenger-cpu", version="1", seen_at=90.5)
    envelope = Envelope(
        payload="e30=",
        payloadType="application/json",
        signatures=(EnvelopeSignature(keyid=digest, sig="c2ln"),),
    )
    return (
        EndpointBound(
            config=config,
            policy=RolloutPolicy(steps=(0.1, 1.0)),
            origin=LedgerOrigin(project="shop", place="s3://releases", keys={}),
        ),
        Intent(action=action, holder="h", expires_at=120.25, selected=selected),
        ActionOutcome(of=2, ok=True),
        OperatorCommandSent(command=OperatorCommand.PAUSE, reason="«lunch»\n"),
        AliasesWritten(aliases={"champion-cpu": "1", "challenger-cpu": None}),
        VersionRefused(alias="champion-cpu", version="2", reason="no", restored_to=None),
        ReleaseLeft(version="1", serving="2"),
        ServerWrittenOff(server="r1", reason="its machine was destroyed"),
        OverrideRecorded(
            release=digest, manifest=digest, version="2", reason="because", signed=envelope
        ),
        ThresholdsFixed(
            candidate=digest, thresholds=LatencyThresholds(p50_s=0.002, p99_s=0.008, requests=4000)
        ),
        MetricsRecorded(reading=reading),
        MetricsRecorded(
            reading=MetricsReading(at=61.0, counts=(counts,), epochs=(units,), open_epoch=units)
        ),
        RolloutPaused(wait=WaitKind.APPROVAL, step=1, why="held"),
        NotificationSent(notifier="github(repository=acme/models)", of=9),
        LeaseRenewed(of=2, expires_at=180.5),
        RollbackRequested(action=action, by_operator=True),
        RequestWithdrawn(reason="wrong endpoint"),
        EndpointAbandoned(reason="it moved", place="region a"),
        VersionSelected(selected=selected),
        LedgerAdopted(keys={}, reason="any trusted key counts"),
        LedgerAdopted(
            keys={}, state=ReleaseState(endpoint=ENDPOINT, config=config, rejected={digest: "slow"})
        ),
    )


def _race(opener: Opener, barrier: Any, results: Any, name: str) -> None:
    """Append entries in competition; report which of them this writer wrote."""
    for sequence in range(1, ROUNDS + 1):
        ledger, won = opener(), False
        barrier.wait()
        with suppress(LedgerConflictError):
            ledger.append(command_entry(sequence, actor=name))
            won = True
        results.put((sequence, name, won))


def _append_for_ever(opener: Opener, started: Any) -> None:
    ledger = opener()
    sequence = len(ledger.read(ENDPOINT)) + 1
    started.set()
    while True:
        ledger.append(command_entry(sequence, reason="x" * 20_000))
        sequence += 1


class LedgerSuite:
    """Conformance of a Ledger."""

    processes: ClassVar[bool] = True

    @pytest.fixture
    def ledger(self, opener: Opener) -> Ledger:
        return opener()

    def test_ledger_of_unknown_endpoint_has_no_entries(self, ledger: Ledger) -> None:
        assert ledger.read(ENDPOINT) == ()
        assert ledger.endpoints() == ()
        assert ledger.count(ENDPOINT) == 0

    def test_read_of_each_entry_kind_returns_written_entry(
        self, ledger: Ledger, opener: Opener
    ) -> None:
        bodies = (*one_of_each(), EndpointDeleted(reason="it is unused"))
        assert {type(body) for body in bodies} == set(get_args(EntryBody))
        written = tuple(entry(n, body) for n, body in enumerate(bodies, start=1))
        for one in written:
            ledger.append(one)
        assert ledger.read(ENDPOINT) == ledger.read_intact(ENDPOINT) == written
        assert opener().read(ENDPOINT) == opener().read_intact(ENDPOINT) == written

    def test_state_equals_fold_of_all_entries(self, ledger: Ledger, opener: Opener) -> None:
        """Check the state after every entry.

        Each of three rounds appends the bodies of `one_of_each`. A ledger that was opened anew is
        also checked: in the first round after every entry, in later rounds at the end.
        """
        written: list[LedgerEntry] = []
        for number in range(3):
            for body in one_of_each():
                written.append(entry(len(written) + 1, body, actor=f"actor {number}"))
                ledger.append(written[-1])
                assert ledger.state(ENDPOINT) == fold(ENDPOINT, written)
                assert ledger.read(ENDPOINT, after=len(written) - 1) == (written[-1],)
                if number == 0:
                    assert opener().state(ENDPOINT) == fold(ENDPOINT, written)
            assert opener().state(ENDPOINT) == fold(ENDPOINT, written)
        assert ledger.read(ENDPOINT, after=4) == tuple(written[4:])
        assert ledger.read(ENDPOINT, after=len(written)) == ()

    def test_read_returns_entries_in_order(self, ledger: Ledger) -> None:
        for sequence in range(1, 13):
            ledger.append(command_entry(sequence))
        assert [one.sequence for one in ledger.read(ENDPOINT)] == list(range(1, 13))
        assert ledger.count(ENDPOINT) == 12

    def test_append_of_taken_sequence_raises_ledger_conflict_error_and_writes_nothing(
        self, ledger: Ledger, opener: Opener
    ) -> None:
        ledger.append(command_entry(1, actor="first"))
        for late in (ledger, opener()):
            with pytest.raises(LedgerConflictError):
                late.append(command_entry(1, actor="second"))
        assert [one.actor for one in ledger.read(ENDPOINT)] == ["first"]
        ledger.append(command_entry(2, actor="second"))
        assert [one.actor for one in ledger.read(ENDPOINT)] == ["first", "second"]

    def test_ledger_of_several_endpoints_returns_entries_of_each(self, ledger: Ledger) -> None:
        for name in ("digits", "faces", "model@target"):
            ledger.append(
                entry(
                    1,
                    OperatorCommandSent(command=OperatorCommand.PAUSE, reason=name),
                    endpoint=name,
                )
            )
        assert set(ledger.endpoints()) == {"digits", "faces", "model@target"}
        for name in ledger.endpoints():
            (one,) = ledger.read(name)
            assert isinstance(one.body, OperatorCommandSent)
            assert one.body.reason == name

    def test_append_by_concurrent_processes_succeeds_once_per_sequence(
        self, opener: Opener
    ) -> None:
        if not self.processes:
            return
        context = _context()
        barrier, results = context.Barrier(WRITERS), context.Queue()
        writers = [
            context.Process(target=_race, args=(opener, barrier, results, f"w{n}"))
            for n in range(WRITERS)
        ]
        for writer in writers:
            writer.start()
        appended = [results.get(timeout=TIMEOUT_S) for _ in range(WRITERS * ROUNDS)]
        for writer in writers:
            writer.join(TIMEOUT_S)
        winners = [name for _, name, won in sorted(appended) if won]
        assert [one.actor for one in opener().read(ENDPOINT)] == winners
        assert len(winners) == ROUNDS

    def test_append_by_killed_process_leaves_whole_entries_or_none(self, opener: Opener) -> None:
        if not self.processes:
            return
        context = _context()
        for attempt in range(KILLS):
            started = context.Event()
            writer = context.Process(target=_append_for_ever, args=(opener, started))
            writer.start()
            assert started.wait(TIMEOUT_S)
            time.sleep(0.002 * (attempt % 7))
            os.kill(writer.pid or 0, signal.SIGKILL)
            writer.join(TIMEOUT_S)
            entries = opener().read(ENDPOINT)
            assert [one.sequence for one in entries] == list(range(1, len(entries) + 1))
            assert all(
                one.body
                == OperatorCommandSent(command=OperatorCommand.ADVANCE, reason="x" * 20_000)
                for one in entries
            )
        opener().append(command_entry(len(opener().read(ENDPOINT)) + 1))


def _context() -> Any:
    """Return a context whose processes are forked from a small server.

    A fork of the test process itself would copy locks that its threads hold.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["onnx_ops.testing.ledgers", "onnx_ops.adapters.ledgers.log"])
    return context
