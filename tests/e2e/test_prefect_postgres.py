"""The pools of `infra/pools`.

At night, a worker of a pool also runs a pipeline, with Prefect on PostgreSQL.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.e2e_project import Project
from tests.e2e.prefect_site import PrefectSite, served, site_of
from tests.support.postgres import postgres
from tests.support.processes import ROOT

pytestmark = pytest.mark.services

POOLS = ROOT / "infra" / "pools"
WRONG = {
    "job_configuration": {"command": "{{ nothing }}"},
    "variables": {"type": "object", "properties": {}},
}


@pytest.fixture(scope="module")
def site(
    project: Project, prefect_api: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrefectSite]:
    with site_of(project, tmp_path_factory.mktemp("prefect"), prefect_api) as made:
        yield made


@pytest.fixture
def database() -> Iterator[str]:
    """Yield the URL of a database, `postgresql://…`."""
    with postgres() as url:
        yield url.replace("+psycopg2", "")


@pytest.fixture
def production(
    project: Project, database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrefectSite]:
    """Yield a site like `site`, whose own server keeps its records in the database."""
    home, url = (
        tmp_path_factory.mktemp("prefect"),
        database.replace("postgresql://", "postgresql+asyncpg://"),
    )
    with (
        served(home, PREFECT_API_DATABASE_CONNECTION_URL=url) as api,
        site_of(project, home, api) as made,
    ):
        yield made


def rows(database: str, query: str) -> list[tuple[Any, ...]]:
    import psycopg2

    connection = psycopg2.connect(database)
    try:
        with connection.cursor() as cursor:
            cursor.execute(query)
            return list(cursor.fetchall())
    finally:
        connection.close()


@pytest.mark.parametrize("kind", ["process", "docker", "kubernetes"])
def test_work_pool_template_is_accepted_by_prefect(site: PrefectSite, kind: str) -> None:
    template = json.loads((POOLS / f"{kind}.json").read_text())
    pool = {
        "name": f"of-{kind}",
        "type": kind,
        "base_job_template": template,
        "concurrency_limit": 2,
    }
    site.call("POST", "/work_pools/", pool)
    created = site.call("GET", f"/work_pools/of-{kind}")
    assert (created["type"], created["concurrency_limit"]) == (kind, 2)
    assert created["base_job_template"]["job_configuration"] == template["job_configuration"]


def test_work_pool_template_with_unknown_variable_returns_422(site: PrefectSite) -> None:
    with site.http() as client:
        answer = client.post(
            "/work_pools/", json={"name": "wrong", "type": "process", "base_job_template": WRONG}
        )
    assert answer.status_code == 422


@pytest.mark.nightly
def test_pipeline_on_process_pool_with_postgres_completes(
    production: PrefectSite, database: str
) -> None:
    site = production
    site.done(
        "work-pool",
        "create",
        "here",
        "--type",
        "process",
        "--base-job-template",
        str(POOLS / "process.json"),
    )
    site.done("deploy", "flows/pipeline.py:pipeline", "--name", "on-postgres", "--pool", "here")
    worker = site.start(
        "worker", "start", "--pool", "here", "--limit", "1", "--install-policy", "never"
    )
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
