"""The pipeline by Prefect: a real server and worker.

The deployments of `prefect.yaml` and a schedule that fires are tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.e2e_project import MLP, ONLY_FP32, SECOND, Project
from tests.e2e.prefect_site import PrefectSite, site_of
from tests.support.processes import until

pytestmark = [
    pytest.mark.services,
    pytest.mark.in_order,
    pytest.mark.nightly,
    pytest.mark.usefixtures("first"),
]

VARIANTS = ("fp32", "int8-dynamic")
STATIC = (
    "  - {name: int8-static, method: static, calibrate: {data: train, samples: 256, "
    "method: minmax}}\n"
)


@pytest.fixture(scope="module")
def site(
    released: Project, prefect_api: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrefectSite]:
    """Yield the deployments of a project, and a worker for them.

    The project serves a release of float32 only.
    """
    file = released.root / MLP
    text = file.read_text(encoding="utf-8")
    assert STATIC in text
    file.write_text(text.replace(STATIC, ""), encoding="utf-8")
    with site_of(released, tmp_path_factory.mktemp("prefect"), prefect_api) as made:
        made.call("POST", "/work_pools/", {"name": "local", "type": "process"})
        made.done("deploy", "--all")
        made.started.append(
            made.start("worker", "start", "--pool", "local", "--install-policy", "never")
        )
        yield made


@pytest.fixture(scope="module")
def first(site: PrefectSite) -> dict[str, Any]:
    """Return the first flow run of the pipeline.

    It trains again, and runs the stages of the new variant.
    """
    return site.flow_run("pipeline/digits-mlp", no_cache=["train"])


def test_pipeline_flow_run_completes_and_names_chosen_variant(first: dict[str, Any]) -> None:
    assert (first["name"], first["state_type"]) == ("digits-mlp", "COMPLETED")
    message = first["state"]["message"]
    assert any(f"cpu-1t: {variant} is chosen (" in message for variant in VARIANTS)


def test_pipeline_flow_run_has_task_run_for_each_stage(
    first: dict[str, Any], site: PrefectSite
) -> None:
    judged = {
        f"{stage} {variant} @ cpu-1t" for stage in ("benchmark", "gate") for variant in VARIANTS
    }
    others = {
        "data train",
        "data test",
        "train",
        "export fp32",
        "register",
        "deploy digits @ cpu-1t",
    }
    runs = site.task_runs(first, judged | others)
    upstream = {entry["id"] for entry in runs["gate fp32 @ cpu-1t"]["task_inputs"]["wait_for"]}
    assert upstream == {runs["benchmark fp32 @ cpu-1t"]["id"]}


def test_pipeline_flow_run_publishes_gate_and_choice_tables(
    first: dict[str, Any], site: PrefectSite
) -> None:
    gates = site.table("digits-mlp-gates", first)
    assert {row["variant"] for row in gates} == set(VARIANTS)
    assert all(row["verdict"] for row in gates)
    (choice,) = site.table("digits-mlp-choices", first)
    assert (choice["target"], choice["verdict"]) == ("cpu-1t", "PASS")


def test_scheduled_flow_run_starts_and_completes(first: dict[str, Any], site: PrefectSite) -> None:
    site.done(
        "deployment",
        "schedule",
        "create",
        "pipeline/digits-mlp",
        "--interval",
        "30",
        "--replace",
        "-y",
    )

    def fired() -> dict[str, Any] | None:
        runs = site.ask(
            "/flow_runs/filter", flow_runs={"state": {"type": {"any_": ["COMPLETED", "FAILED"]}}}
        )
        return next((run for run in runs if run["auto_scheduled"]), None)

    run = until(fired, seconds=120, what="a scheduled run")
    site.done("deployment", "schedule", "clear", "pipeline/digits-mlp", "-y")
    site.wait_until_quiet()
    assert (run["name"], run["state_type"]) == ("digits-mlp", "COMPLETED")
    assert "nothing changed" in run["state"]["message"]


def test_flow_run_with_failed_gate_fails_with_its_task_run(
    first: dict[str, Any], site: PrefectSite
) -> None:
    run = site.flow_run("pipeline/digits-mlp", ends="FAILED", overrides=["gates[5].max=1 kB"])
    assert run["state_name"] == "GateFailed"
    assert "size" in run["state"]["message"]
    runs = site.task_runs(run, {"train", "gate fp32 @ cpu-1t", "deploy digits @ cpu-1t"})
    assert runs["train"]["state_name"] == "Cached"
    assert runs["gate fp32 @ cpu-1t"]["state_name"] == "GateFailed"
    assert runs["gate fp32 @ cpu-1t"]["state"]["message"].startswith("fp32 @ cpu-1t: size: ")
    assert runs["deploy digits @ cpu-1t"]["state_name"] == "Skipped"


def test_rollback_flow_run_serves_previous_version_and_is_recorded_in_ledger(
    first: dict[str, Any], site: PrefectSite
) -> None:
    before = site.project.status()
    site.project.run(ONLY_FP32, SECOND)
    between = site.project.status()
    assert between["roles"]["stable"]["version"] != before["roles"]["stable"]["version"]
    run = site.flow_run("rollback/rollback", endpoints=["digits"], reason="it was slow")
    after = site.project.status()
    assert after["roles"]["stable"]["version"] == before["roles"]["stable"]["version"]
    assert "100 % of traffic" in run["state"]["message"]
    assert "Reason: it was slow" in run["state"]["message"]
    actors = {line["actor"] for line in site.project.document("history", "digits")}
    assert f"tester via prefect flow run {run['id']}" in actors


def test_reconcile_flow_run_reports_endpoint_in_message_and_task_run(
    first: dict[str, Any], site: PrefectSite
) -> None:
    run = site.flow_run("reconcile/reconcile")
    assert run["state"]["message"].startswith("digits: ")
    assert site.task_runs(run, {"reconcile digits"}).keys() == {"reconcile digits"}
