"""The places, durations and prices of stages.

The commands are `plan`, `status --runs`, and `doctor` for pools.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import numpy as np
import pytest
from rich.console import Console

from onnx_ops.app.context import open_project
from onnx_ops.app.running_stages import RunningStages
from onnx_ops.cli import common
from onnx_ops.cli.diagnosis import diagnose
from onnx_ops.cli.tables import PlannedStage, plan_table
from onnx_ops.domain.plan import StageKind
from onnx_ops.domain.pool import PlacedRun, PoolStatus, WorkerStatus
from onnx_ops.domain.target import HardwareFingerprint
from onnx_ops.errors import ServiceUnavailableError, UserError
from onnx_ops.ports import Pools
from onnx_ops.testing.models import rows, write_perceptron
from tests.support.command import run_command
from tests.support.golden import Golden

BOARD = HardwareFingerprint(
    machine="aarch64",
    cpu_model="Cortex-A76",
    cpu_flags=("asimd",),
    cores=4,
    memory_bytes=8_200_000_000,
    runtime="onnxruntime",
    runtime_version="1.31.1",
)

WORKER = WorkerStatus(
    pool="boards",
    name="board-7-4711",
    kinds=(StageKind.BENCHMARK, StageKind.SEARCH),
    limit=1,
    release="0.1.0",
    store="s3://bucket/onnx-ops",
    machine=BOARD,
    providers=("CPUExecutionProvider",),
)


def placed(stage: str, state: Any, age: float, worker: str = "", why: str = "") -> PlacedRun:
    kind = stage.partition("/")[0]
    return PlacedRun(
        run=stage, stage=stage, kind=kind, state=state, since=1000.0 - age, worker=worker, why=why
    )


BUSY = PoolStatus(
    pool="boards",
    workers=(WORKER,),
    runs=(
        placed("benchmark/fp32@board", "running", 125, WORKER.name),
        placed("benchmark/int8-dynamic@board", "waiting", 124, why="all workers are busy"),
    ),
)
EMPTY = PoolStatus(
    pool="gpu", runs=(placed("train", "waiting", 40, why="no worker of the pool is running"),)
)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Replace the pools of an orchestrator, which these tests do not need."""
    fake: Mock = create_autospec(Pools, instance=True)
    monkeypatch.setattr(RunningStages, "pools", fake)
    monkeypatch.setattr("onnx_ops.adapters.host.SystemClock.now", lambda self: 1000.0)
    return fake


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return the output on a terminal of 80 columns."""
    sink = io.StringIO()
    out = Console(file=sink, width=80, force_terminal=True, color_system=None, emoji=False)
    monkeypatch.setattr(common, "console", lambda: out)
    return sink


PLAN = (
    PlannedStage(stage="data/test", needs=(), would="unchanged"),
    PlannedStage(stage="train", needs=("data/train",), would="run"),
    PlannedStage(stage="quantize/int8-dynamic", needs=("export",), would="run"),
    PlannedStage(
        stage="benchmark/int8-dynamic@board",
        needs=("export", "validate", "quantize/int8-dynamic", "data/test"),
        would="run",
    ),
    PlannedStage(
        stage="promote@board",
        needs=("register",),
        would="skip: needs register, which was not planned",
    ),
)


def test_plan_table_without_pools_and_history_omits_their_columns(
    screen: io.StringIO, golden: Golden
) -> None:
    plan_table("digits", PLAN)
    golden("tables", screen.getvalue())


def test_plan_table_with_pools_and_times_fits_80_columns(
    screen: io.StringIO, golden: Golden
) -> None:
    data, train, quantize, benchmark, promote = PLAN
    train = replace(train, pool="gpu", seconds=412.3)
    benchmark = replace(benchmark, pool="boards", seconds=38.0, price=38 / 3600 * 0.9)
    plan_table("digits", (data, train, quantize, benchmark, promote))
    assert all(len(line) <= 80 for line in screen.getvalue().splitlines())
    golden("tables", screen.getvalue())


def test_plan_shows_times_of_last_execution_and_prices_of_targets(tmp_path: Path) -> None:
    (tmp_path / "onnx-ops.toml").write_text('pools = "quantize=gpu"\n')
    (tmp_path / "configs" / "targets").mkdir(parents=True)
    (tmp_path / "configs" / "targets" / "board.yaml").write_text(
        "name: board\npool: boards\nprice_per_hour: 0.9\n"
    )
    (tmp_path / "configs" / "targets" / "cpu.yaml").write_text("name: cpu\n")
    (tmp_path / "p.yaml").write_text(
        "pipeline: p\ndata: {test: {file: rows.npz, inputs: {x: x}}}\nmodel: "
        "model.onnx\nexport: {framework: onnx}\n"
        "quantize: [{name: int8, method: dynamic}]\nbenchmark: {targets: [board, cpu]}\n"
    )
    np.savez(tmp_path / "rows.npz", allow_pickle=False, **rows(8))
    write_perceptron(tmp_path / "model.onnx")
    durations = tmp_path / ".onnx-ops" / "durations"
    durations.mkdir(parents=True)
    (durations / "p.json").write_text(
        '{"quantize/int8": 4.0, "benchmark/int8@board": 40.0, "benchmark/int8@cpu": 30.0}'
    )
    stages = run_command("plan", "p.yaml", "--json", cwd=tmp_path).parsed()["stages"]
    found = {one["stage"]: (one["pool"], one["seconds"], one["price"]) for one in stages}
    assert found["export"] == ("", None, None)
    assert found["quantize/int8"] == ("gpu", 4.0, None)
    assert found["benchmark/int8@board"] == ("boards", 40.0, pytest.approx(0.01))
    assert found["benchmark/int8@cpu"] == ("", 30.0, None)
    assert found["gate/int8@board"] == ("", None, None)


def test_status_runs_shows_running_and_waiting_stages(
    pools: Mock, tmp_path: Path, golden: Golden
) -> None:
    pools.read_status.return_value = (BUSY, EMPTY)
    result = run_command("status", "--runs", cwd=tmp_path)
    # The code is 4, because no worker takes the stage `train`.
    assert result.code == 4
    golden("tables", result.stdout)
    document = run_command("status", "--runs", "--json", cwd=tmp_path)
    assert document.code == 4
    boards, gpu = json.loads(document.stdout)
    assert [run["state"] for run in boards["runs"]] == ["running", "waiting"]
    assert boards["workers"][0]["machine"]["cores"] == 4
    assert (gpu["workers"], gpu["runs"][0]["why"]) == ([], "no worker of the pool is running")


@pytest.mark.parametrize("status", [(), (BUSY,)])
def test_status_runs_without_pools_or_with_running_workers_exits_with_0(
    status: tuple[PoolStatus, ...], pools: Mock, tmp_path: Path
) -> None:
    pools.read_status.return_value = status
    assert run_command("status", "--runs", cwd=tmp_path).code == 0


def test_status_runs_without_prefect_address_or_with_endpoint_exits_with_2(tmp_path: Path) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    # Other tests of this process can set an address, so the defaults are restored.
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        nowhere = run_command("status", "--runs", "--json", cwd=tmp_path)
    assert (nowhere.code, json.loads(nowhere.stdout)["where"]) == (2, "PREFECT_API_URL")
    assert run_command("status", "digits", "--runs", cwd=tmp_path).code == 2


def test_doctor_reports_workers_of_each_pool(
    pools: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "onnx-ops.toml").write_text('store = "s3://bucket/onnx-ops"\npools = "train=gpu"\n')
    (tmp_path / "configs" / "targets").mkdir(parents=True)
    (tmp_path / "configs" / "targets" / "board.yaml").write_text("name: board\npool: boards\n")
    (tmp_path / "configs" / "targets" / "far.yaml").write_text(
        "name: far\npool: far\ncustom_ops: {package: acme_missing, domains: [acme]}\n"
    )
    (tmp_path / "configs" / "targets" / "wrong.yaml").write_text("name: 1\n")
    plain = WorkerStatus(pool="boards", name="old")
    pools.read_status.return_value = (
        PoolStatus(pool="boards", workers=(WORKER, plain)),
        PoolStatus(pool="theirs"),
    )
    found = {one.check: one for one in diagnose(open_project()) if one.check.startswith("pool")}
    assert found.keys() == {"pool boards", "pool far", "pool gpu", "pool theirs"}
    assert found["pool boards"].found == (
        "board-7-4711 takes benchmark, search; aarch64, Cortex-A76, 4 cores, 8 GB; "
        "ONNX Runtime 1.31.1 with CPUExecutionProvider; onnx-ops 0.1.0\n"
        "old is running, but has published no description of its machine"
    )
    states = {check: (one.ok, one.absent) for check, one in found.items()}
    assert states == {
        "pool boards": (True, False),
        "pool far": (False, False),
        "pool gpu": (False, False),
        "pool theirs": (True, True),
    }
    assert found["pool gpu"].remedy.endswith("onnx-ops work --pool gpu")


@pytest.mark.parametrize(
    ("error", "named", "states"),
    [
        (UserError("none is configured", where="PREFECT_API_URL"), True, []),
        (ServiceUnavailableError("it does not answer"), False, [(True, True)]),
        (ServiceUnavailableError("it does not answer"), True, [(False, False)]),
    ],
)
def test_doctor_with_prefect_error_fails_only_for_configured_server_of_used_pools(
    error: Exception,
    named: bool,
    states: list[tuple[bool, bool]],
    pools: Mock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "onnx-ops.toml").write_text('pools = "train=gpu"\n' if named else "")
    pools.read_status.side_effect = error
    assert [
        (one.ok, one.absent) for one in diagnose(open_project()) if one.check.startswith("pool")
    ] == states
