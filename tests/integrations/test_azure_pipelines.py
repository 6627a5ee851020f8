"""The steps of the Azure Pipelines example as an agent runs them: a real repository, a real pipeline, and its words."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from onnx_ops import codec
from onnx_ops.domain.decision import Verdict
from onnx_ops.errors import UserError
from onnx_ops.integrations import azure_pipelines
from onnx_ops.integrations.commits import RESULTS
from onnx_ops.reporting.pull_request import Checked
from tests.infra.infra_tools import steps
from tests.integrations.commit_parts import pipeline_text
from tests.support.git import commit_all, git

ROOT = Path(__file__).parents[2]
FILE = ROOT / "infra" / "azure" / "azure-pipelines.yml"
TRAIN = "azure_model:train"
MODEL = """
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

def train(data):
    return LogisticRegression(max_iter=200).fit(*load_iris(return_X_y=True))
"""


@pytest.fixture
def checkout(tmp_path: Path, store: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "configs" / "pipelines").mkdir(parents=True)
    (root / "configs" / "targets").mkdir()
    (root / "configs" / "pipelines" / "iris.yaml").write_text(pipeline_text(TRAIN))
    (root / "configs" / "targets" / "cpu-1t.yaml").write_text("name: cpu-1t\n")
    (root / "azure_model.py").write_text(MODEL)
    (root / "onnx-ops.toml").write_text(f"store = '{store}'\n")
    (root / ".gitignore").write_text(".onnx-ops/\n__pycache__/\n")
    commit_all(root)
    git(root, "update-ref", "refs/remotes/origin/main", "HEAD")
    return root


def document() -> dict[str, Any]:
    """The file. YAML 1.1 reads nothing in it as a truth value."""
    found: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return found


def agent(checkout: Path, **environ: str) -> list[tuple[int, str]]:
    """Run our own scripts of the first job, as an agent does: variables in capitals, bash; until one fails."""
    ended = []
    for step in steps(document()["jobs"][0]):
        if "onnx_ops.integrations" in step.get("script", ""):
            own = {name: str(value) for name, value in step.get("env", {}).items()}
            path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
            given = {"PATH": path, "PYTHONPATH": str(ROOT), "REPORTS": str(checkout.parent / "out"), **environ, **own}
            done = subprocess.run(
                ["bash", "-e", "-c", step["script"]],
                cwd=checkout,
                env=given,
                capture_output=True,
                text=True,
                check=False,
                timeout=300,
            )
            ended.append((done.returncode, done.stdout + done.stderr))
            if done.returncode:
                break
    return ended


@pytest.mark.nightly
@pytest.mark.parametrize(("size", "code", "verdict"), [("1 MB", 0, "pass"), ("1 B", 1, "fail")])
def test_a_pull_request_is_judged(checkout: Path, size: str, code: int, verdict: str) -> None:
    (checkout / "configs" / "pipelines" / "iris.yaml").write_text(pipeline_text(TRAIN, size) + "description: new\n")
    head = commit_all(checkout)
    (ran, earlier_output), (ended, output) = agent(
        checkout,
        BUILD_REASON="PullRequest",
        BUILD_SOURCEVERSION=head,
        SYSTEM_PULLREQUEST_TARGETBRANCH="refs/heads/main",
    )
    assert ran == 0, earlier_output
    assert f"{verdict.upper()} configs/pipelines/iris.yaml" in earlier_output
    assert ended == code, output
    out = checkout.parent / "out"
    assert f"##vso[task.uploadsummary]{out / azure_pipelines.PAGE}" in output
    assert f"##vso[task.setvariable variable=verdict;isOutput=true]{verdict}" in output
    assert "iris" in (out / azure_pipelines.PAGE).read_text()
    assert (out / "iris.html").is_file()
    assert not (checkout / ".onnx-ops" / "keys").exists(), "no key was made for it"


def test_a_change_that_touches_nothing_says_so(checkout: Path) -> None:
    (checkout / "notes.txt").write_text("nothing")
    ran, ended = agent(checkout, BUILD_REASON="IndividualCI", BUILD_SOURCEVERSION=commit_all(checkout))
    assert "no pipeline is affected" in ran[1]
    assert ended[0] == 0
    assert "isOutput=true]none" in ended[1]


def published(folder: Path, verdict: Verdict, capsys: pytest.CaptureFixture[str], error: str = "") -> tuple[int, str]:
    checked = Checked(file="a.yaml", because=("a.yaml",), verdict=verdict, error=error)
    (folder / RESULTS).write_bytes(codec.dumps([checked]))
    code = azure_pipelines.publish(folder, {"BUILD_SOURCEVERSION": "a" * 40})
    return code, capsys.readouterr().out


def test_inconclusive_ends_with_issues_and_does_not_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = published(tmp_path, Verdict.INCONCLUSIVE, capsys)
    assert code == 0
    assert "##vso[task.complete result=SucceededWithIssues;]1 inconclusive" in output
    assert published(tmp_path, Verdict.ERROR, capsys)[0] == 1
    assert "task.complete" not in published(tmp_path, Verdict.PASS, capsys)[1]


def test_what_people_write_is_no_command_of_the_agent(capsys: pytest.CaptureFixture[str]) -> None:
    azure_pipelines._print_line("FAIL ##vso[task.setvariable variable=PATH]/tmp")
    azure_pipelines._command("task.logissue type=error", "one\n##vso[task.complete]")
    output = capsys.readouterr().out.splitlines()
    assert len(output) == 2
    assert "##vso" not in output[0]
    assert output[1].startswith("##vso[task.logissue type=error]one%0A")


@pytest.mark.parametrize(
    "branch", ["main", "refs/heads/", "refs/heads/-x", "refs/heads/a b", "refs/heads/../x", "refs/heads/é"]
)
def test_a_branch_that_is_none_is_refused(branch: str) -> None:
    with pytest.raises(UserError, match="is not a branch"):
        azure_pipelines.base_of({"SYSTEM_PULLREQUEST_TARGETBRANCH": branch})


def test_what_a_build_is_compared_with() -> None:
    assert (
        azure_pipelines.base_of({"SYSTEM_PULLREQUEST_TARGETBRANCH": "refs/heads/release/1.2"}) == "origin/release/1.2"
    )
    assert azure_pipelines.base_of({}) == "HEAD~1"


def test_out_of_a_build_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("BUILD_SOURCEVERSION", raising=False)
    assert azure_pipelines.main(["publish", "--folder", str(tmp_path)]) == 2
    assert "is not a commit" in capsys.readouterr().out


def test_code_of_a_pull_request_gets_no_credentials_and_none_of_it_is_a_script() -> None:
    judge, release = document()["jobs"]
    assert judge["condition"] == "eq(variables['Build.Reason'], 'PullRequest')"
    assert release["condition"] == "ne(variables['Build.Reason'], 'PullRequest')"
    assert release["environment"] == "production"
    (ran,) = [step for step in steps(judge) if "azure_pipelines run" in step.get("script", "")]
    assert ran["env"] == {"ONNX_OPS_SIGNING": "off"}
    assert ran["target"] == {"commands": "restricted"}
    assert not [step for step in steps(judge) if step.get("task", "").startswith("Azure")]
    for step in steps(document()):
        script = step.get("script", "") + step.get("inputs", {}).get("inlineScript", "")
        assert not re.search(r"\$\(|\$\{\{", script), "nothing is pasted into a script"
        if "checkout" in step:
            assert (step["fetchDepth"], step["persistCredentials"]) == ("0", "false")


def test_both_jobs_take_the_same_steps_as_the_action_of_github() -> None:
    for job in document()["jobs"]:
        kinds = [
            match.group(1)
            for step in steps(job)
            if (match := re.search(r"azure_pipelines (\w+)|$", step.get("script", "") or str(step.get("inputs", ""))))
            and match.group(1)
        ]
        assert list(dict.fromkeys(kinds)) == ["run", "publish"]
        order = [next(iter(step)) for step in steps(job)]
        assert order.index("publish") < len(order) - 1, "the reports are kept before the verdict may end the job"
    action = (ROOT / ".github" / "actions" / "onnx-ops" / "action.yml").read_text(encoding="utf-8")
    assert action.index("github_action run") < action.index("upload-artifact") < action.index("github_action publish")
