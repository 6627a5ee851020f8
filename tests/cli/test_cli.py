"""The command line: its imports, refusals and output.

A process must give the same result as a call within the test.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.core import TyperCommand
from typer.main import get_command

from onnx_ops.cli.common import Command, handle_errors
from onnx_ops.cli.main import app
from onnx_ops.testing.models import write_perceptron
from tests.cli.tool_files import write_hostile, write_models
from tests.support.command import PROGRAM, Result, clean, run_command
from tests.support.golden import Golden
from tests.support.processes import ROOT

HEAVY = {
    "prefect",
    "mlflow",
    "torch",
    "onnxruntime",
    "onnx",
    "sklearn",
    "scipy",
    "numpy",
    "pydantic",
    "uvicorn",
}


def commands(command: Any, name: str = "") -> Iterator[str]:
    """Yield every command and group of commands by its words.

    The program itself is first.
    """
    yield name
    for word, part in getattr(command, "commands", {}).items():
        yield from commands(part, f"{name} {word}".strip())


COMMANDS = list(commands(get_command(app)))

WRONG = """\
schema: 1
pipeline: digits-mlp
pipeline: again
data:
  test: {sklearn: digits, split: test, test_size: 50, inputs: {x: data}, label: target}
train:
  run: examples.digits_mlp:trian
export: {framework: sklearn, opsett: 18}
benchmark: {targets: [cpu-1x]}
gates:
  - {kind: latency, max_regression: fast}
  - {kind: metric, max_drop: 1%}
  - {kind: size}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "onnx-ops.toml").touch()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def modules_after(arguments: list[str]) -> set[str]:
    """Return the top-level modules that a process has loaded when the command ends."""
    program = (
        "import sys, json\n"
        f"sys.argv = {['onnx-ops', *arguments]!r}\n"
        "from onnx_ops.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "sys.stderr.write('MODULES ' + json.dumps(sorted({m.partition('.')[0] for m in "
        "sys.modules})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    return set(json.loads(done.stderr.rpartition("MODULES ")[2]))


def test_help_imports_no_heavy_module() -> None:
    assert not HEAVY & modules_after(["--help"])


def test_command_with_omitted_or_plain_values_converts_them_like_typer() -> None:
    def show(
        name: str,
        places: Annotated[list[str] | None, typer.Argument()] = None,
        *,
        rate: float = 3,
        count: Annotated[int, typer.Option(min=1)] = 2,
        file: Path | None = None,
        parts: Annotated[list[str] | None, typer.Option("--part")] = None,
    ) -> None:
        values.append((name, places, rate, count, file, parts))

    values: list[Any] = []
    for arguments in ("a", "a b --rate 4 --count 5 --file f --part x --part y"):
        for kind in (Command, TyperCommand):
            shown = typer.Typer()
            shown.command(cls=kind)(show)
            shown(arguments.split(), standalone_mode=False)
        ours, of_typer = values[-2:]
        assert ours == of_typer
        assert [type(value) for value in ours] == [type(value) for value in of_typer]


def test_inspect_imports_no_heavy_module_but_onnx_and_numpy(tmp_path: Path) -> None:
    write_perceptron(tmp_path / "model.onnx")
    loaded = modules_after(["inspect", str(tmp_path / "model.onnx")])
    assert "onnx" in loaded
    assert not (HEAVY - {"onnx", "numpy"}) & loaded


@pytest.mark.parametrize(
    ("arguments", "environ", "code"),
    [
        (["check", "configs/pipelines/digits-mlp.yaml"], {}, 0),
        pytest.param(
            ["judge", "good.onnx", "wrong.onnx", "--only", "parity", "--quiet"],
            {},
            1,
            marks=pytest.mark.nightly,
        ),
        (["rol"], {}, 2),
        pytest.param(["run", "nowhere.yaml", "--json"], {}, 2, marks=pytest.mark.nightly),
        pytest.param(
            ["judge", "good.onnx", "good.onnx", "--max-regression", "0.000001%", "--quiet"],
            {},
            3,
            marks=pytest.mark.nightly,
        ),
        (["notify", "--test", "--json"], {"ONNX_OPS_NOTIFY": "webhook"}, 4),
        (["inspect", "escape.onnx"], {}, 5),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_command_process_returns_same_result_as_call(
    project: Path, arguments: list[str], environ: dict[str, str], code: int
) -> None:
    """The other tests call the entry point, which this result justifies."""
    write_models(project)
    write_hostile(project)
    environ = {"ONNX_OPS_NOTIFY_WEBHOOK": "http://127.0.0.1:9/none", **environ}
    called = run_command(*arguments, cwd=project, environ=environ)
    done = subprocess.run(
        [PROGRAM, *arguments],
        cwd=project,
        env=clean(environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (called.code, done.returncode) == (code, code), called.stderr + done.stderr
    if code != 3:
        # With exit code 3, the measured values of the two runs differ.
        assert called == Result(done.returncode, done.stdout, done.stderr)


def test_version_option_prints_installed_version(project: Path) -> None:
    assert run_command("--version", cwd=project).stdout == f"onnx-ops {version('onnx-ops')}\n"


def complete(shell: str, words: str, folder: Path) -> list[str]:
    """Return what a shell offers for a command line whose last word is incomplete.

    The script of `--show-completion` runs the program with these variables.
    """
    typed = (
        {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        if shell == "bash"
        else {"_TYPER_COMPLETE_ARGS": words}
    )
    variables = {
        "_ONNX_OPS_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        **typed,
    }
    done = subprocess.run(
        [PROGRAM],
        cwd=folder,
        env=clean(variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_in_each_shell_offers_commands(shell: str, project: Path) -> None:
    words = " ".join(complete(shell, "onnx-ops rol", project))
    assert "rollback" in words
    assert "rollout" in words


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("onnx-ops rollback ", ["digits", "shop"]),
        ("onnx-ops status di", ["digits"]),
        ("onnx-ops rollout pause sh", ["shop"]),
        ("onnx-ops delete nothing", []),
    ],
)
def test_completion_of_endpoint_offers_names_in_ledger(
    words: str, names: list[str], tmp_path: Path
) -> None:
    (tmp_path / "onnx-ops.toml").touch()
    for name in ("digits", "shop"):
        (tmp_path / ".onnx-ops" / "ledger" / name).mkdir(parents=True)
        (tmp_path / ".onnx-ops" / "ledger" / name / "0000000001.json").write_text("{}")
    assert complete("bash", words, tmp_path) == names


def test_completion_of_endpoint_with_unusable_settings_or_cloud_ledger_offers_nothing(
    tmp_path: Path,
) -> None:
    for text in ("ledger = 1\n", "ledger = 's3://bucket/ledger'\n"):
        (tmp_path / "onnx-ops.toml").write_text(text)
        assert complete("bash", "onnx-ops rollback ", tmp_path) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_has_example(name: str, project: Path, golden: Golden) -> None:
    done = run_command(*name.split(), "--help", cwd=project)
    assert (done.code, done.stderr) == (0, "")
    assert not name or f"Example: onnx-ops {name}" in " ".join(done.stdout.split())
    golden("help", done.stdout)


def error_text(done: Result) -> str:
    """Return the exit code and the texts of a refused command."""
    return f"exit {done.code}\n{done.stdout}{done.stderr}"


def test_check_of_wrong_yaml_reports_several_problems_with_places(
    project: Path, golden: Golden
) -> None:
    (project / "wrong.yaml").write_text(WRONG, encoding="utf-8")
    done = run_command("check", "wrong.yaml", "--json", cwd=project)
    places = {(one["line"], one["column"], one["path"]) for one in done.document()["problems"]}
    assert done.code == 2
    # These problems are a duplicate key, an unknown key, a text for a percentage, and a gate
    # without a required key.
    assert places >= {
        (3, 1, ""),
        (8, 30, "export"),
        (11, 37, "gates[0].max_regression"),
        (13, 5, "gates[2]"),
    }, places
    golden("errors", error_text(run_command("check", "wrong.yaml", cwd=project)))


@pytest.mark.parametrize(
    "arguments",
    [
        "run nowhere.yaml",
        "status nothing",
        "history nothing",
        "reconcile --watch nothing",
        "reconcile --listen :8650",
        "reconcile --watch --interval 5",
        "reconcile --watch --interval 9999999999d",
        "reconcile --watch --listen here",
        "reconcile --watch --listen :0",
        "webhooks install",
        "rollback nothing",
        "rollout resume nothing",
        "explain digits-mlp",
        "run configs/pipelines/digits-mlp.yaml --set train.wth.seed=1",
        "rol",
    ],
)
def test_command_with_user_mistake_prints_error_and_exits_with_2(
    project: Path, arguments: str, golden: Golden
) -> None:
    done = run_command(*arguments.split(), cwd=project)
    assert (done.code, done.stdout) == (2, "")
    golden("errors", error_text(done))


def test_check_of_rollout_policy_notes_traffic_it_needs(project: Path, golden: Golden) -> None:
    text = (ROOT / "configs/pipelines/digits-mlp.yaml").read_text(encoding="utf-8")
    policy = "{steps: [10%, 100%], guardrails: [errors], slo: {error_rate: 2%}}"
    right = re.sub(r"{steps: .*}", policy, text).replace("endpoint: ", "endpoint: other-")
    shadowed = right.replace("slo: ", "shadow: {}, slo: ")
    for name, changed, about in (
        ("mine", right, ["step 10%"]),
        ("shadowed", shadowed, ["shadow", "step 10%"]),
    ):
        (project / f"{name}.yaml").write_text(changed)
        notes = json.loads(run_command("check", f"{name}.yaml", "--json", cwd=project).stdout)[
            "notes"
        ]
        assert [note.split(": ")[1] for note in notes] == about
        done = run_command("check", f"{name}.yaml", cwd=project)
        assert done.code == 0
        golden("tables", done.stdout, name)
        (project / f"{name}.yaml").unlink()


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
def test_command_with_unwritable_disk_exits_with_4(
    number: int, as_json: bool, capfd: pytest.CaptureFixture[str], golden: Golden
) -> None:
    @handle_errors
    def command(as_json: bool = False) -> None:
        raise OSError(number, os.strerror(number), "store/blobs")

    with pytest.raises(typer.Exit) as ended:
        command(as_json=as_json)
    assert ended.value.exit_code == 4
    said = capfd.readouterr()
    golden("errors", said.err + said.out)


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), ValueError("could not be broadcast")]
)
def test_command_with_unexpected_exception_exits_with_4(
    error: Exception, capfd: pytest.CaptureFixture[str]
) -> None:
    @handle_errors
    def judge(as_json: bool = False) -> None:
        raise error

    with pytest.raises(typer.Exit) as ended:
        judge(as_json=True)
    assert ended.value.exit_code == 4
    document = json.loads(capfd.readouterr().out)
    assert (document["error"], document["where"]) == ("InternalError", "onnx-ops judge")
    assert type(error).__name__ in document["why"]
    assert "test_cli.py" in document["why"]


def test_run_in_pull_request_compares_with_target_branch_by_default(tmp_path: Path) -> None:
    pipeline = Path("configs/pipelines/iris-onnx.yaml")
    for name in (pipeline, "examples/models/iris.onnx"):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    (tmp_path / "onnx-ops.toml").touch()
    run = ("run", pipeline, "--until", "data", "--json")
    assert "comparisons" not in run_command(*run, cwd=tmp_path).parsed()
    of_pull_request = run_command(*run, cwd=tmp_path, environ={"GITHUB_BASE_REF": "main"})
    assert "comparisons" in of_pull_request.parsed()


@pytest.mark.parametrize(("given", "meant"), [("prmote", "promote"), ("Gate", "gate"), ("zzz", "")])
def test_command_with_wrong_choice_lists_choices_and_suggests_similar_choice(
    project: Path, given: str, meant: str
) -> None:
    done = run_command("run", "configs/pipelines/digits-mlp.yaml", "--until", given, cwd=project)
    text = " ".join(done.stderr.replace("│", " ").split())
    assert done.code == 2
    assert f"'{given}' is not one of 'data'" in text
    assert (f"Did you mean '{meant}'?" in text) == bool(meant)
    assert "Value error" not in text
