"""The log of a ledger: all its entries, and which of them are verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.domain.ledger import Intent
from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.release.entry_log import read_entry_log
from tests.release.disk_scenes import on_disk
from tests.release.release_scenes import on_trial


def test_entry_log_of_signed_ledger_verifies_all_entries_and_names_grants(tmp_path: Path) -> None:
    with on_disk(tmp_path):
        log = read_entry_log(on_trial().context, "digits")
    assert log.error is None
    assert [entry.sequence for entry in log.entries] == list(range(1, log.state.head + 1))
    assert log.grants[0] == "binds the endpoint"
    assert "" in log.grants
    assert None not in log.grants


def test_entry_log_continued_from_known_log_reads_only_new_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_disk(tmp_path):
        scene = on_trial()
        known = read_entry_log(scene.context, "digits")
        scene.say(OperatorCommand.PAUSE)
        expected = read_entry_log(scene.context, "digits")
        ledger, after = scene.context.ledger, []
        read = ledger.read

        def count(endpoint: str, **options: int) -> object:
            after.append(options)
            return read(endpoint, **options)

        monkeypatch.setattr(ledger, "read", count)
        assert read_entry_log(scene.context, "digits", known) == expected
    assert after == [{"after": known.state.head}]


def test_entry_log_after_missing_signature_shows_entries_as_not_verified(tmp_path: Path) -> None:
    with on_disk(tmp_path):
        scene = on_trial()
        entries = scene.context.ledger.read("digits")
        first = next(e.sequence for e in entries if isinstance(e.body, Intent))
        file = tmp_path / ".onnx-ops" / "ledger" / "digits" / f"{first:08d}.jsonl"
        file.write_bytes(file.read_bytes().partition(b"\n")[0] + b"\n[]\n")
        scene.restart()
        log = read_entry_log(scene.context, "digits")
    assert log.error is not None
    assert len(log.entries) == len(entries)
    assert None not in log.grants[: first - 1]
    assert set(log.grants[first - 1 :]) == {None}
