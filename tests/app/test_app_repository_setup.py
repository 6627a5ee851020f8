"""Existing repositories get a pipeline, and their own files do not change."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from onnx_ops.app.repository_setup import choose_name
from onnx_ops.cli.main import app

ROOT = Path(__file__).parents[2]
_TABLE = "Monthly Charges,age,label\n" + "".join(
    f"{40 + 20 * (row % 2)}.5,{20 + row},{row % 2}\n" for row in range(60)
)
_TRAINING = """
from sklearn.linear_model import LogisticRegression

def train(data, strength=1.0):
    rows = data["train"]
    return LogisticRegression(C=strength).fit(rows.frame(), rows.label)
"""
_OWN_DATA = """
from pathlib import Path

import pandas
from sklearn.tree import DecisionTreeClassifier

def fit(*, depth):
    table = pandas.read_csv(Path(__file__).parents[1] / "train.csv")
    return DecisionTreeClassifier(max_depth=depth).fit(table[["Monthly Charges", "age"]], table["label"])
"""  # noqa: E501
_WORKFLOW = (
    "name: test\non: push\njobs:\n  test:\n    runs-on: ubuntu-latest\n    steps: [{run: pytest}]\n"
)


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def make_src_layout(root: Path) -> list[str]:
    project = (
        '[build-system]\nrequires = ["setuptools"]\n[project]\nname = "Fraud_Model"\nversion = '
        '"1"\n'
    )
    write(
        root,
        **{
            "pyproject.toml": (
                f'{project}[tool.pytest.ini_options]\npythonpath = ["src"]\ntestpaths = ["tests"]\n'
            ),
            "src/fraud/__init__.py": "",
            "src/fraud/training.py": _TRAINING,
            "tests/test_fraud.py": (
                "from fraud import training\n\ndef test_train():\n    assert training\n"
            ),
            ".github/workflows/test.yml": _WORKFLOW,
            "data/train.csv": _TABLE,
            "data/test.csv": _TABLE,
        },
    )
    return ["--from", "fraud.training:train", "--with", "strength=0.5"]


def make_flat_layout(root: Path) -> list[str]:
    project = (
        '[build-system]\nrequires = ["setuptools"]\n[project]\nname = "churn"\nversion = "1"\n'
    )
    write(
        root,
        **{
            "pyproject.toml": project,
            "requirements.txt": "scikit-learn\npandas\n",
            "churn/__init__.py": "",
            "churn/model.py": _OWN_DATA,
            "tests/test_churn.py": "import churn\n\ndef test_churn():\n    assert churn\n",
            "conftest.py": "",
            "train.csv": _TABLE,
            "holdout.csv": _TABLE,
        },
    )
    return [
        "--from",
        "churn.model:fit",
        "--with",
        "depth=3",
        "--data",
        "test=holdout.csv",
        "--label",
        "label",
    ]


def make_model_repository(root: Path) -> list[str]:
    write(
        root,
        **{
            "README.md": "A model\n",
            "Makefile": "test:\n\ttrue\n",
            ".github/workflows/ci.yml": _WORKFLOW,
        },
    )
    (root / "models").mkdir()
    shutil.copyfile(ROOT / "examples" / "models" / "iris.onnx", root / "models" / "iris.onnx")
    return ["--from", "models/iris.onnx"]


LAYOUTS: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "src-layout": (make_src_layout, "fraud-model"),
    "flat-layout": (make_flat_layout, "churn"),
    "only-a-model": (make_model_repository, "only-a-model"),
}


def digest_files(root: Path) -> dict[str, str]:
    paths = (
        path
        for path in root.rglob("*")
        if path.is_file() and not {"__pycache__", ".onnx-ops"} & {*path.parts}
    )
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }


def run(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTEST_ADDOPTS": "",
        "ONNX_OPS_SIGNING": "off",
    }
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=root,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


def add(root: Path, arguments: list[str]) -> dict[str, Any]:
    done = run(root, "onnx_ops", "init", "--into", str(root), *arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.parametrize("layout", LAYOUTS)
def test_init_into_repository_only_adds_files_that_pass_check_and_is_idempotent(
    tmp_path: Path, layout: str
) -> None:
    make, name = LAYOUTS[layout]
    root = tmp_path / layout
    root.mkdir()
    arguments = make(root)
    before = digest_files(root)
    document = add(root, arguments)
    after = digest_files(root)
    assert {file: after[file] for file in before} == before
    assert sorted(after.keys() - before.keys()) == document["written"]
    assert document["pipeline"] == f"onnx-ops/pipelines/{name}.yaml"
    assert not [file for file in document["written"] if file.endswith(".py")]
    assert (".github/workflows/onnx-ops.yml" in document["written"]) == (root / ".github").is_dir()
    checked = run(root, "onnx_ops", "check", document["pipeline"])
    assert checked.returncode == 0, checked.stdout + checked.stderr
    again = add(root, arguments)
    assert (again["written"], digest_files(root)) == ([], after)


@pytest.mark.parametrize(
    "layout", [pytest.param("src-layout", marks=pytest.mark.nightly), "flat-layout"]
)
def test_init_into_repository_leaves_tests_and_build_unchanged(tmp_path: Path, layout: str) -> None:
    root = tmp_path / layout
    root.mkdir()
    arguments = LAYOUTS[layout][0](root)
    find = (
        "import json, setuptools; from setuptools.config.pyprojecttoml import read_configuration "
        "as read; "
    )
    find += "print(json.dumps(read('pyproject.toml')['tool']['setuptools'].get('packages', [])))"
    packages = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", find],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    add(root, arguments)
    after = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", find],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (after.returncode, after.stdout) == (packages.returncode, packages.stdout)
    assert after.returncode == 0, after.stderr
    tested = run(root, "pytest", "-q", "-p", "no:cacheprovider")
    assert "1 passed" in tested.stdout, tested.stdout + tested.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_init_into_repository_creates_pipeline_whose_gates_do_not_fail(
    tmp_path: Path, layout: str
) -> None:
    root = tmp_path / layout
    root.mkdir()
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    document = add(root, LAYOUTS[layout][0](root))
    done = run(root, "onnx_ops", "run", document["pipeline"], "--until", "gate", "--json")
    # A measurement on a shared machine may be inconclusive.
    assert done.returncode in (0, 3), done.stdout + done.stderr
    assert {choice["verdict"] for choice in json.loads(done.stdout)["choices"]} <= {
        "pass",
        "inconclusive",
    }
    listed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=all"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    assert ".onnx-ops" not in listed.stdout


def test_init_into_repository_with_ci_only_writes_working_pipeline_without_registration(
    tmp_path: Path,
) -> None:
    given = make_model_repository(tmp_path)
    (tmp_path / ".github").mkdir(exist_ok=True)
    document = add(tmp_path, [*given, "--preset", "ci-only"])
    assert "onnx-ops/prefect.yaml" not in document["written"]
    workflows = [path.name for path in (tmp_path / ".github/workflows").glob("onnx-ops*")]
    assert workflows == ["onnx-ops.yml"]
    assert "register" not in yaml.safe_load((tmp_path / document["pipeline"]).read_text())
    requirements = (tmp_path / "onnx-ops/requirements.txt").read_text()
    assert "platform" not in requirements
    ran = run(tmp_path, "onnx_ops", "run", document["pipeline"], "--quiet")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_init_into_repository_with_preset_for_new_projects_exits_with_2_and_writes_nothing(
    tmp_path: Path,
) -> None:
    options = ["init", "--into", str(tmp_path), "--from", "m.onnx", "--preset", "table"]
    assert CliRunner().invoke(app, options).exit_code == 2
    assert not list(tmp_path.iterdir())


def test_init_into_repository_with_settings_file_keeps_it(tmp_path: Path) -> None:
    root = write(tmp_path / "own", **{"onnx-ops.toml": 'signing = "off"\n'})
    document = add(root, make_model_repository(root))
    assert "onnx-ops.toml" in document["kept"]
    assert (root / "onnx-ops.toml").read_text() == 'signing = "off"\n'


def test_init_into_repository_writes_deployments_of_package_flows(tmp_path: Path) -> None:
    root = tmp_path / "flows"
    root.mkdir()
    add(root, make_model_repository(root))
    from prefect.flows import load_flow_from_entrypoint

    deployments = yaml.safe_load((root / "onnx-ops" / "prefect.yaml").read_text())["deployments"]
    names = {load_flow_from_entrypoint(entry["entrypoint"]).name for entry in deployments}
    assert names >= {"pipeline", "rollback", "rollout", "reconcile"}
    assert deployments[0]["parameters"] == {"file": "onnx-ops/pipelines/flows.yaml"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "models/none.onnx"], "no such ONNX file"),
        (["--from", "fraud.nothing:train"], "no module 'fraud.nothing'"),
        (["--from", "fraud.training:fit"], "no function"),
        (["--from", "fraud.training:train", "--with", "weight=2"], "takes no parameter 'weight'"),
        (["--from", "fraud.training:train", "--data", "test=none.csv"], "no such file"),
        (["--from", "fraud.training:train", "--data", "none.csv"], "is not SET=FILE"),
        (
            ["--from", "fraud.training:train", "--data", "train=data/test.csv"],
            "--data test=data/test.csv",
        ),
        (["--from", "README.md"], "README.md"),
        ([], "--into needs --from"),
    ],
)
def test_init_into_repository_with_invalid_options_exits_with_2_and_writes_nothing(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    make_src_layout(tmp_path)
    write(tmp_path, **{"README.md": "no model"})
    before = digest_files(tmp_path)
    result = CliRunner().invoke(app, ["init", "--into", str(tmp_path), *arguments])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert digest_files(tmp_path) == before


def test_init_into_repository_with_one_data_set_finds_the_other(tmp_path: Path) -> None:
    make_src_layout(tmp_path)
    write(tmp_path, **{"holdout.csv": _TABLE})
    source = ["--from", "fraud.training:train", "--data", "test=holdout.csv"]
    add(tmp_path, ["--name", "fraud", *source])
    text = (tmp_path / "onnx-ops" / "pipelines" / "fraud.yaml").read_text()
    files = {name: entry["file"] for name, entry in yaml.safe_load(text)["data"].items()}
    assert files == {"train": "data/train.csv", "test": "holdout.csv"}


def test_choose_name_with_invalid_pyproject_file_returns_folder_name(tmp_path: Path) -> None:
    root = write(tmp_path / "My Model!", **{"pyproject.toml": "[project"})
    assert choose_name(root) == "my-model"


def test_init_from_model_generates_rows_that_fit_its_inputs(tmp_path: Path) -> None:
    add(tmp_path, ["--name", "iris", *make_model_repository(tmp_path)])
    with np.load(tmp_path / "onnx-ops" / "iris-rows.npz") as archive:
        assert {name: array.shape for name, array in archive.items()} == {"x": (64, 4)}
