"""The files of a new project refer only to things that exist.

These are actions, files, extras, modules and stages of the image.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from onnx_ops.app.scaffold import PRESETS, scaffold
from tests.infra.infra_tools import ROOT, steps, tool

EXTRAS = set(
    tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
)
INSTALL = "pip install --quiet --requirement requirements.txt"


@pytest.fixture(scope="module", params=list(PRESETS))
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scaffold") / "fraud"
    scaffold(folder, "fraud", request.param)
    return folder


def scripts(project: Path) -> list[str]:
    """List the texts of the project that contain commands."""
    files = [
        yaml.safe_load(file.read_text(encoding="utf-8"))
        for file in project.glob(".github/*/**/*.yml")
    ]
    found = [step for file in files for step in steps(file)]
    texts = [str(step.get("run", "")) for step in found]
    return [
        *texts,
        *((project / name).read_text(encoding="utf-8") for name in ("Makefile", "README.md")),
    ]


def test_workflow_steps_refer_to_own_or_pinned_actions_and_existing_modules(project: Path) -> None:
    found = [
        step
        for file in project.glob(".github/*/**/*.yml")
        for step in steps(yaml.safe_load(file.read_text()))
    ]
    uses = [step["uses"] for step in found if "uses" in step]
    own = [name for name in uses if name.startswith(".")]
    assert own
    assert all((project / name / "action.yml").is_file() for name in own)
    assert all(
        re.fullmatch(r"[\w-]+(/[\w-]+)+@[0-9a-f]{40}", name) for name in set(uses) - set(own)
    )
    modules = {
        match
        for text in scripts(project)
        for match in re.findall(r"python -m (onnx_ops[\w.]*)", text)
    }
    assert modules
    assert all(importlib.util.find_spec(module) for module in modules)


def test_install_commands_use_pinned_requirements(project: Path) -> None:
    lines = [
        line.strip()
        for text in scripts(project)
        for line in text.splitlines()
        if "pip install" in line
    ]
    lines += [
        line
        for text in scripts(project)
        for line in text.splitlines()
        if re.search(r"pip .*install ", line)
    ]
    assert lines
    pinned = re.compile(r"--requirement requirements\.txt\b|--constraint constraints\.txt ")
    assert all(map(pinned.search, lines)), lines


def test_requirements_file_refers_to_existing_files(project: Path) -> None:
    lines = list(requirements(project, "requirements.txt"))
    constraints, wheel, own = lines
    assert constraints == "--constraint constraints.txt"
    assert (project / "constraints.txt").read_bytes() == (ROOT / "constraints.txt").read_bytes()
    assert (project / wheel).is_file()
    assert parse_wheel_filename(Path(wheel).name)[0] == "onnx-ops"
    assert own == "--editable .[dev]"
    about = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "dev" in about["optional-dependencies"]
    (dependency,) = map(Requirement, about["dependencies"])
    assert (dependency.name, dependency.extras <= EXTRAS) == ("onnx-ops", True)


def requirements(project: Path, name: str) -> Iterator[str]:
    for line in (project / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("--requirement "):
            yield from requirements(project, line.removeprefix("--requirement "))
        elif line and not line.startswith("#"):
            yield line


def test_readme_refers_to_existing_paths(project: Path) -> None:
    text = (project / "README.md").read_text(encoding="utf-8")
    paths = [word for word in re.findall(r"`([\w./-]+)`", text) if "/" in word or "." in word]
    assert len(paths) > 6
    assert [path for path in paths if not (project / path).exists()] == []


def test_dockerfile_copies_existing_files_and_is_built_by_compose(project: Path) -> None:
    file = project / "infra" / "docker" / "Dockerfile"
    if not (project / "infra").exists():
        pytest.skip("a project without releases has no image")
    text = file.read_text(encoding="utf-8")
    ignored = (file.with_name("Dockerfile.dockerignore")).read_text(encoding="utf-8").splitlines()
    copied = [
        word
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
        for word in line.split()
    ]
    assert {"vendor", "requirements.txt", "constraints.txt"} <= set(copied)
    for name in copied:
        assert (project / name).exists(), name
        assert not any(fnmatch.fnmatch(name, pattern) for pattern in ignored), name
    named = re.findall(r"infra/docker/[\w.]+\w|(?<=--requirement[= ])\S+", text)
    assert named
    assert [name for name in named if not (project / name).exists()] == []
    done = tool("hadolint", "--failure-threshold", "style", file)
    assert done.returncode == 0, done.stdout
    compose = project / "infra" / "compose" / "compose.yaml"
    services = yaml.safe_load(compose.read_text(encoding="utf-8"))["services"]
    builds = [service["build"] for service in services.values() if "build" in service]
    assert len(builds) == 5
    for build in builds:
        context = (compose.parent / build["context"]).resolve()
        assert context == project.resolve()
        assert (context / build["dockerfile"]).samefile(file)
        assert f" AS {build['target']}" in text
    assert (compose.parent / ".gitignore").is_file()


def test_zizmor_of_project_workflows_reports_nothing(project: Path) -> None:
    done = tool("zizmor", "--offline", "--quiet", "--format=json", project / ".github")
    assert json.loads(done.stdout) == []
