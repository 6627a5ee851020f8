"""The planted faults fit the present package."""

from __future__ import annotations

from tests.support.mutants import read_table


def test_read_table_of_mutants_returns_at_least_300_faults_of_package() -> None:
    faults, rooms = read_table()
    assert len(faults) >= 300
    assert rooms
