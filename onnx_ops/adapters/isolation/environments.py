"""Isolated environments of Python and JavaScript packages.

An incomplete environment is created again. A complete environment is reused offline.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from onnx_ops.adapters.isolation.process import build_clean_environ, select_last_lines
from onnx_ops.domain.artifact import digest_json, hex_digits
from onnx_ops.domain.execution import Environment
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import MeasurementError, NotFoundError, StageError, UserError
from onnx_ops.file_locks import hold_lock
from onnx_ops.scratch import write_durably

BASE = (
    *(f"{name}=={version(name)}" for name in ("annotated-types", "cattrs")),
    "numpy>=2",
    "onnx>=1.16",
)
"""Requirements of the worker side of the protocol, in addition to this package.

The other requirements of an environment determine the versions of numpy and onnx.
"""

_LAYOUT = 1
"""Version of the layout of environments.

The version increases when environments of an older release can no longer be used.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonEnvironments:
    """Python environments; a name is the digest of requirements and Python version."""

    folder: Path
    base: Sequence[str] = BASE
    uv: str | None = None
    """Path of uv, which creates environments; None to use venv and pip."""

    def python(self, wanted: Environment) -> Path:
        """Return the interpreter of an environment.

        A missing environment is created, which usually requires network access.

        Raises:
            UserError: a requirement is empty, or is an option of the installer.
            NotFoundError: the Python version and uv are not installed.
            StageError: the installer failed.
        """
        place = self.place(wanted)
        python = place / "bin" / "python"
        make_once(place, python, lambda: self._make(place, wanted))
        return python

    def place(self, wanted: Environment) -> Path:
        """Return the path of an environment's folder, which can be missing.

        Raises:
            UserError: a requirement is empty, or is an option of the installer.
        """
        for requirement in wanted.requirements:
            if not requirement.strip() or requirement.lstrip().startswith("-"):
                remedy = (
                    "Write each requirement in pip's format: `package==1.2`. "
                    "Configure indexes in the settings of pip or uv."
                )
                raise UserError(
                    f"{requirement!r} is not a valid requirement",
                    where="env.requirements",
                    remedy=remedy,
                )
        python = wanted.python or f"{sys.version_info.major}.{sys.version_info.minor}"
        requirements = sorted({*self.base, *wanted.requirements})
        return self.folder / hex_digits(digest_json([_LAYOUT, python, requirements]))[:16]

    def _make(self, place: Path, wanted: Environment) -> Mapping[str, Json]:
        requirements = [*self.base, *wanted.requirements]
        python, clean = str(place / "bin" / "python"), build_clean_environ()
        if self.uv:
            run_installer(
                [
                    self.uv,
                    "venv",
                    "--quiet",
                    "--python",
                    wanted.python or sys.executable,
                    str(place),
                ],
                clean,
            )
            run_installer(
                [self.uv, "pip", "install", "--quiet", "--python", python, *requirements], clean
            )
            freeze = run_installer([self.uv, "pip", "freeze", "--quiet", "--python", python], clean)
        else:
            interpreter = (
                shutil.which(f"python{wanted.python}")
                if wanted.python is not None
                else sys.executable
            )
            if interpreter is None:
                remedy = "Install this version of Python, or install uv, which downloads it."
                raise NotFoundError(
                    f"python{wanted.python} is not installed", where="env.python", remedy=remedy
                )
            run_installer([interpreter, "-m", "venv", str(place)], clean)
            pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
            run_installer([*pip, "install", "--quiet", *requirements], clean)
            freeze = run_installer([*pip, "freeze", "--all"], clean)
        return {"requirements": requirements, "python": wanted.python, "installed": freeze.split()}


def find_uv() -> str | None:
    """Return the path of uv, on PATH or beside this interpreter; None without uv."""
    return shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))


_PINNED = re.compile(
    r"(?P<name>(@[a-z0-9~][\w.~-]*/)?[a-z0-9~][\w.~-]*)@(?P<version>\d+\.\d+\.\d+[\w.+-]*)"
)

_NPM_LAYOUT = 1
"""Version of the layout of package folders.

The version increases when folders of an older release can no longer be used.
"""

NPM_REMEDY = (
    "Install npm (Debian, Ubuntu: `apt-get install nodejs npm`), "
    "or copy `.onnx-ops/environments` from a machine that has these packages."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NpmPackages:
    """Folders of npm packages; their names contain digests of their requirements."""

    folder: Path

    def installed(self, requirements: Sequence[str]) -> Path:
        """Return the folder with `node_modules`, which is created if missing.

        Scripts of packages are not run, so each package has exactly the files of its archive. An
        existing folder requires no network access.

        Raises:
            UserError: a requirement does not name an exact version.
            MeasurementError: npm is needed, and is not installed.
            StageError: npm failed.
        """
        parse_pins(requirements)
        place = self.folder / (
            "npm-" + hex_digits(digest_json([_NPM_LAYOUT, sorted(requirements)]))[:16]
        )
        make_once(place, place / "node_modules", lambda: _install(place, requirements))
        return place


def parse_pins(requirements: Sequence[str]) -> Mapping[str, str]:
    """Return the pinned version of each package.

    Raises:
        UserError: a requirement does not name an exact version.
    """
    versions = {}
    for requirement in requirements:
        match = _PINNED.fullmatch(requirement)
        if match is None:
            raise UserError(
                f"{requirement!r} does not name an exact version of a package",
                where="env.requirements",
                remedy="Write each requirement as `package@1.2.3`. Configure registries "
                "in the settings of npm.",
            )
        versions[match["name"]] = match["version"]
    return versions


def _install(place: Path, requirements: Sequence[str]) -> Mapping[str, Json]:
    npm = shutil.which("npm")
    if npm is None:
        raise MeasurementError(
            "npm is missing, so the packages cannot be installed", why="", remedy=NPM_REMEDY
        )
    place.mkdir()
    (place / "package.json").write_text('{"private": true}\n', encoding="utf-8")
    quiet = (
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        "--no-progress",
        "--save-exact",
        "--loglevel=error",
    )
    run_installer([npm, "install", *quiet, *sorted(requirements)], os.environ, place)
    lock = json.loads((place / "package-lock.json").read_text(encoding="utf-8"))
    installed = {
        name: str(entry.get("version", "")) for name, entry in lock["packages"].items() if name
    }
    return {"requirements": sorted(requirements), "installed": installed}


MARKER = "onnx-ops.json"
"""Marker file, which is written last.

A folder without this file is incomplete, because its installation failed or was killed.
"""


def make_once(place: Path, needed: Path, make: Callable[[], Mapping[str, Json]]) -> None:
    """Fill a folder with `make`, unless the folder is complete.

    A folder is complete if it has the marker file and `needed`. The document that `make` returns is
    stored in the marker file. Several processes can call this function at the same time.
    """
    with hold_lock(place.with_suffix(".lock")):
        if (place / MARKER).is_file() and needed.exists():
            return
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        document = make()
        write_durably(place / MARKER, json.dumps(document, indent=1).encode())


def run_installer(
    command: list[str], environ: Mapping[str, str], folder: Path | None = None
) -> str:
    """Run an installer and return its output.

    Raises:
        StageError: the installer fails.
    """
    done = subprocess.run(
        command,
        env=environ,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        raise StageError(
            "the environment could not be created",
            where="env.requirements",
            why=select_last_lines(done.stdout),
            remedy="Correct the requirements or the version of Python, or check that the package "
            "index is reachable. Then run again.",
        )
    return done.stdout.decode("utf-8", errors="replace")
