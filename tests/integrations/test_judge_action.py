"""The action that wraps `onnx-ops judge`.

Its script runs with a program that records its arguments.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.infra.infra_tools import ROOT

ACTION = ROOT / ".github" / "actions" / "judge" / "action.yml"

PROGRAM = f"""#!{sys.executable}
import json, os, pathlib, sys
options = dict(one[2:].split("=", 1) for one in sys.argv if one.startswith("--") and "=" in one)
pathlib.Path(options["markdown"]).write_text("### table\\n", encoding="utf-8")
pathlib.Path(os.environ["SEEN"]).write_text(json.dumps(sys.argv[1:]), encoding="utf-8")
sys.exit(int(os.environ["CODE"]))
"""


def step() -> dict[str, Any]:
    action = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    (found,) = action["runs"]["steps"]
    return dict(found)


def ran(folder: Path, code: int, **inputs: str) -> tuple[int, list[str], str, str]:
    """Run the action; return exit code, arguments, the step's outputs and the summary."""
    program = folder / "bin" / "onnx-ops"
    program.parent.mkdir()
    program.write_text(PROGRAM, encoding="utf-8")
    program.chmod(0o755)
    action = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    values = {name: str(one.get("default", "")) for name, one in action["inputs"].items()} | inputs
    variables = {
        name: text.replace("${{ inputs.", "").replace(" }}", "")
        if "inputs." in text
        else str(folder / "out")
        for name, text in step()["env"].items()
    }
    environ = {name: values.get(key, key) for name, key in variables.items()}
    places = {
        "SEEN": folder / "seen",
        "GITHUB_OUTPUT": folder / "output",
        "GITHUB_STEP_SUMMARY": folder / "summary",
    }
    environ |= {name: str(path) for name, path in places.items()}
    environ |= {"CODE": str(code), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    script = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step()["run"]]
    done = subprocess.run(script, env=environ, cwd=folder, timeout=30, check=False)
    texts = [path.read_text(encoding="utf-8") for path in places.values()]
    return done.returncode, json.loads(texts[0]), texts[1], texts[2]


@pytest.mark.parametrize(
    ("code", "verdict"), [(0, "pass"), (1, "fail"), (2, "error"), (3, "inconclusive"), (4, "error")]
)
def test_judge_action_writes_verdict_as_output_and_table_as_summary(
    tmp_path: Path, code: int, verdict: str
) -> None:
    done, arguments, output, summary = ran(tmp_path, code, baseline="a.onnx", candidate="b.onnx")
    assert (done, output, summary) == (code, f"verdict={verdict}\n", "### table\n")
    assert arguments[-3:] == ["--", "a.onnx", "b.onnx"]
    assert not any(one.startswith(("--data", "--labels", "--target")) for one in arguments)


def test_judge_action_with_allow_inconclusive_succeeds(tmp_path: Path) -> None:
    given = {"baseline": "a.onnx", "candidate": "b.onnx", "allow-inconclusive": "true"}
    assert ran(tmp_path, 3, **given)[0] == 0


def test_judge_action_with_hostile_inputs_passes_them_as_arguments(tmp_path: Path) -> None:
    hostile = {
        "baseline": "--help",
        "candidate": "$(touch broken); b.onnx",
        "data": "rows of mine.npz",
        "labels": "`touch broken`",
        "targets": "cpu-1t\ncpu-all\n",
    }
    done, arguments, _, _ = ran(tmp_path, 0, **hostile)
    assert done == 0
    assert arguments[-2:] == ["--help", "$(touch broken); b.onnx"]
    assert {
        "--data=rows of mine.npz",
        "--labels=`touch broken`",
        "--target=cpu-1t",
        "--target=cpu-all",
    } <= set(arguments)
    assert not (tmp_path / "broken").exists()


def test_judge_action_script_contains_no_expression() -> None:
    assert "${{" not in step()["run"]


def test_judge_action_passes_options_that_are_set(tmp_path: Path) -> None:
    given = {"baseline": "a.onnx", "candidate": "b.onnx", "retrained": "true", "only": "parity"}
    arguments = ran(tmp_path, 0, **given)[1]
    assert {"--retrained", "--only=parity"} <= set(arguments)


def test_judge_action_with_unusable_wheel_reports_error_and_judges_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="seen"):
        ran(tmp_path, 0, baseline="a.onnx", candidate="b.onnx", wheel="--requirement=none.whl")
    assert (tmp_path / "output").read_text(encoding="utf-8") == "verdict=error\n"


def test_pre_commit_hooks_run_check_and_judge() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert {hook["id"]: hook["entry"] for hook in hooks} == {
        "onnx-ops-check": "onnx-ops check --static",
        "onnx-ops-judge": "onnx-ops judge --quiet",
    }
