"""The jobs of the workflows that the clouds' roles trust.

Trust depends on the claims of the tokens that GitHub gives those jobs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from onnx_ops.app.scaffold import scaffold
from tests.infra.infra_tools import INFRA, ROOT, tool
from tests.support.clouds.iam import REPOSITORY, may_assume

WORKFLOWS = ROOT / ".github" / "workflows"
AUDIENCE = {
    "aws-actions/configure-aws-credentials": "sts.amazonaws.com",
    "azure/login": "api://AzureADTokenExchange",
}
"""The audience for which an action requests its token."""
READ_ONLY = {"id-token": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job as it runs for an event.

    `audiences` are those of the clouds that it signs in to.
    """

    name: str
    event: str
    environment: str
    has_token: bool
    audiences: tuple[str, ...]

    def claims(self, audience: str, *, repository: str = REPOSITORY) -> dict[str, str]:
        """Return the claims in the job's token."""
        if self.environment:
            context = f"environment:{self.environment}"
        elif self.event == "pull_request":
            context = "pull_request"
        else:
            context = "ref:refs/heads/main"
        return {"sub": f"repo:{repository}:{context}", "aud": audience}


def read(file: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return found


def jobs(folder: Path) -> Iterator[Job]:
    """Yield every job of a folder's workflows, for each event that starts it."""
    for file in sorted(folder.glob("*.yml")):
        workflow = read(file)
        on = workflow[True]  # YAML 1.1 reads the key `on` as a boolean.
        for event in on if isinstance(on, dict) else [on]:
            for name, job in workflow["jobs"].items():
                if _runs(str(job.get("if", "")), event):
                    yield Job(
                        name=f"{file.name}:{name}",
                        event=event,
                        environment=str(job.get("environment", "")),
                        has_token=job.get(
                            "permissions", workflow.get("permissions", READ_ONLY)
                        ).get("id-token")
                        == "write",
                        audiences=tuple(
                            AUDIENCE[action]
                            for step in job["steps"]
                            if (action := str(step.get("uses", "")).partition("@")[0]) in AUDIENCE
                        ),
                    )


def _runs(condition: str, event: str) -> bool:
    """Return whether a job with this condition runs for an event."""
    known = {
        "": True,
        "${{ !cancelled() }}": True,
        "github.event_name == 'pull_request'": event == "pull_request",
        "github.event_name != 'pull_request'": event != "pull_request",
    }
    return known[condition]


@cache
def federated() -> frozenset[tuple[str, str]]:
    """Return the subjects and audiences that the operator's identity trusts.

    The identity is the one in infra/azure.
    """
    from pycep import BicepParser

    text = (INFRA / "azure" / "onnx-ops.bicep").read_text(encoding="utf-8")
    document: Any = BicepParser().parse(text=text)
    values = {name: about.get("default", "") for name, about in document["parameters"].items()}
    values["repository"] = REPOSITORY
    found = set()
    for resource in document["resources"].values():
        if resource["type"].endswith("/federatedIdentityCredentials"):
            about = resource["config"]["properties"]
            subject = re.sub(r"\$\{(\w+)\}", lambda name: str(values[name[1]]), about["subject"])
            found |= {(subject, audience) for audience in about["audiences"]}
    return frozenset(found)


def is_trusted(claims: Mapping[str, str]) -> bool:
    if claims["aud"] == AUDIENCE["azure/login"]:
        return (claims["sub"], claims["aud"]) in federated()
    return may_assume("GitHubRole", claims)


@pytest.fixture(scope="module", params=["ours", "the scaffold's"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "ours":
        return WORKFLOWS
    project = tmp_path_factory.mktemp("scaffold") / "project"
    scaffold(project, "digits", "sklearn")
    return project / ".github" / "workflows"


def test_cloud_roles_trust_jobs_with_cloud_login_except_evaluation(folder: Path) -> None:
    signing = [job for job in jobs(folder) if job.audiences]
    # The evaluation job assumes separate roles of the operator, which can only read.
    evaluation = "model-commit.yml:evaluate"
    released = {"model-commit.yml:release", "promote.yml:promote", "rollback.yml:rollback"}
    assert {job.name for job in signing} == {*released, evaluation}
    for job in signing:
        if job.name == evaluation:
            assert not any(is_trusted(job.claims(audience)) for audience in job.audiences)
            continue
        assert set(job.audiences) == set(AUDIENCE.values()), job
        assert job.has_token, job
        for audience in job.audiences:
            assert is_trusted(job.claims(audience)), job


def test_cloud_roles_trust_no_other_job_or_repository(folder: Path) -> None:
    for job in jobs(folder):
        for audience in AUDIENCE.values():
            assert not is_trusted(job.claims(audience, repository="mallory/models")), job
            if not job.audiences:
                assert not job.has_token, job
                assert not is_trusted(job.claims(audience)), job
    release = next(job for job in jobs(folder) if job.name == "model-commit.yml:release")
    assert not is_trusted(release.claims("https://github.com/acme"))


def test_workflow_jobs_read_no_secret_outside_environment(folder: Path) -> None:
    done = tool("zizmor", "--offline", "--quiet", "--persona=auditor", "--format=json", folder)
    assert [
        found for found in json.loads(done.stdout) if found["ident"] == "secrets-outside-env"
    ] == []
