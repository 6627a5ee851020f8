"""The planted faults fit the present package."""

from __future__ import annotations

from tests.support.mutants import read_table


def test_mutants_table_applies_to_package() -> None:
    faults, rooms = read_table()
    assert len(faults) >= 300
    assert rooms
