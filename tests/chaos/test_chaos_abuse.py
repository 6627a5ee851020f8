"""Forty kinds of abusive requests, three at a time, beside well-behaved clients."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import deploy
from tests.support.abuse import (
    KINDS,
    MAX_PAUSE_S,
    MEMORY_RATIO,
    OPTIONS,
    SPARE_BYTES,
    run_abuses,
    shuffle_kinds,
    write_model,
)
from tests.support.server import ServerFamily


def test_abuse_kinds_number_at_least_forty() -> None:
    assert len(set(KINDS)) >= 40


@pytest.mark.nightly
def test_server_under_abuse_serves_other_clients_with_bounded_pauses_and_memory(
    tmp_path: Path,
) -> None:
    with ServerFamily(folder=tmp_path / "state", options=OPTIONS) as server:
        assert (
            server.publish(state_of(deploy(write_model(tmp_path / "model")), blue=100), 1).status
            == 200
        )
        seed = random.SystemRandom().getrandbits(32)
        print(f"seed {seed}")  # noqa: T201 (shown with a failure)
        result = run_abuses(server, shuffle_kinds(seed))
        assert set(result.kinds) == set(KINDS)
        assert result.other_failures == 0, result.records.failures()
        assert max(result.pauses_s, default=0.0) < MAX_PAUSE_S
        assert result.memory_ratio <= MEMORY_RATIO or result.growth_bytes < SPARE_BYTES
        assert "Traceback" not in server.log()
        assert server.stop() == 0
