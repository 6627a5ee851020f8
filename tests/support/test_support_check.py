"""Changed files, nearest tests and the CPU limit of `make check`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import check
from tests.support.check import NearTests, list_changes, read_importers
from tests.support.processes import ROOT

FILES = {
    "tests/release/test_release_rollback.py": "from onnx_ops.release.rollback import roll_back\n",
    "tests/release/test_release_rollback_kills.py": "def test(): ...\n",
    "tests/release/test_release_status.py": "from onnx_ops.release import rollback, status\n",
    "tests/release/test_release_watch.py": "def test():\n    import onnx_ops.release.rollback\n",
    "tests/release/test_release_other.py": "from onnx_ops.release.watch import WatchLoop\n",
    "tests/release/release_parts.py": "from onnx_ops.release.parts import Part\n",
    "tests/release/test_release_parts_used.py": "from tests.release.release_parts import Scene\n",
    "tests/cli/test_cli_rollback.py": (
        "from onnx_ops.cli.main import app\nfrom onnx_ops.release.rollback import x\n"
    ),
    "tests/docs/test_docs_extend.py": 'PAGE = "docs/extend.md"\n',
    "tests/test_scratch.py": "from onnx_ops.scratch import Scratch\n",
}
IMPORTERS = {
    "onnx_ops.release.steps": {"onnx_ops.release.middle"},
    "onnx_ops.release.middle": {"onnx_ops.release.watch"},
}
PLUGIN = "tests.support.cpu_limit"


@pytest.fixture
def near(tmp_path: Path) -> NearTests:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return NearTests(tmp_path, IMPORTERS)


def name_tests(near: NearTests, *changes: str) -> list[str]:
    return [
        name.rpartition("/")[2].removesuffix(".py").removeprefix("test_")
        for name in near.choose(changes)
    ]


def test_choose_for_module_lists_named_then_importing_then_folder_tests(
    near: NearTests,
) -> None:
    assert name_tests(near, "onnx_ops/release/rollback.py") == [
        "release_rollback_kills", "release_rollback", "release_watch", "release_status",
        "cli_rollback", "release_other", "release_parts_used",
    ]  # fmt: skip


def test_choose_for_module_without_named_tests_lists_importing_tests_first(near: NearTests) -> None:
    assert name_tests(near, "onnx_ops/release/steps.py")[0] == "release_other"
    assert name_tests(near, "onnx_ops/release/parts.py")[0] == "release_parts_used"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("tests/release/test_release_status.py", ["release_status"]),
        ("tests/release/test_release_deleted.py", []),
        ("tests/release/release_parts.py", ["release_parts_used"]),
        ("docs/extend.md", ["docs_extend"]),
        ("docs/other.md", []),
        ("onnx_ops/scratch.py", ["scratch"]),
    ],
)
def test_choose_for_test_helper_page_or_top_level_module_returns_its_tests(
    near: NearTests, change: str, expected: list[str]
) -> None:
    assert name_tests(near, change) == expected


def test_choose_for_several_changes_lists_each_test_once_by_best_rank(near: NearTests) -> None:
    names = name_tests(near, "onnx_ops/release/rollback.py", "tests/release/test_release_other.py")
    assert (names[0], names.count("release_other")) == ("release_other", 1)


def test_choose_for_existing_module_lists_tests_of_its_folder_first() -> None:
    near = NearTests(ROOT, read_importers())
    for module in (
        "release/rollback",
        "statistics/rules/common",
        "adapters/endpoints/replicas",
        "cli/inspect",
    ):
        tests = near.choose([f"onnx_ops/{module}.py"])
        assert all((ROOT / name).is_file() for name in tests)
        assert tests[0].startswith(f"tests/{module.partition('/')[0]}/"), module


def test_list_changes_returns_changed_new_and_deleted_but_no_ignored_files(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True
        )

    git("init", "-q")
    for name in ("kept", "changed", "deleted", "staged"):
        (tmp_path / name).write_text("before")
    (tmp_path / ".gitignore").write_text("ignored\n")
    git("add", "-A")
    git("commit", "-qm", "First")
    assert list_changes("HEAD", tmp_path) == []
    for name in ("changed", "ignored", "né w", "staged"):
        (tmp_path / name).write_text("after")
    (tmp_path / "deleted").unlink()
    git("add", "staged")
    assert list_changes("HEAD", tmp_path) == ["changed", "deleted", "né w", "staged"]


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_slow.py").write_text(
        "import time\nimport pytest\n\n\n@pytest.mark.parametrize('number', "
        "range(5))\ndef test(number):\n"
        "    end = time.process_time() + 1\n    while time.process_time() < end:\n        pass\n"
    )
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        PLUGIN,
        f"--rootdir={folder}",
    ]
    environ = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    return subprocess.run(
        [*command, *options, str(folder)], capture_output=True, text=True, check=False, env=environ
    )


def test_cpu_limit_when_exceeded_starts_no_further_test_and_reports_remaining_number(
    tmp_path: Path,
) -> None:
    result = run_pytest(tmp_path, "--cpu-limit", "1.5")
    assert result.returncode == 0, result.stdout + result.stderr
    passed = int(result.stdout.rpartition(" passed")[0].split()[-1])
    assert 1 <= passed <= 2
    assert f"{5 - passed} tests of 1 files did not run after 1.5 s of CPU" in result.stdout


def test_run_tests_without_near_tests_returns_true_and_reports_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check.run_tests([], 1.0)
    assert capsys.readouterr().out == "tests: none is near to the changed files\n"


def test_run_step_prints_output_of_failing_command_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.run_step("good", [sys.executable, "-c", "print('quiet')"])
    assert not check.run_step("bad", [sys.executable, "-c", "print('loud'); raise SystemExit(3)"])
    output = capsys.readouterr().out
    assert ("quiet" in output, "loud" in output, "good: ok" in output, "bad: failed" in output) == (
        False, True, True, True,
    )  # fmt: skip
