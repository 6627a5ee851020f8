"""The planted faults fit the package as it is."""

from __future__ import annotations

from tests.support.mutants import read_table


def test_every_planted_fault_applies() -> None:
    faults, rooms = read_table()
    assert len(faults) >= 300
    assert rooms
