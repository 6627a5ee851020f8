"""One release measured on two machines: here, and by the worker of a pool, which is killed at work."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.e2e.e2e_project import ONLY_FP32, Project
from tests.e2e.prefect_site import PrefectSite, site_of
from tests.support.processes import until

pytestmark = [pytest.mark.services, pytest.mark.in_order, pytest.mark.nightly]

POOL = "board-a"
NOWHERE = "board-b"
"""A target whose pool does not exist."""

LIMITS = "gates=[{kind: parity}, {kind: metric, name: accuracy, min: 90%}]"
"""Tests share their machine with each other: latency is measured, and not judged."""

TARGET = """
name: {name}
description: A machine of the pool {name}.
pool: {pool}
session: {{intra_op_threads: 2}}
requires: {{cores: 1}}
"""


@pytest.fixture(scope="module")
def site(released: Project, prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectSite]:
    """A project whose release is measured on this machine's target, and a worker of the pool of another one."""
    for name, pool in ((POOL, POOL), (NOWHERE, "nobody")):
        path = released.root / "configs" / "targets" / f"{name}.yaml"
        path.write_text(TARGET.format(name=name, pool=pool), encoding="utf-8")
    with site_of(released, tmp_path_factory.mktemp("prefect"), prefect_api) as made:
        made.call("POST", "/work_pools/", {"name": POOL, "type": "process"})
        flow = ("flows/measure.py:measure", "--name", POOL, "--pool", POOL)
        made.done("deploy", *flow, "--job-variable", '{"stream_output": false}')
        worker = ("worker", "start", "--pool", POOL, "--install-policy", "never")
        made.started.append(made.start(*worker, before=("env", "OMP_NUM_THREADS=2", "taskset", "-c", "0")))
        yield made


def run(site: PrefectSite, *overrides: str, code: int = 0) -> Any:
    return site.project.process(*command(*overrides), "--json", environ=site.client).parsed(code)


def command(*overrides: str) -> list[str]:
    sets = [part for override in (ONLY_FP32, "deploy=[]", *overrides) for part in ("--set", override)]
    return ["run", "configs/pipelines/digits-mlp.yaml", "--until", "gate", *sets]


def test_each_target_is_measured_on_its_machine_and_judged_by_what_was_found_there(site: PrefectSite) -> None:
    found = run(site, 'benchmark.targets=["cpu-1t", "board-a"]')
    assert {choice["target"]: choice["verdict"] for choice in found["choices"]} == dict.fromkeys(
        ("cpu-1t", POOL), "pass"
    )
    again = run(site, 'benchmark.targets=["cpu-1t", "board-a"]')
    assert {outcome["status"] for outcome in again["outcomes"]} == {"cached"}


def test_one_run_measures_and_chooses_for_every_kind_of_target(site: PrefectSite) -> None:
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
    assert registry.aliases("digits-cnn") == {f"champion-{target}": versions[chosen[target]] for target in targets}
    version = registry.version("digits-cnn", versions["fp32"])
    assert registry.document(version, "packages/mobile-ort/model.ort")[4:8] == b"ORTM"


def test_a_worker_killed_at_work_is_replaced_by_the_next(site: PrefectSite) -> None:
    arguments = [*command('benchmark.targets=["board-a"]'), "--no-cache", "benchmark"]
    begun = site.project.start(*arguments, environ=site.client)
    victim = until(lambda: at_work(site), seconds=120, what="a flow run that measures")
    os.killpg(os.getpgid(victim), signal.SIGKILL)
    _, errors = begun.communicate(timeout=400)
    assert begun.returncode == 0, errors
    states = [run["state_type"] for run in site.ask("/flow_runs/filter", flows={"name": {"any_": ["measure"]}})]
    assert states.count("CRASHED") == 1


def at_work(site: PrefectSite) -> int | None:
    """The flow run's process that has a benchmark done: the parent of the stage's own."""
    for process in psutil.process_iter(["cmdline"]):
        try:
            if "onnx_ops.app.worker" in (process.info["cmdline"] or []):
                ours = process.environ().get("ONNX_OPS_ROOT") == str(site.project.root)
                parent = process.parent()
                if ours and parent is not None and "prefect" in " ".join(parent.cmdline()):
                    return int(parent.pid)
        except psutil.Error:  # it has ended meanwhile
            continue
    return None


def test_a_machine_that_does_not_fit_is_no_failed_model(site: PrefectSite) -> None:
    path = site.project.root / "configs" / "targets" / "board-a.yaml"
    path.write_text(path.read_text().replace("cores: 1", "cores: 1000"), encoding="utf-8")
    found = run(site, 'benchmark.targets=["cpu-1t", "board-a"]', code=4)
    verdicts = {choice["target"]: choice["verdict"] for choice in found["choices"]}
    assert verdicts == {"cpu-1t": "pass", "board-a": "error"}
    error = found["errors"]["benchmark/fp32@board-a"]
    assert (error["error"], error["where"]) == ("MeasurementError", "target board-a")
    assert "of 1000 cores" in error["what"]


def test_a_pool_that_is_not_there_says_how_to_make_it(site: PrefectSite) -> None:
    done = site.project.process(*command('benchmark.targets=["board-b"]'), environ=site.client)
    assert "no deployment is called measure/nobody" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
