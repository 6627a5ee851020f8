"""Stages on other machines, run by workers of pools in separate folders.

Tests kill workers and stages, and cancel runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from tests.e2e.e2e_project import ONLY_FP32, Project
from tests.e2e.prefect_site import PrefectSite, ended, site_of
from tests.support.command import PROGRAM
from tests.support.operators import build_library, write_softsign
from tests.support.pool_site import PoolSite, flow_runs_of, kill_tree, pool_site
from tests.support.processes import ROOT, until

pytestmark = [pytest.mark.services, pytest.mark.in_order, pytest.mark.nightly]

POOL = "board-a"
NOWHERE = "board-b"
"""A target whose pool does not exist."""

LIMITS = "gates=[{kind: parity}, {kind: metric, name: accuracy, min: 90%}]"
"""Gates without latency, which is only measured: tests share their machine."""

TARGET = """
name: {name}
description: A machine of the pool {name}.
pool: {pool}
session: {{intra_op_threads: 2}}
requires: {{cores: 1}}
"""


@pytest.fixture(scope="module")
def site(
    released: Project, prefect_api: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrefectSite]:
    """Yield a project whose release is measured on this machine's target.

    A worker serves the pool of a second target.
    """
    for name, pool in ((POOL, POOL), (NOWHERE, "without-workers")):
        path = released.root / "configs" / "targets" / f"{name}.yaml"
        path.write_text(TARGET.format(name=name, pool=pool), encoding="utf-8")
    with site_of(released, tmp_path_factory.mktemp("prefect"), prefect_api) as made:
        with (made.home / "log").open("ab") as log:
            worker = subprocess.Popen(
                ["taskset", "-c", "0", PROGRAM, "work", "--pool", POOL],
                cwd=released.root,
                env={**made.environment(), "OMP_NUM_THREADS": "2"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        made.started.append(worker)
        until(lambda: "takes stages:" in made.log(), what="a worker that takes stages", seconds=120)
        yield made


def run(site: PrefectSite, *overrides: str, code: int = 0) -> Any:
    return site.project.process(*command(*overrides), "--json", environ=site.client).parsed(code)


def command(*overrides: str) -> list[str]:
    sets = [
        part for override in (ONLY_FP32, "deploy=[]", *overrides) for part in ("--set", override)
    ]
    return ["run", "configs/pipelines/digits-mlp.yaml", "--until", "gate", *sets]


def test_run_with_pool_target_measures_it_on_pool_worker(site: PrefectSite) -> None:
    found = run(site, 'benchmark.targets=["cpu-1t", "board-a"]')
    assert {choice["target"]: choice["verdict"] for choice in found["choices"]} == dict.fromkeys(
        ("cpu-1t", POOL), "pass"
    )
    measured = {"name": {"any_": [f"digits-mlp/benchmark/fp32@{POOL}"]}}
    runs = site.ask("/flow_runs/filter", flow_runs=measured)
    assert {run["state_type"] for run in runs} == {"COMPLETED"}
    again = run(site, 'benchmark.targets=["cpu-1t", "board-a"]')
    assert {outcome["status"] for outcome in again["outcomes"]} == {"cached"}


def test_run_with_targets_of_different_runtimes_chooses_variant_for_each(site: PrefectSite) -> None:
    targets = ("cpu-1t", "cpu-all", "openvino-cpu", "node", "browser-wasm", "mobile-ort", "board-a")
    overrides = (f"benchmark.targets=[{', '.join(targets)}]", "deploy=[]", LIMITS)
    sets = [part for override in overrides for part in ("--set", override)]
    run = ("run", "configs/pipelines/digits-cnn.yaml", *sets)
    found = site.project.process(*run, "--json", environ=site.client).parsed()
    chosen = {choice["target"]: choice["variant"] for choice in found["choices"]}
    assert set(chosen) == set(targets)
    assert all(chosen.values()), found["choices"]
    versions = found["registration"]["versions"]
    registry = site.project.registry
    assert registry.aliases("digits-cnn") == {
        f"champion-{target}": versions[chosen[target]] for target in targets
    }
    version = registry.version("digits-cnn", versions["fp32"])
    assert registry.document(version, "packages/mobile-ort/model.ort")[4:8] == b"ORTM"


def test_stage_killed_on_pool_worker_is_run_again(site: PrefectSite) -> None:
    arguments = [*command('benchmark.targets=["board-a"]'), "--no-cache", "benchmark"]
    begun = site.project.start(*arguments, environ=site.client)
    (worker,) = site.started
    (fork,) = until(lambda: flow_runs_of(worker.pid), seconds=120, what="a flow run that measures")
    kill_tree(fork)
    _, errors = begun.communicate(timeout=400)
    assert begun.returncode == 0, errors
    own = {"name": {"any_": ["digits-mlp/benchmark/fp32@board-a"]}}
    states = [run["state_type"] for run in site.ask("/flow_runs/filter", flow_runs=own)]
    assert states.count("CRASHED") == 1


def test_run_with_unfit_pool_machine_reports_error_verdict(site: PrefectSite) -> None:
    path = site.project.root / "configs" / "targets" / "board-a.yaml"
    path.write_text(path.read_text().replace("cores: 1", "cores: 1000"), encoding="utf-8")
    found = run(site, 'benchmark.targets=["cpu-1t", "board-a"]', code=4)
    verdicts = {choice["target"]: choice["verdict"] for choice in found["choices"]}
    assert verdicts == {"cpu-1t": "pass", "board-a": "error"}
    error = found["errors"]["benchmark/fp32@board-a"]
    assert (error["error"], error["where"]) == ("MeasurementError", "target board-a")
    assert "of 1000 cores" in error["what"]


def test_run_with_missing_pool_names_command_to_create_it(site: PrefectSite) -> None:
    done = site.project.process(*command('benchmark.targets=["board-b"]'), environ=site.client)
    assert "deployment work/without-workers is missing" in done.stdout + done.stderr
    assert "onnx-ops work --pool without-workers" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


PLACED = {"ONNX_OPS_POOLS": "train=lab, export=lab, validate=lab, quantize=lab"}


@pytest.fixture(scope="module")
def lab(site: PrefectSite) -> Iterator[PoolSite]:
    """Yield a project, and a worker of the pool `lab` that has no file of the project."""
    with pool_site(site, variants=2, targets=("lab",)) as made:
        made.work("lab", "--limit", "2")
        yield made


def test_stages_on_pool_worker_have_same_results_as_local_run(lab: PoolSite) -> None:
    placed = lab.manifests(
        lab.result(lab.ask("train.with.mark=one", until="validate", environ=PLACED))
    )
    here = {"ONNX_OPS_STORE": str(lab.folder / "other-store")}
    assert (
        lab.manifests(lab.result(lab.ask("train.with.mark=one", until="validate", environ=here)))
        == placed
    )
    assert {"lab/export", "lab/train", "lab/validate"} <= {run["name"] for run in lab.runs()}
    assert not list(lab.workers[0].folder.glob("*.py"))
    outcomes = lab.result(lab.ask("train.with.mark=one", environ=PLACED))["outcomes"]
    assert {outcome["status"] for outcome in outcomes} <= {"cached", "done"}, outcomes


def test_concurrent_runs_share_placed_stage_after_kill_of_first_run(lab: PoolSite) -> None:
    values = ("train.with.mark=shared", "train.with.seconds=4")
    other = {**PLACED, "ONNX_OPS_STATE": str(lab.folder / "other-state")}
    first = lab.ask(*values, until="train", environ=PLACED)
    second = lab.ask(*values, until="train", environ=other)
    until(lambda: lab.marked("shared")["begins"], what="the training")
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    result = lab.result(second)
    assert [outcome["status"] for outcome in result["outcomes"]][-1] == "done"
    again = lab.result(lab.ask(*values, until="train", environ=PLACED))
    assert {outcome["status"] for outcome in again["outcomes"]} == {"cached"}
    assert [len(times) for times in lab.marked("shared").values()] == [1, 1]


@pytest.mark.parametrize("victim", ["worker", "stage", "worker and stage"])
def test_placed_stage_after_kill_of_worker_or_stage_finishes_once(
    lab: PoolSite, victim: str
) -> None:
    (worker,) = lab.workers
    mark = victim.replace(" ", "-")
    asked = lab.ask(
        f"train.with.mark={mark}", "train.with.seconds=4", until="export", environ=PLACED
    )
    until(lambda: lab.marked(mark)["begins"], what="the training")
    (fork,) = worker.forks()
    if victim.startswith("worker"):
        worker.process.kill()
        worker.process.wait()
    if victim.endswith("stage"):
        kill_tree(fork)
    if victim.startswith("worker"):
        lab.restart(worker)
    lab.result(asked)
    begun, finished = lab.marked(mark).values()
    assert (len(begun), len(finished)) == ((1, 1) if victim == "worker" else (2, 1))


@pytest.mark.parametrize("asker", ["command", "flow"])
def test_interrupted_run_ends_its_processes_on_pool_worker(lab: PoolSite, asker: str) -> None:
    """Prefect's runner ends a cancelled flow run by SIGTERM."""
    (worker,) = lab.workers
    values = (f"train.with.mark=stopped-{asker}", "train.with.seconds=1000")
    start = lab.ask if asker == "command" else lab.flow
    asked = start(*values, until="train", environ=PLACED)
    until(lambda: lab.marked(f"stopped-{asker}")["begins"], what="the training", seconds=120)
    (fork,) = worker.forks()
    below = [fork, *worker.stages()]
    assert len(below) == 2
    os.killpg(asked.pid, signal.SIGINT if asker == "command" else signal.SIGTERM)
    until(
        lambda: not any(map(psutil.pid_exists, below)), seconds=10, what="the end of every process"
    )
    asked.communicate(timeout=60)
    assert asked.returncode == (130 if asker == "command" else -signal.SIGTERM)
    until(lambda: lab.runs("train")[-1]["state_type"] == "CANCELLED", what="a cancelled flow run")


def test_run_with_unsuitable_or_stopped_pool_worker_fails_before_stage_starts(
    lab: PoolSite,
) -> None:
    worker = lab.work("rest", "--kinds", "benchmark")
    placed = {"ONNX_OPS_POOLS": "train=rest"}
    found = lab.result(lab.ask("train.with.mark=none", until="train", environ=placed), code=4)
    error = found["errors"]["train"]
    assert error["what"] == "no worker of pool rest takes train stages"
    assert "onnx-ops work --pool rest" in error["remedy"]
    ended([worker.process])
    found = lab.result(lab.ask("train.with.mark=none", until="train", environ=placed), code=4)
    assert found["errors"]["train"]["what"] == "no worker of pool rest is running"
    assert lab.marked("none") == {"begins": [], "ends": []}


def test_run_with_pool_worker_of_other_store_names_both_stores(lab: PoolSite) -> None:
    lab.work("far", settings=f'store = "{lab.folder / "far-store"}"\n')
    found = lab.result(
        lab.ask("train.with.mark=far", until="train", environ={"ONNX_OPS_POOLS": "train=far"}),
        code=4,
    )
    why = found["errors"]["train"]["why"]
    assert str(lab.folder / "store") in why
    assert str(lab.folder / "far-store") in why


def test_prefect_worker_executes_pool_deployment(lab: PoolSite) -> None:
    def polled() -> str:
        return str(lab.prefect.call("GET", "/work_pools/plain/queues/train")["last_polled"])

    worker = lab.work("plain")
    ended([worker.process])
    before = polled()
    with (worker.folder / "log").open("ab") as log:
        worker.process = subprocess.Popen(
            [
                PROGRAM.with_name("prefect"),
                "worker",
                "start",
                "--pool",
                "plain",
                "--install-policy",
                "never",
            ],
            cwd=worker.folder,
            env=lab.environment(worker.folder, PREFECT_WORKER_QUERY_SECONDS="1"),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    until(
        lambda: "Worker" in worker.log and "started" in worker.log,
        what="Prefect's worker",
        seconds=120,
    )
    until(lambda: polled() != before, what="a poll of the queue")
    lab.result(
        lab.ask("train.with.mark=plain", until="train", environ={"ONNX_OPS_POOLS": "train=plain"})
    )
    assert len(lab.marked("plain")["ends"]) == 1


def test_search_and_custom_operators_run_on_pool_worker(lab: PoolSite) -> None:
    root = lab.asker
    (root / "lib").mkdir()
    library = build_library(ROOT / "examples/custom_ops/softsign.c", root / "lib/libsoftsign.so")
    np.savez(
        root / "rows.npz", x=np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
    )
    write_softsign(root / "softsign.onnx")
    (root / "configs/targets/acme.yaml").write_text(
        "name: acme\npool: lab\n"
        f"custom_ops: {{path: lib/libsoftsign.so, digest: '{library.digest}', "
        "domains: [acme.ops]}\n"
    )
    (root / "configs/pipelines/softsign.yaml").write_text(
        "pipeline: softsign\ndata:\n  test: {file: rows.npz, inputs: {x: "
        "x}}\nmodel: softsign.onnx\n"
        "export: {framework: onnx}\nbenchmark: {targets: [acme]}\ngates: [{kind: parity}]\n"
    )
    found = lab.result(lab.ask(pipeline="configs/pipelines/softsign.yaml", environ=PLACED))
    assert found["choices"][0]["verdict"] == "pass"
    assert "softsign/benchmark/fp32@acme" in {run["name"] for run in lab.runs()}
    search = (
        "quantize=[{name: best, method: auto, tuning_data: {data: train, samples: 50}, "
        "budget: {max_minutes: 1}}]"
    )
    found = lab.result(lab.ask(search, until="quantize", environ=PLACED))
    assert {run["name"] for run in lab.runs("search/best")} == {"lab/search/best"}
    assert next(o["status"] for o in found["outcomes"] if o["stage"] == "search/best") == "done"
