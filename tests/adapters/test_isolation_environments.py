"""Environments of Python and JavaScript packages.

An environment is built completely or not at all, once, and reused without a network.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.adapters.isolation.environments import (
    BASE,
    MARKER,
    NpmPackages,
    PythonEnvironments,
    find_uv,
    parse_pins,
)
from onnx_ops.adapters.isolation.process import build_clean_environ
from onnx_ops.domain.execution import Environment
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import MeasurementError, NotFoundError, StageError, UserError
from tests.adapters.runtime_places import require
from tests.support.processes import until

UNREACHABLE = {
    "PIP_NO_INDEX": "1",
    "PIP_CONFIG_FILE": "/dev/null",
    "UV_OFFLINE": "1",
    "UV_NO_CONFIG": "1",
    "HTTPS_PROXY": "http://127.0.0.1:9",
}


VERSION = "import tiny; print(tiny.VERSION)"


def wheel(folder: Path) -> Path:
    """Build a wheel with one module, so that no package index is needed."""
    info = "tiny-1.0.dist-info"
    content = {
        "tiny.py": "VERSION = '1.0'\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    record = "".join(f"{file},,\n" for file in [*content, f"{info}/RECORD"])
    path = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**content, f"{info}/RECORD": record}.items():
            archive.writestr(file, text)
    return path


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in UNREACHABLE.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def environments(tmp_path: Path) -> PythonEnvironments:
    uv = find_uv()
    assert uv, "uv is among the packages for development"
    return PythonEnvironments(folder=tmp_path / "environments", base=(), uv=uv)


def say(python: Path, code: str) -> str:
    return subprocess.run(
        [python, "-I", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def installed_here() -> str:
    return subprocess.run(
        [sys.executable, "-m", "pip", "freeze"], capture_output=True, text=True, check=True
    ).stdout


def test_build_clean_environ_omits_variables_of_python_pip_uv_and_keras(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leading = {
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "PIP_TARGET",
        "UV_PROJECT",
        "KERAS_BACKEND",
    }
    for name in (*leading, "HTTPS_PROXY"):
        monkeypatch.setenv(name, "elsewhere")
    found = build_clean_environ()
    assert leading.isdisjoint(found)
    assert found["HTTPS_PROXY"] == "elsewhere"


@pytest.mark.parametrize("installer", [pytest.param("pip", marks=pytest.mark.nightly), "uv"])
def test_python_environment_with_requirement_is_separate_from_current_environment(
    environments: PythonEnvironments, tmp_path: Path, installer: str
) -> None:
    environments = replace(environments, uv=environments.uv if installer == "uv" else None)
    before = installed_here()
    python = environments.python(Environment(requirements=(str(wheel(tmp_path)),)))
    assert say(python, VERSION) == "1.0"
    missing = "import importlib.util; print(importlib.util.find_spec('onnxruntime'))"
    assert say(python, missing) == "None"
    assert installed_here() == before
    marker = json.loads((python.parents[1] / MARKER).read_text())
    assert any("tiny" in line for line in marker["installed"])


def test_python_environment_after_creation_is_reused_without_packages(
    environments: PythonEnvironments, tmp_path: Path
) -> None:
    path = wheel(tmp_path)
    wanted = Environment(requirements=(str(path),))
    python = environments.python(wanted)
    made = (python.parents[1] / MARKER).stat().st_mtime_ns
    path.unlink()
    assert environments.python(Environment(requirements=(str(path),), memory=10**9)) == python
    assert (python.parents[1] / MARKER).stat().st_mtime_ns == made


def test_python_environment_without_marker_is_created_again(
    environments: PythonEnvironments, tmp_path: Path
) -> None:
    wanted = Environment(requirements=(str(wheel(tmp_path)),))
    place = environments.python(wanted).parents[1]
    (place / MARKER).unlink()
    (place / "leftover").write_text("half of a download")
    assert say(environments.python(wanted), VERSION) == "1.0"
    assert not (place / "leftover").exists()


@pytest.mark.nightly
def test_python_environment_of_killed_process_is_created_again(tmp_path: Path) -> None:
    path = wheel(tmp_path)
    code = f"""
from pathlib import Path
from onnx_ops.adapters.isolation.environments import PythonEnvironments
from onnx_ops.domain.execution import Environment
PythonEnvironments(folder=Path({str(tmp_path / "e")!r}), base=()).python(Environment(requirements=({str(path)!r},)))
"""  # noqa: E501
    environments = PythonEnvironments(folder=tmp_path / "e", base=())
    wanted = Environment(requirements=(str(path),))
    place = environments.place(wanted)
    maker = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    until(place.exists)
    maker.kill()
    maker.wait()
    assert not (place / MARKER).exists()
    assert say(environments.python(wanted), VERSION) == "1.0"


def test_python_environment_requested_concurrently_is_created_once(
    environments: PythonEnvironments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[Path] = []
    make = PythonEnvironments._make

    def count(self: PythonEnvironments, place: Path, wanted: Environment) -> Mapping[str, Json]:
        created.append(place)
        return make(self, place, wanted)

    monkeypatch.setattr(PythonEnvironments, "_make", count)
    wanted = Environment(requirements=(str(wheel(tmp_path)),))
    with ThreadPoolExecutor(3) as pool:
        (python,) = set(pool.map(environments.python, [wanted] * 3))
    assert created == [environments.place(wanted)]
    assert say(python, VERSION) == "1.0"


def test_python_environment_place_depends_on_requirements_and_python(tmp_path: Path) -> None:
    environments = PythonEnvironments(folder=tmp_path)
    places = {
        environments.place(Environment(requirements=names, python=python))
        for names, python in ((("a",), None), (("b",), None), (("a", "b"), None), (("a",), "3.99"))
    }
    assert len(places) == 4
    assert environments.place(Environment(requirements=("a", "b"))) in places
    assert environments.place(Environment(requirements=("b", "a"))) in places


def test_base_requirements_of_environments_pin_codec_packages() -> None:
    pins = {pin.partition("==")[0] for pin in BASE if "==" in pin}
    assert pins == {"annotated-types", "cattrs"}


@pytest.mark.parametrize("installer", [pytest.param("pip", marks=pytest.mark.nightly), "uv"])
def test_python_environment_with_missing_package_raises_stage_error_with_output(
    environments: PythonEnvironments, installer: str
) -> None:
    environments = replace(environments, uv=environments.uv if installer == "uv" else None)
    wanted = Environment(requirements=("no-such-package-at-all==1",))
    with pytest.raises(StageError, match="the environment could not be created") as failure:
        environments.python(wanted)
    assert "no-such-package-at-all" in failure.value.why
    assert "package index" in failure.value.remedy
    assert not (environments.place(wanted) / MARKER).exists()


@pytest.mark.parametrize("requirement", ["--no-deps", "-e .", " "])
def test_python_environment_with_invalid_requirement_raises_user_error(
    tmp_path: Path, requirement: str
) -> None:
    with pytest.raises(UserError, match="not a valid requirement"):
        PythonEnvironments(folder=tmp_path).python(Environment(requirements=(requirement,)))


def test_python_environment_by_pip_with_missing_python_raises_not_found_error(
    tmp_path: Path,
) -> None:
    with pytest.raises(NotFoundError, match=r"python3\.99 is not installed") as missing:
        PythonEnvironments(folder=tmp_path, base=()).python(
            Environment(requirements=("a",), python="3.99")
        )
    assert "uv" in missing.value.remedy


SMALL = "long@5.3.2"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NpmPackages:
    require("npm")
    # Without the registry, npm tries again for 70 s before it uses its cache.
    monkeypatch.delenv("HTTPS_PROXY")
    return NpmPackages(folder=tmp_path / "environments")


def test_installed_npm_packages_need_npm_again_only_if_marker_is_missing(
    packages: NpmPackages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = packages.installed((SMALL,))
    assert json.loads((place / "node_modules/long/package.json").read_text())["version"] == "5.3.2"
    assert json.loads((place / MARKER).read_text())["installed"] == {"node_modules/long": "5.3.2"}
    made = (place / MARKER).stat().st_mtime_ns
    monkeypatch.setenv("PATH", str(tmp_path))
    assert packages.installed((SMALL,)) == place
    assert (place / MARKER).stat().st_mtime_ns == made
    # Without the marker, the environment is unfinished, as if its build had been killed.
    (place / MARKER).unlink()
    with pytest.raises(MeasurementError, match="npm is missing") as missing:
        packages.installed((SMALL,))
    assert "apt-get install" in missing.value.remedy


def test_npm_packages_with_missing_version_raise_stage_error_with_npm_output(
    packages: NpmPackages,
) -> None:
    with pytest.raises(StageError, match="could not be created") as failure:
        packages.installed(("long@999.0.0",))
    assert "999.0.0" in failure.value.why
    assert not list(packages.folder.glob(f"*/{MARKER}"))


def test_parse_pins_accepts_exact_versions_only() -> None:
    exact = ("onnxruntime-web@1.30.0", "@scope/name@1.2.3-rc.1")
    assert parse_pins(exact) == {"onnxruntime-web": "1.30.0", "@scope/name": "1.2.3-rc.1"}
    others = "name name@latest name@^1.2.3 name@1.2 ./name@1.2.3 --flag@1.2.3 git+ssh://x@1.2.3"
    for other in ("", *others.split()):
        with pytest.raises(UserError, match="exact version"):
            parse_pins((other,))
