"""The hooks of `.pre-commit-config.yaml`.

Their programs run, and too long subjects of commits are refused.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.commit_subject import MAX_CHARACTERS, find_problem, read_subject
from tests.support.processes import ROOT

CONFIG = ROOT / ".pre-commit-config.yaml"
(REPO,) = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["repos"]
HOOKS: list[dict[str, Any]] = REPO["hooks"]
PROGRAMS = Path(sys.executable).parent
"""The programs of this environment, which can be another one than `.venv`."""


def run_hook(hook_id: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (hook,) = (hook for hook in HOOKS if hook["id"] == hook_id)
    program, *options = shlex.split(hook["entry"])
    command = [str(PROGRAMS / program.removeprefix(".venv/bin/")), *options, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_hooks_are_local_and_have_keys_required_by_pre_commit() -> None:
    assert REPO["repo"] == "local"
    assert len({hook["id"] for hook in HOOKS}) == len(HOOKS)
    assert all({"id", "name", "entry", "language"} <= hook.keys() for hook in HOOKS)
    assert {hook["language"] for hook in HOOKS} == {"system"}
    if program := shutil.which("pre-commit"):
        subprocess.run([program, "validate-config", str(CONFIG)], check=True)


@pytest.mark.parametrize("hook_id", [hook["id"] for hook in HOOKS if hook["id"] != "subject"])
def test_hook_program_with_help_option_prints_usage(hook_id: str) -> None:
    result = run_hook(hook_id, "--help")
    assert (result.returncode, "usage" in result.stdout.lower()) == (0, True), result.stderr


def test_lint_hook_with_unused_import_fails_and_format_hook_formats_file(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("import os\nx = ( 1 )\n")
    assert run_hook("lint", str(path)).returncode == 1
    assert run_hook("format", str(path)).returncode == 0
    assert path.read_text() == "import os\n\nx = 1\n"


def test_subject_hook_with_long_subject_fails_and_names_limit(tmp_path: Path) -> None:
    path = tmp_path / "COMMIT_EDITMSG"
    path.write_text(f"{'x' * MAX_CHARACTERS}\n\n{'The reason is longer. ' * 20}\n")
    assert run_hook("subject", str(path)).returncode == 0
    path.write_text(f"{'x' * (MAX_CHARACTERS + 1)}\n")
    result = run_hook("subject", str(path))
    assert (result.returncode, "73 characters, at most 72" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("message", "subject"),
    [
        ("Add a page\n\nwhy\n", "Add a page"),
        ("\n# a comment\nAdd a page\n# another\n", "Add a page"),
        ("Add a page\nwithout an empty line\n", "Add a page without an empty line"),
        ("# only comments\n", ""),
    ],
)
def test_read_subject_of_message_skips_comments_and_joins_lines(message: str, subject: str) -> None:
    assert read_subject(message) == subject


def test_find_problem_of_fixup_commit_or_subject_at_limit_returns_nothing() -> None:
    assert find_problem(f"fixup! {'x' * MAX_CHARACTERS}") == ""
    assert find_problem("ü" * MAX_CHARACTERS) == ""
