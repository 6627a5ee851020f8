"""Prefect on PostgreSQL, as in production: the pools of `infra/pools`, and a pipeline run by a worker of one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg2
import pytest

from tests.e2e.e2e_project import ROOT, Project
from tests.e2e.prefect_site import PrefectSite, served
from tests.support.postgres import postgres

pytestmark = pytest.mark.services

POOLS = ROOT / "infra" / "pools"
WRONG = {"job_configuration": {"command": "{{ nothing }}"}, "variables": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    """`postgresql://…`"""
    with postgres() as url:
        yield url.replace("+psycopg2", "")


@pytest.fixture(scope="module")
def site(project: Project, database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectSite]:
    url = database.replace("postgresql://", "postgresql+asyncpg://")
    project.environ["PREFECT_API_DATABASE_CONNECTION_URL"] = url
    with served(project, tmp_path_factory.mktemp("prefect")) as made:
        yield made


def rows(database: str, query: str) -> list[tuple[Any, ...]]:
    connection = psycopg2.connect(database)
    try:
        with connection.cursor() as cursor:
            cursor.execute(query)
            return list(cursor.fetchall())
    finally:
        connection.close()


@pytest.mark.parametrize("kind", ["process", "docker", "kubernetes"])
def test_prefect_takes_the_template_of_each_pool(site: PrefectSite, kind: str) -> None:
    template = POOLS / f"{kind}.json"
    site.done("work-pool", "create", f"of-{kind}", "--type", kind, "--base-job-template", str(template))
    site.done("work-pool", "set-concurrency-limit", f"of-{kind}", "2")
    told = json.loads(site.done("work-pool", "inspect", f"of-{kind}", "--output", "json"))
    assert told["type"] == kind
    assert told["concurrency_limit"] == 2
    assert told["base_job_template"]["job_configuration"] == json.loads(template.read_text())["job_configuration"]


def test_prefect_refuses_a_template_that_names_what_it_has_not(site: PrefectSite, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(WRONG))
    done = site.command("work-pool", "create", "wrong", "--type", "process", "--base-job-template", str(wrong))
    assert done.returncode != 0


def test_a_pipeline_runs_on_a_worker_of_such_a_pool(site: PrefectSite, database: str) -> None:
    site.done("work-pool", "create", "here", "--type", "process", "--base-job-template", str(POOLS / "process.json"))
    site.done("deploy", "flows/pipeline.py:pipeline", "--name", "on-postgres", "--pool", "here")
    worker = site.start("worker", "start", "--pool", "here", "--limit", "1", "--install-policy", "never")
    site.started.append(worker)
    parameters = json.dumps({"file": "configs/pipelines/digits-mlp.yaml", "until": "export"})
    site.done("deployment", "run", "pipeline/on-postgres", "--params", parameters, "--watch")
    run = site.latest("pipeline")
    assert run["state_type"] == "COMPLETED", site.log()
    stored = rows(database, f"SELECT state_type FROM flow_run WHERE id = '{run['id']}'")  # noqa: S608 (our own id)
    assert stored == [("COMPLETED",)]
    expected = set(site.task_runs(run, {"train", "export fp32"}))
    tasks = dict(rows(database, "SELECT name, state_type FROM task_run"))
    assert expected <= set(tasks)
    assert set(tasks.values()) == {"COMPLETED"}
