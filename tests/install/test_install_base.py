"""The base installation: its packages, its working commands, and its messages.

A command that needs an extra names it.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from packaging.utils import canonicalize_name

from onnx_ops import plugins
from onnx_ops.cli.main import app
from tests.install.bare_commands import CALLS, Call, make_project
from tests.install.bare_environments import (
    PROJECT,
    ROOT,
    base_distributions,
    environ_of,
    install_base,
    installed_in,
    link_base,
    requirements_of,
)

ALLOWED = frozenset(
    """
    annotated-doc annotated-types anyio attrs cattrs certifi cffi cryptography flatbuffers fsspec h11 httpcore httpx
    idna jinja2 markdown-it-py markupsafe mdurl ml-dtypes numpy onnx onnxruntime packaging protobuf pycparser pydantic
    pydantic-core pygments pyyaml rich scipy shellingham typer typing-extensions typing-inspection
    """.split()  # noqa: E501, SIM905 (a list of words reads better)
)
"""Distributions that the base installs."""

GROUPS = {"platform", "demo", "docs", "dev", "auth"}
"""Extras that consist of others, or that no code of this project imports."""

ROOMS = {
    "onnx_ops.serving": plugins.EXTRAS["serve"],
    "onnx_ops.serving.grpc": plugins.EXTRAS["grpc"],
    "onnx_ops.adapters.exporters.torch_fixed_axes": plugins.EXTRAS["torch"],
    "onnx_ops.adapters.exporters.torch_attention": plugins.EXTRAS["torch"],
    "onnx_ops.adapters.exporters.torch_recurrent": plugins.EXTRAS["torch"],
    "onnx_ops.adapters.web": plugins.EXTRAS["console"],
    "onnx_ops.console": plugins.EXTRAS["console"],
    "onnx_ops.orchestration": plugins.EXTRAS["prefect"],
    "onnx_ops.integrations.mlflow_deployments": plugins.EXTRAS["mlflow"],
    "onnx_ops.testing": ("pytest",),
}
"""Modules whose import can fail because these packages are missing."""

IMPORT_ALL = """
import importlib, json, pkgutil, onnx_ops
failed = {}
for module in pkgutil.walk_packages(onnx_ops.__path__, "onnx_ops."):
    if "__main__" in module.name or ".templates" in module.name:
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        failed[module.name] = error.name
print(json.dumps(failed))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_base(tmp_path_factory.mktemp("bare") / "environment")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_base(tmp_path_factory.mktemp("installed"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    make_project(tmp_path / "project")
    return tmp_path / "project"


def run(
    command: list[str], folder: Path, stdin: str = "", **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        input=stdin,
        cwd=folder,
        env={**environ_of(folder), **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def check(call: Call, code: int, output: str) -> list[str]:
    """Return the errors in the output of a command."""
    text = " ".join(output.replace("│", " ").split())
    wanted = f"pip install 'onnx-ops[{call.extras}]'" if call.extras else ""
    problems = [f"exit code {code}, not {call.code}"] if code != call.code else []
    problems += [f"does not say {part!r}" for part in (call.says, wanted) if part not in text]
    if "Traceback" in text or text.count("error:") > 1:
        problems.append("more than one message")
    return [f"onnx-ops {call.line}: {problem}:\n{output}" for problem in problems]


def test_install_calls_include_each_top_level_command() -> None:
    names = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert names - {call.arguments[0] for call in CALLS} == set()


def test_command_without_extras_works_or_names_extra_to_install(bare: Path, project: Path) -> None:
    calls = [call for call in CALLS if not call.works]
    lines = json.dumps([[call.arguments, dict(call.environ)] for call in calls])
    done = run([str(bare), str(Path(__file__).with_name("run_commands.py"))], project, lines)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert [
        (call.line, one["error"]) for call, one in zip(calls, results, strict=True) if one["error"]
    ] == []
    problems = [
        check(call, one["code"], one["output"]) for call, one in zip(calls, results, strict=True)
    ]
    assert "\n".join(problem for messages in problems for problem in messages) == ""


def test_import_without_extras_fails_only_for_modules_of_extras(bare: Path, tmp_path: Path) -> None:
    done = run([str(bare), "-c", IMPORT_ALL], tmp_path)
    assert done.returncode == 0, done.stderr
    failed: dict[str, str] = json.loads(done.stdout)
    assert failed, "the environment holds more than the base"
    for module, package in failed.items():
        rooms = [
            packages for room, packages in ROOMS.items() if f"{module}.".startswith(f"{room}.")
        ]
        assert any(plugins.distribution_of(package) in packages for packages in rooms), (
            module,
            package,
        )
    assert not any(
        name.startswith("onnx_ops.testing.fakes") or name.endswith("testing.models")
        for name in failed
    )


def test_base_installation_contains_only_allowed_packages() -> None:
    assert base_distributions() == ALLOWED


def test_project_extras_equal_extras_named_in_code() -> None:
    extras = {
        extra: {canonicalize_name(requirement.name) for requirement in requirements_of(extra)}
        for extra in PROJECT["optional-dependencies"]
        if extra not in GROUPS
    }
    # The extra `prefect` also pins these packages, which Prefect imports.
    pins = {"fastapi", "sqlalchemy"}
    found = {
        extra: {name.removesuffix("-cpu") for name in names}
        - {"onnx-ops"}
        - (pins if extra == "prefect" else set())
        for extra, names in extras.items()
    }
    assert found == {extra: set(names) for extra, names in plugins.EXTRAS.items()}


def test_install_page_lists_each_extra() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    table = page.partition("| extra | for |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == set(
        PROJECT["optional-dependencies"]
    )


def test_constraints_file_pins_each_base_package() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    held = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    assert base_distributions() - held == set()


def test_install_page_gives_number_of_base_packages() -> None:
    found = re.search(
        r"includes (\d+) other packages", (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    )
    assert found is not None
    assert int(found[1]) == len(base_distributions())


def test_readme_lists_commands_without_json_option() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"All\s+commands except ([^.]*) have\s+`--json`", readme)
    assert found is not None
    lacking = [
        name
        for name, command in list_commands(typer.main.get_command(app))
        if not has_json(command)
    ]
    assert re.findall(r"`([^`]+)`", found[1]) == lacking


def list_commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every command of a group, with the words that call it."""
    subcommands = getattr(command, "commands", None)
    if subcommands is None:
        yield " ".join(path), command
        return
    for name, subcommand in subcommands.items():
        yield from list_commands(subcommand, (*path, name))


def has_json(command: Any) -> bool:
    return any("--json" in getattr(parameter, "opts", ()) for parameter in command.params)


@pytest.mark.nightly
def test_wheel_installs_only_base_packages(installed: Path) -> None:
    assert installed_in(installed) - {"onnx-ops"} == ALLOWED


@pytest.mark.nightly
def test_install_page_gives_size_of_base(installed: Path) -> None:
    found = re.search(
        r"about (\d+) MB on Linux", (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    )
    assert found is not None
    (packages,) = installed.parents[1].glob("lib/python*/site-packages")
    files = [path for path in packages.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    own = [
        path
        for path in files
        if path.relative_to(packages).parts[0].partition("-")[0] in ("onnx_ops", "pip")
    ]
    size_mb = (
        sum(path.stat().st_size for path in files) - sum(path.stat().st_size for path in own)
    ) / 1e6
    assert abs(size_mb / int(found[1]) - 1) < 0.15


@pytest.mark.nightly
def test_command_of_installed_wheel_works_or_names_extra_to_install(
    installed: Path, project: Path
) -> None:
    problems: list[str] = []
    for call in CALLS:
        done = run([str(installed.with_name("onnx-ops")), *call.arguments], project, **call.environ)
        problems += check(call, done.returncode, done.stdout + done.stderr)
    assert "\n".join(problems) == ""
