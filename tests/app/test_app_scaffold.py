"""A new project immediately passes its own tests, from each preset."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from onnx_ops.app.scaffold import PRESETS, TEMPLATES, PresetName, scaffold, write_wheel
from onnx_ops.cli.main import app
from onnx_ops.errors import UserError

ROOT = Path(__file__).parents[2]

TOP = {
    ".github",
    ".gitignore",
    "Makefile",
    "README.md",
    "configs",
    "constraints.txt",
    "models",
    "onnx-ops.toml",
    "pyproject.toml",
    "requirements.txt",
    "tests",
    "vendor",
}
RELEASED = {"flows", "infra", "prefect.yaml"}
"""What only projects that register and deploy have."""


@pytest.mark.nightly
@pytest.mark.parametrize("preset", PRESETS)
def test_scaffold_of_each_preset_creates_project_whose_tests_pass(
    preset: PresetName, tmp_path: Path
) -> None:
    folder = tmp_path / "fraud"
    files = scaffold(folder, "fraud", preset)
    released = set() if preset == "ci-only" else RELEASED
    data = {"data"} if preset in ("ci-only", "table") else set()
    assert {name.partition("/")[0] for name in files} == TOP | released | data
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"],
        cwd=folder,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.mark.parametrize("preset", PRESETS)
def test_scaffold_with_project_name_leaves_no_placeholder_and_no_missing_entrypoint(
    preset: PresetName, tmp_path: Path
) -> None:
    folder = tmp_path / "fraud"
    scaffold(folder, "fraud", preset)
    for path in (
        path
        for path in folder.rglob("*")
        if path.is_file() and path.suffix in (".toml", ".yaml", ".md")
    ):
        text = path.read_text(encoding="utf-8")
        for word in (
            "{name}",
            "{version}",
            "{extras}",
            "{models}",
            "{change}",
            "examples",
            "digits-",
            "iris-",
        ):
            assert word not in text or "infra" in path.parts or "schema" in path.parts, (path, word)
    assert (
        tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
        == "fraud"
    )
    if preset == "ci-only":
        return
    text = (folder / "prefect.yaml").read_text(encoding="utf-8")
    for one in yaml.safe_load(text)["deployments"]:
        assert (folder / one["entrypoint"].partition(":")[0]).is_file()


@pytest.mark.parametrize("preset", PRESETS)
def test_renamed_text_of_preset_exists_in_pipeline(preset: PresetName) -> None:
    chosen = PRESETS[preset]
    text = (TEMPLATES / "pipelines" / chosen.pipeline).read_text(encoding="utf-8")
    assert [old for old in chosen.renamed if old not in text] == []


def test_scaffold_of_ci_only_has_no_registry_endpoint_or_secret(tmp_path: Path) -> None:
    scaffold(tmp_path / "fraud", "fraud", "ci-only")
    text = (tmp_path / "fraud/configs/pipelines/fraud.yaml").read_text(encoding="utf-8")
    assert not yaml.safe_load(text).keys() & {"register", "deploy", "train"}
    (file,) = (tmp_path / "fraud/.github/workflows").iterdir()
    workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert list(workflow["jobs"]) == ["judge", "evaluate", "publish"]
    # YAML 1.1 reads the key `on` as a boolean.
    assert workflow[True] == {"pull_request": None, "push": {"branches": ["main"]}}
    assert workflow["jobs"]["publish"]["needs"] == ["judge", "evaluate"]
    assert not re.search(r"secrets\.|id-token|environment:", file.read_text(encoding="utf-8"))


def test_evaluate_job_of_ci_only_equals_judge_except_for_step_event_runner_and_concurrency(
    tmp_path: Path,
) -> None:
    scaffold(tmp_path / "fraud", "fraud", "ci-only")
    file = tmp_path / "fraud/.github/workflows/model-commit.yml"
    jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]
    judge, evaluate = jobs["judge"], jobs["evaluate"]
    texts = re.split(r"\n  evaluate:\n", file.read_text(encoding="utf-8"))
    assert ["runner of releases" in text for text in texts] == [True, False]
    assert evaluate["steps"][-1].pop("with") == {"step": "record"}
    assert evaluate["if"] == "github.event_name != 'pull_request'"
    assert "ONNX_OPS_RUNNER_EVALUATION" in evaluate["runs-on"]
    assert evaluate["concurrency"] == {
        "group": "onnx-ops-evaluation-${{ github.ref }}",
        "cancel-in-progress": False,
        "queue": "max",
    }
    changed = dict.fromkeys(("if", "runs-on", "concurrency"))
    assert evaluate | changed == judge | changed


def test_scaffold_pipeline_contains_rollout_of_one_step_with_scale_down_delay(
    tmp_path: Path,
) -> None:
    scaffold(tmp_path / "fraud", "fraud", "sklearn")
    text = (tmp_path / "fraud" / "configs" / "pipelines" / "fraud.yaml").read_text(encoding="utf-8")
    assert "rollout: {steps: [100%], scale_down_delay: 24h}\n" in text


def test_scaffold_into_used_folder_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(UserError, match="this is not an empty folder"):
        scaffold(tmp_path, "fraud", "sklearn")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_text() == "mine"


@pytest.mark.parametrize("name", ["Fraud", "../fraud", "", "fraud model", "-fraud"])
def test_scaffold_with_invalid_name_raises_user_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be the name of a pipeline"):
        scaffold(tmp_path / "new", name, "sklearn")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["class", "import", "onnx", "onnx-ops", "scikit-learn", "models"])
def test_scaffold_with_reserved_or_installed_name_raises_user_error(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="cannot be the name of a project"):
        scaffold(tmp_path / "new", name, "sklearn")
    assert not (tmp_path / "new").exists()


def test_write_wheel_contains_constraints_and_entry_point_and_is_reproducible(
    tmp_path: Path,
) -> None:
    one, other = (
        write_wheel(distribution("onnx-ops"), tmp_path / name) for name in ("one", "other")
    )
    assert one.read_bytes() == other.read_bytes()
    with zipfile.ZipFile(one) as archive:
        names = set(archive.namelist())
        (record,) = [name for name in names if name.endswith("/RECORD")]
        assert {
            line.partition(",")[0] for line in archive.read(record).decode().splitlines()
        } == names
        assert (
            archive.read("onnx_ops/templates/constraints.txt")
            == (ROOT / "constraints.txt").read_bytes()
        )
        assert b"onnx-ops = onnx_ops.cli.main:main" in archive.read(
            record.replace("RECORD", "entry_points.txt")
        )
    assert not [
        name for name in names if "__pycache__" in name or "templates/examples/digits_keras" in name
    ]


def test_scaffold_from_wheel_writes_files_with_same_names_as_checkout(tmp_path: Path) -> None:
    with zipfile.ZipFile(write_wheel(distribution("onnx-ops"), tmp_path)) as archive:
        archive.extractall(tmp_path / "site")
    for preset in PRESETS:
        from_checkout = scaffold(tmp_path / "checkout" / preset, "fraud", preset)
        call = f"print(*scaffold(Path('{preset}'), 'fraud', '{preset}'))"
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                f"from pathlib import Path; from onnx_ops.app.scaffold import scaffold; {call}",
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.split() == list(from_checkout), done.stderr


@pytest.mark.parametrize("options", [[], ["--preset", "ci-only"]])
def test_init_command_prints_next_step(options: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["init", str(tmp_path / "fraud"), *options])
    assert result.exit_code == 0
    assert "make demo" in result.output
    assert (tmp_path / "fraud" / "configs" / "pipelines" / "fraud.yaml").is_file()
