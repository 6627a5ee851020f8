"""The command line as a process: what it imports, how it refuses, what it prints."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from onnx_ops.cli.common import reported

ROOT = Path(__file__).resolve().parents[2]
ONNX_OPS = Path(sys.executable).with_name("onnx-ops")
HEAVY = {"prefect", "mlflow", "torch", "onnxruntime", "onnx", "sklearn", "scipy", "numpy", "pydantic", "uvicorn"}
COMMANDS = [
    "init",
    "check",
    "plan",
    "run",
    "affected",
    "explain",
    "report",
    "export-dvc",
    "inspect",
    "compare",
    "bench",
    "promote",
    "rollout",
    "rollback",
    "reconcile",
    "webhooks",
    "notify",
    "status",
    "history",
    "prune",
    "delete",
    "serve",
    "doctor",
    "targets",
    "keys",
    "keys list",
    "keys new",
    "keys rotate",
    "keys retire",
]

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


def command(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ONNX_OPS, *arguments], cwd=project, capture_output=True, text=True, timeout=120, check=False)


def modules_after(arguments: list[str]) -> set[str]:
    """Top-level modules that a process has loaded when the command has ended."""
    program = (
        "import sys, json\n"
        f"sys.argv = {['onnx-ops', *arguments]!r}\n"
        "from onnx_ops.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "sys.stderr.write('MODULES ' + json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return set(json.loads(done.stderr.rpartition("MODULES ")[2]))


def test_help_imports_nothing_heavy() -> None:
    assert not HEAVY & modules_after(["--help"])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str, project: Path) -> None:
    done = command(project, *name.split(), "--help")
    assert done.returncode == 0
    assert f"Example: onnx-ops {name}" in " ".join(done.stdout.split())


def test_wrong_yaml_tells_all_its_problems_at_their_places_and_no_traceback(project: Path) -> None:
    (project / "wrong.yaml").write_text(WRONG, encoding="utf-8")
    done = command(project, "check", "wrong.yaml")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    places = {line.rsplit(": ", 1)[0].split(": ")[0] for line in done.stderr.splitlines()}
    assert all(place.startswith("wrong.yaml:") for place in places), done.stderr
    for expected in (
        "wrong.yaml:3:1:",  # duplicate key
        "wrong.yaml:8:30:",  # unknown key
        "wrong.yaml:11:37:",  # bad unit
        "did you mean 'opset'",
        "max",  # the size gate lacks it
    ):
        assert expected in done.stderr, done.stderr


def test_problems_of_references_are_told_with_a_suggestion(project: Path) -> None:
    text = WRONG.replace("pipeline: again\n", "").replace("opsett", "opset").replace("fast", "5%")
    text = text.replace("test_size: 50,", "test_size: 50%,").replace("  - {kind: size}\n", "")
    (project / "wrong.yaml").write_text(text, encoding="utf-8")
    done = command(project, "run", "wrong.yaml")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "did you mean 'train'" in done.stderr
    assert "did you mean 'cpu-1t'" in done.stderr


def test_problems_as_json(project: Path) -> None:
    (project / "wrong.yaml").write_text("pipeline: [\n", encoding="utf-8")
    done = command(project, "check", "wrong.yaml", "--json")
    assert done.returncode == 2
    document = json.loads(done.stdout)
    assert document["exit_code"] == 2
    assert document["problems"][0]["line"] >= 1


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["run", "nowhere.yaml"], 2, "nowhere.yaml"),
        (["status", "nothing"], 2, "Known endpoints: none"),
        (["history", "nothing"], 2, "no endpoint of that name"),
        (["reconcile", "--watch", "nothing"], 2, "no endpoint of that name"),
        (["reconcile", "--listen", ":8650"], 2, "--listen goes with --watch"),
        (["reconcile", "--watch", "--every", "5"], 2, "write it with a unit"),
        (["reconcile", "--watch", "--every", "9999999999 d"], 2, "from 100 ms to 24 h"),
        (["reconcile", "--watch", "--listen", "here"], 2, "is not HOST:PORT"),
        (["reconcile", "--watch", "--listen", ":0"], 2, "there is no webhook secret"),
        (["webhooks", "install"], 2, "webhooks need an MLflow server"),
        (["rollback", "nothing"], 2, "no endpoint of that name"),
        (["rollout", "resume", "nothing"], 2, "no endpoint of that name"),
        (["explain", "digits-mlp"], 2, "MODEL/VERSION"),
        (["run", "configs/pipelines/digits-mlp.yaml", "--set", "train.wth.seed=1"], 2, "--set train.wth.seed=1"),
        (["rol"], 2, "rol"),
    ],
)
def test_a_users_mistake_is_told_without_a_traceback(project: Path, arguments: list[str], code: int, told: str) -> None:
    done = command(project, *arguments)
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_the_example_pipelines_are_in_order(project: Path) -> None:
    done = command(project, "check", "configs/pipelines/digits-mlp.yaml", "configs/pipelines/digits-cnn.yaml")
    assert done.returncode == 0, done.stderr
    assert "2 files checked, no problems" in done.stdout


def test_check_tells_what_a_rollout_will_take(project: Path) -> None:
    text = (ROOT / "configs/pipelines/digits-mlp.yaml").read_text(encoding="utf-8")
    policy = "{steps: [10%, 100%], guardrails: [errors], slo: {error_rate: 2%}}"
    right = text.replace("{steps: [100%], keep_previous: 24h}", policy).replace("endpoint: ", "endpoint: other-")
    (project / "mine.yaml").write_text(right)
    done = command(project, "check", "mine.yaml", "--json")
    assert done.returncode == 0, done.stderr
    (note,) = json.loads(done.stdout)["notes"]
    assert "step 10%: to show an error rate below 2% takes 178 clean requests" in note
    (project / "mine.yaml").write_text(right.replace("slo: ", "shadow: {}, slo: "))
    done = command(project, "check", "mine.yaml", "--json")
    assert [note.partition(":")[2].split(":")[0].strip() for note in json.loads(done.stdout)["notes"]] == [
        "shadow",
        "step 10%",
    ]


@pytest.mark.parametrize("as_json", [True, False])
def test_a_full_disk_is_a_failure_of_the_environment(as_json: bool, capfd: pytest.CaptureFixture[str]) -> None:
    @reported
    def command(as_json: bool = False) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "store/blobs")

    with pytest.raises(typer.Exit) as ended:
        command(as_json=as_json)
    assert ended.value.exit_code == 4
    told = capfd.readouterr()
    assert "the disk is full" in told.err + told.out


def test_another_trouble_with_files_is_not_hidden() -> None:
    @reported
    def command() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        command()
