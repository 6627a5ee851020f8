"""Slices of a pipeline on the command line: wrong columns, and a run that judges each slice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.command import run_command

ROOT = Path(__file__).parents[2]
SECTION = "slices:\n  by: [plan, member]\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project with the example of a table, and files of tags."""
    (tmp_path / "onnx-ops.toml").touch()
    for folder in ("configs", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "short.csv").write_text("device\nphone\n", encoding="utf-8")
    ids = "\n".join(map(str, range(400)))
    (tmp_path / "tags.csv").write_text(f"id\n{ids}\n", encoding="utf-8")
    code = (
        "def age(arrays):\n"
        "    return {'old': [row > 40 for row in arrays['age'][:, 0]]}\n\n"
        "def short(arrays):\n    return {'old': [1]}\n"
    )
    (tmp_path / "slicing.py").write_text(code, encoding="utf-8")
    return tmp_path


def write(project: Path, section: str) -> str:
    name = "configs/pipelines/churn-table.yaml"
    text = (ROOT / name).read_text(encoding="utf-8")
    assert SECTION in text
    (project / name).write_text(text.replace(SECTION, f"slices: {section}\n"), encoding="utf-8")
    return name


@pytest.mark.parametrize(
    ("section", "place", "message"),
    [
        ("{by: [pan]}", "slices.by[0]", "there is no column 'pan' for slices. Did you mean 'plan'"),
        ("{by: [plan*pan]}", "slices.by[0]", "there is no column 'pan'"),
        ("{by: [customer]}", "slices.by[0]", "'customer' has 400 different values"),
        ("{by: [device], tags: short.csv}", "slices.by[0]", "'device' has 1 value"),
        ("{by: [id], tags: tags.csv}", "slices.by[0]", "'id' has 400 different values"),
        ("{by: [id], tags: tgs.csv}", "slices.tags", "'tgs.csv': no such file"),
        ("{by: [old], use: slicing:aeg}", "slices.use", "did you mean 'age'"),
        ("{by: [plan], min_rows: 5}", "slices.min_rows", "must be at least 20"),
    ],
)
def test_check_of_wrong_slices_names_place(
    project: Path, section: str, place: str, message: str
) -> None:
    done = run_command("check", write(project, section), "--json", cwd=project)
    assert done.code == 2
    (problem,) = done.document()["problems"]
    assert problem["path"] == place
    assert message in problem["message"]
    assert problem["line"] > 1


def test_check_of_slices_from_file_and_function_accepts_them(project: Path) -> None:
    (project / "tags.csv").write_text("part\n" + "a\n" * 400, encoding="utf-8")
    name = write(project, "{by: [part, old*plan], tags: tags.csv, use: slicing:age}")
    done = run_command("check", name, cwd=project)
    assert done.code == 0, done.stdout + done.stderr


def test_check_of_small_min_rows_notes_needed_rows(project: Path) -> None:
    name = write(project, "{by: [plan], min_rows: 20}")
    path = project / name
    path.write_text(path.read_text(encoding="utf-8").replace("min: 75%", "min: 95%"), "utf-8")
    done = run_command("check", name, "--json", cwd=project)
    assert done.code == 0
    (note,) = (each for each in json.loads(done.stdout)["notes"] if "gates[2]" in each)
    assert "a slice of fewer than 59 rows cannot pass" in note


def test_run_with_wrong_slices_function_reports_row_counts(project: Path) -> None:
    name = write(project, "{by: [old], use: slicing:short}")
    done = run_command("run", name, "--until", "tags", cwd=project)
    assert "column 'old' has 1 value, and the scored data set has 400 rows" in done.stdout


def test_run_with_slices_judges_each_slice(project: Path) -> None:
    name = write(project, "{by: [plan, old], use: slicing:age}")
    done = run_command("run", name, "--until", "gate", "--json", cwd=project)
    assert done.code == 0, done.stdout + done.stderr
    (result,) = (
        one
        for decision in done.document()["decisions"]
        for one in decision["results"]
        if one["gate"] == "slices"
    )
    names = {each["slice"] for each in result["slices"]}
    assert names == {"plan=basic", "plan=plus", "plan=pro", "old=true", "old=false"}
    assert result["verdict"] == "pass"
