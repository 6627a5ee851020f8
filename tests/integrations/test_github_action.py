"""The action's script as the workflow calls it.

Repository and pipeline are real; a server stands for GitHub.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from onnx_ops import codec
from onnx_ops.app.affected import changed_since
from onnx_ops.domain.decision import Decision, GateResult, Verdict
from onnx_ops.domain.release import Choice
from onnx_ops.errors import UserError
from onnx_ops.integrations.commits import RESULTS
from onnx_ops.integrations.github_action import MARK, main, read_event
from onnx_ops.reporting.pull_request import Checked
from onnx_ops.testing.notifiers import ReceivedRequest, Reply, WebhookSink
from tests.integrations.commit_parts import pipeline_text
from tests.support.git import commit_all

ROOT = Path(__file__).parents[2]
TOKEN = "ghs_0123456789"  # noqa: S105 (of no account)
TRAIN = "code.model:train"
RELEASED = """
register: {model: iris, promote: auto}
deploy: {endpoint: iris, provider: local, target: cpu-1t}
"""
MODEL = """
from sklearn.linear_model import LogisticRegression
from .{module} import ROUNDS

def train(data):
    from sklearn.datasets import load_iris
    x, y = load_iris(return_X_y=True)
    return LogisticRegression(max_iter=ROUNDS).fit(x, y)
"""


@dataclass
class GitHub:
    """Checks and comments of one repository, as far as the action uses them."""

    comments: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    read_only: bool = False

    def __call__(self, letter: ReceivedRequest) -> Reply:
        assert letter.headers["authorization"] == f"Bearer {TOKEN}"
        if self.read_only and letter.method != "GET":
            return Reply(status=403, document={"message": "Resource not accessible by integration"})
        path = letter.path.partition("?")[0].removeprefix("/repos/acme/models/")
        match letter.method, path.split("/"):
            case "GET", ["issues", "7", "comments"]:
                return Reply(document=self.comments)
            case "POST", ["issues", "7", "comments"]:
                made = {"id": len(self.comments) + 1, "user": {"type": "Bot"}, **letter.document}
                self.comments.append(made)
                return Reply(status=201, document=made)
            case "PATCH", ["issues", "comments", number]:
                self.comments[int(number) - 1] |= letter.document
                return Reply(document={})
            case "POST", ["check-runs"]:
                self.checks.append(letter.document)
                return Reply(status=201, document={})
            case _:
                return Reply(status=404)


@dataclass
class Runner:
    """A checkout in a job on GitHub."""

    root: Path
    github: GitHub

    def commit(self) -> str:
        return commit_all(self.root)

    def event(self, document: dict[str, Any]) -> None:
        Path(os.environ["GITHUB_EVENT_PATH"]).write_text(json.dumps(document), encoding="utf-8")

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text, encoding="utf-8")

    def propose(self, files: Mapping[str, str]) -> None:
        """Open a pull request against the first commit that writes these files."""
        for name, text in files.items():
            self.write(name, text)
        head, base = {"sha": self.commit()}, {"sha": os.environ["GITHUB_SHA"]}
        self.event({"pull_request": {"number": 7, "head": head, "base": base}})

    def step(self, name: str, *arguments: str, folder: str = "out") -> int:
        return main([name, "--folder", str(self.root.parent / folder), *arguments])

    def judge(self) -> tuple[int, int]:
        """Return the exit codes of both steps of a pull request."""
        return self.step("evaluate"), self.step("publish")

    def release(self) -> tuple[int, int, int]:
        """Return the exit codes of the steps of a push, which are separate jobs."""
        evaluated = self.root.parent / "evaluated"
        codes = (
            self.step("evaluate", folder="evaluated"),
            self.step("release", "--evaluated", str(evaluated)),
        )
        return *codes, self.step("publish")

    def results(self) -> tuple[Checked, ...]:
        return codec.loads((self.root.parent / "out" / RESULTS).read_bytes(), tuple[Checked, ...])

    def summary(self) -> str:
        return (self.root.parent / "summary").read_text(encoding="utf-8")


@pytest.fixture
def runner(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    root = tmp_path / "checkout"
    github = GitHub()
    with WebhookSink(github).open() as inbox:
        made = Runner(root, github)
        made.write("configs/pipelines/iris.yaml", pipeline_text(TRAIN))
        made.write(
            "configs/targets/cpu-1t.yaml",
            (ROOT / "configs/targets/cpu-1t.yaml").read_text(encoding="utf-8"),
        )
        made.write("code/__init__.py", "")
        made.write("code/model.py", MODEL.format(module="rounds"))
        made.write("code/rounds.py", "ROUNDS = 200\n")
        made.write("onnx-ops.toml", f"store = '{store}'\n")
        made.write(".gitignore", ".onnx-ops/\n__pycache__/\n")
        environ = {
            "GITHUB_API_URL": inbox.url,
            "GITHUB_TOKEN": TOKEN,
            "GITHUB_REPOSITORY": "acme/models",
            "GITHUB_EVENT_PATH": str(tmp_path / "event.json"),
            "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
            "GITHUB_OUTPUT": str(tmp_path / "output"),
            "ONNX_OPS_SIGNING": "off",
        }
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(root)
        monkeypatch.setenv("GITHUB_SHA", made.commit())
        yield made


@pytest.mark.parametrize(
    "arguments", [["release"], ["evaluate", "--evaluated", "x"], ["publish", "--evaluated", "x"]]
)
def test_action_with_missing_or_unexpected_evaluated_option_exits_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main([*arguments, "--folder", "out"])
    assert refused.value.code == 2
    assert "`release` requires --evaluated" in capsys.readouterr().err


def test_action_for_changed_pipeline_code_judges_it_and_keeps_one_comment(runner: Runner) -> None:
    runner.propose({"code/rounds.py": "ROUNDS = 300\n"})
    assert runner.judge() == (0, 0)
    (check,) = runner.github.checks
    assert (check["conclusion"], check["output"]["title"]) == ("success", "1 passed")
    assert (
        (runner.root.parent / "out" / "iris.html")
        .read_text(encoding="utf-8")
        .startswith("<!doctype html>")
    )
    runner.propose({"configs/pipelines/iris.yaml": pipeline_text(TRAIN, "1 B")})
    assert runner.judge() == (0, 1)
    assert runner.github.checks[1]["conclusion"] == "failure"
    (comment,) = runner.github.comments
    assert comment["body"].startswith(MARK)
    assert "iris.yaml: FAIL" in comment["body"]
    assert comment["body"].removeprefix(f"{MARK}\n") in runner.summary()
    assert Path(os.environ["GITHUB_OUTPUT"]).read_text().splitlines() == [
        "verdict=pass",
        "verdict=fail",
    ]


def test_action_for_unrelated_change_posts_skipped_check_and_no_comment(runner: Runner) -> None:
    runner.propose({"README.md": "words"})
    assert runner.judge() == (0, 0)
    assert [check["conclusion"] for check in runner.github.checks] == ["skipped"]
    assert runner.github.comments == []


def test_action_with_missing_execution_provider_reports_action_required(runner: Runner) -> None:
    target = (runner.root / "configs/targets/cpu-1t.yaml").read_text(encoding="utf-8")
    runner.propose(
        {
            "configs/targets/cpu-1t.yaml": target.replace("CPUExecution", "CUDAExecution"),
            "code/rounds.py": "ROUNDS = 300\n",
        }
    )
    assert runner.judge() == (0, 1)
    (check,) = runner.github.checks
    assert (check["conclusion"], check["output"]["title"]) == (
        "action_required",
        "1 could not be measured",
    )
    assert "CUDAExecutionProvider" in check["output"]["summary"]


def test_evaluate_with_invalid_pipeline_file_reports_its_location(runner: Runner) -> None:
    runner.propose({"configs/pipelines/iris.yaml": "pipelin: iris\n"})
    assert runner.step("evaluate") == 0
    (one,) = runner.results()
    assert (one.verdict, "iris.yaml:1:1" in one.error) == (Verdict.ERROR, True)


def test_publish_of_inconclusive_result_is_neutral_and_keeps_user_comments(runner: Runner) -> None:
    runner.propose({})
    unsure = Checked(file="configs/pipelines/iris.yaml", because=(), verdict=Verdict.INCONCLUSIVE)
    (runner.root.parent / "out").mkdir()
    (runner.root.parent / "out" / RESULTS).write_bytes(codec.dumps((unsure,)))
    quoted = {"id": 1, "user": {"type": "User"}, "body": f"{MARK} what does this say?"}
    runner.github.comments.append(dict(quoted))
    runner.step("publish")
    (check,) = runner.github.checks
    assert check["conclusion"] == "neutral"
    assert [comment["user"]["type"] for comment in runner.github.comments] == ["User", "Bot"]
    assert runner.github.comments[0] == quoted


def test_action_with_read_only_token_writes_summary_and_warning(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.github.read_only = True
    runner.propose({"code/rounds.py": "ROUNDS = 300\n"})
    assert runner.judge() == (0, 0)
    assert "comment could not" in runner.summary()
    assert "::warning title=onnx-ops::The check could not" in capsys.readouterr().out
    assert TOKEN not in runner.summary()


def test_action_for_push_reports_check_of_pushed_commit(runner: Runner) -> None:
    before = os.environ["GITHUB_SHA"]
    runner.write("README.md", "words")
    os.environ["GITHUB_SHA"] = runner.commit()
    runner.event({"before": before, "head_commit": {"message": "@everyone `${{ }}`"}})
    assert runner.judge() == (0, 0)
    assert runner.github.checks[0]["head_sha"] == os.environ["GITHUB_SHA"]


def test_pull_request_is_compared_with_recorded_metrics_of_base(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = str(tmp_path / "metrics")
    commit = os.environ["GITHUB_SHA"]
    runner.event({"before": "0" * 40})
    assert runner.step("evaluate", "--record", "--metrics", metrics) == 0
    assert (tmp_path / "metrics" / commit / "iris" / "choices.json").is_file()
    assert [path for path in (tmp_path / "out").iterdir() if path.is_dir()] == []
    # The job of a pull request shares neither store nor state with that of the base branch.
    monkeypatch.setenv("ONNX_OPS_STORE", str(tmp_path / "other"))
    monkeypatch.setenv("ONNX_OPS_STATE", str(tmp_path / "state"))
    runner.propose({"code/rounds.py": "ROUNDS = 300\n"})
    assert runner.step("evaluate", "--metrics", metrics) == 0
    assert runner.step("publish") == 0
    assert commit[:7] in runner.summary()
    assert [path.name for path in (tmp_path / "metrics").iterdir()] == [commit]


@pytest.mark.parametrize("before", ["0" * 40, "f" * 40], ids=["first push", "force push"])
def test_action_for_push_without_known_previous_commit_evaluates_unchanged_pipeline(
    runner: Runner, before: str
) -> None:
    runner.event({"before": before})
    assert runner.step("evaluate") == 0
    assert [one.file for one in runner.results()] == ["configs/pipelines/iris.yaml"]


@pytest.mark.parametrize(
    "environment", ["github-hosted", pytest.param("self-hosted", marks=pytest.mark.nightly)]
)
def test_action_for_release_with_registry_on_disk_of_runner_stops_at_gates(
    runner: Runner,
    environment: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("RUNNER_ENVIRONMENT", environment)
    monkeypatch.delenv("ONNX_OPS_SIGNING")
    runner.write("configs/pipelines/iris.yaml", f"{pipeline_text(TRAIN)}{RELEASED}")
    runner.event({"before": os.environ["GITHUB_SHA"]})
    os.environ["GITHUB_SHA"] = runner.commit()
    assert runner.release() == (0, 0, 0)
    (one,) = runner.results()
    assert (one.verdict, bool(one.choices), bool(one.withheld)) == (Verdict.PASS, True, True)
    assert one.withheld.splitlines()[0] in capsys.readouterr().out
    assert "Nothing was registered or released" in runner.summary()
    state = runner.root / ".onnx-ops"
    assert not {path.name for path in state.iterdir()} & {"ledger", "endpoints", "mlartifacts"}
    # The action has queried the registry for the champion.
    if (state / "mlflow.db").exists():
        with contextlib.closing(sqlite3.connect(state / "mlflow.db")) as database:
            assert database.execute("SELECT count(*) FROM model_versions").fetchone() == (0,)


def test_action_without_token_writes_summary_and_warnings(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.propose({})
    monkeypatch.setenv("GITHUB_TOKEN", "")
    assert runner.judge() == (0, 0)
    output = capsys.readouterr().out
    for what in ("check", "comment"):
        assert (
            f"::warning title=onnx-ops::The {what} could not be written: GITHUB_TOKEN: "
            "no token was given" in output
        )
    assert "no pipeline is affected" in runner.summary()


@pytest.mark.parametrize(
    "document", [{"before": "--output=/etc/passwd"}, {"before": "main; rm -rf /"}]
)
def test_read_event_with_invalid_commit_raises_user_error(
    runner: Runner, document: dict[str, Any]
) -> None:
    runner.event(document)
    with pytest.raises(UserError, match="is not a commit"):
        read_event(os.environ)


@pytest.mark.parametrize("document", [{"before": "0" * 40}, {"inputs": {}}])
def test_read_event_without_previous_commit_returns_empty_base(
    runner: Runner, document: dict[str, Any]
) -> None:
    runner.event(document)
    assert read_event(os.environ).base == ""


def test_changed_since_of_unknown_commit_or_without_repository_raises_user_error(
    tmp_path: Path, runner: Runner
) -> None:
    with pytest.raises(UserError, match="cannot open a repository"):
        changed_since(tmp_path, "main")
    with pytest.raises(UserError, match="found no commit 'nope'"):
        changed_since(runner.root, "nope")


def test_evaluate_prints_its_output_between_stop_commands(
    runner: Runner, capfd: pytest.CaptureFixture[str]
) -> None:
    runner.propose({"code/rounds.py": "ROUNDS = 300\nprint('::add-path::/tmp/evil')\n"})
    assert runner.step("evaluate") == 0
    first, *lines, last = capfd.readouterr().out.splitlines()
    word = first.removeprefix("::stop-commands::")
    assert re.fullmatch("[0-9a-f]{32}", word)
    assert last == f"::{word}::"
    assert lines[-1] == "1 passed"
    assert word not in "".join(lines)


def test_publish_without_results_reports_error(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.event({"before": "0" * 40})
    assert runner.step("publish") == 1
    assert "::error title=onnx-ops::" in capsys.readouterr().out
    assert "## onnx-ops: the commit has no valid results" in runner.summary()
    assert [check["conclusion"] for check in runner.github.checks] == ["action_required"]


@pytest.mark.parametrize(("step", "verb"), [("evaluate", "judged"), ("release", "released")])
def test_failed_step_names_itself_in_summary(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, step: str, verb: str
) -> None:
    monkeypatch.delenv("GITHUB_EVENT_PATH", raising=False)
    folders = ["--evaluated", "evaluated"] if step == "release" else []
    assert runner.step(step, *folders) == 2
    assert f"## onnx-ops: the commit could not be {verb}\n" in runner.summary()


def _passed(**changes: Any) -> dict[str, Any]:
    """Return the JSON of one pipeline whose only variant passed."""
    result = GateResult(
        gate="size", metric="size", limit="≤ 1 MB", verdict=Verdict.PASS, reason="small"
    )
    decision = Decision(variant="fp32", target="cpu-1t", results=(result,))
    choice = Choice(target="cpu-1t", variant="fp32", verdict=Verdict.PASS, reason="the only one")
    one = Checked(
        file="p.yaml", because=(), verdict=Verdict.PASS, choices=(choice,), decisions=(decision,)
    )
    return {**codec.to_json(one), **changes}


FORGED: dict[str, bytes] = {
    "empty": b"",
    "another type": b"{}",
    "an unknown key": json.dumps([_passed(check="success")]).encode(),
    "deep": b"[" * 100_000,
    "deep in a value": b'[{"choices": ' + b"[" * 50_000 + b"]" * 50_000 + b"}]",
    "too large": b" " * (16 << 20) + b"[]",
    "a number of a million digits": b"[" + b"9" * 1_000_000 + b"]",
    "not UTF-8": b'["\xff"]',
    "not a number": json.dumps([_passed(decisions=[{"latency_ratio": float("nan")}])]).encode(),
    "an unknown verdict": json.dumps([_passed(verdict="passed")]).encode(),
    "a pass without a choice": json.dumps([_passed(choices=[])]).encode(),
    "a pass without a decision": json.dumps([_passed(decisions=[])]).encode(),
    "a pass of another variant": json.dumps(
        [_passed(decisions=[{**_passed()["decisions"][0], "variant": "int8"}])]
    ).encode(),
    "a pass beside a choice that failed": json.dumps(
        [_passed(choices=[{**_passed()["choices"][0], "verdict": "fail"}])]
    ).encode(),
}


@pytest.mark.parametrize("forged", FORGED)
def test_publish_of_malformed_or_forged_results_reports_action_required(
    runner: Runner, forged: str
) -> None:
    runner.propose({})
    (runner.root.parent / "out").mkdir()
    (runner.root.parent / "out" / RESULTS).write_bytes(FORGED[forged])
    assert runner.step("publish") == 1
    assert [check["conclusion"] for check in runner.github.checks] == ["action_required"]
    assert len(runner.github.comments[0]["body"]) < 10_000


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "link in a loop"])
def test_publish_of_results_other_than_plain_file_reports_action_required(
    runner: Runner, kind: str
) -> None:
    runner.propose({})
    place, secret = runner.root.parent / "out" / RESULTS, runner.root.parent / "secret"
    place.parent.mkdir()
    secret.write_text(json.dumps([_passed()]))
    match kind:
        case "link":
            place.symlink_to(secret)
        case "folder":
            place.mkdir()
        case "pipe":
            os.mkfifo(place)
        case _:
            place.symlink_to(place)
    assert runner.step("publish") == 1
    assert [check["conclusion"] for check in runner.github.checks] == ["action_required"]


def test_publish_of_hostile_results_uses_own_event_and_escapes_text(runner: Runner) -> None:
    runner.propose({})
    head = json.loads(Path(os.environ["GITHUB_EVENT_PATH"]).read_text())["pull_request"]["head"][
        "sha"
    ]
    (runner.root.parent / "out").mkdir()
    text = (
        "](https://evil.example) <img src=x> @admin `${{ secrets.KEY }}` "
        "::error::x\r\n::add-mask::y\x1b[2J"
    )
    forged = _passed(
        file=f"{text}.yaml",
        made_by=text * 10_000,
        because=[text] * 50,
        error="",
        withheld=text * 20_000,
    )
    (runner.root.parent / "out" / RESULTS).write_bytes(json.dumps([forged]).encode())
    assert runner.step("publish") == 0
    (check,), (comment,) = runner.github.checks, runner.github.comments
    assert check["head_sha"] == head
    assert len(comment["body"]) < 65_536
    assert "The code of this pull request" in comment["body"]
    assert not re.search(r"(?<!\\)\]\(https://evil|<img|@admin|(?<!\\)`|[\x1b\r]", comment["body"])


def test_action_steps_run_script_and_write_results(runner: Runner, tmp_path: Path) -> None:
    """The shell that the composite action names runs the action's own lines."""
    action = yaml.safe_load(
        (ROOT / ".github/actions/onnx-ops/action.yml").read_text(encoding="utf-8")
    )
    steps = [step["run"] for step in action["runs"]["steps"] if "run" in step]
    runner.event({"before": "0" * 40})
    runner.commit()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "METRICS": str(tmp_path / "metrics"), "SINCE": "", "PATH": path}
    for folder, step in zip(("evaluated", "out"), steps, strict=True):
        own = {
            **environ,
            "FOLDER": str(tmp_path / folder),
            "EVALUATED": str(tmp_path / "evaluated"),
        }
        done = subprocess.run(["bash", "-ec", step], env=own, check=False)
        assert done.returncode == 0
        assert (tmp_path / folder / RESULTS).is_file()
    assert not runner.github.checks
