"""Entry points of this checkout for tests.

An older installation of the package may declare others.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def pytest_configure() -> None:
    """Put the entry points of `pyproject.toml` before those of the installation.

    Nothing changes if both are equal, or if the package is missing.
    """
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    groups = {**project["entry-points"], "console_scripts": project["scripts"]}
    wanted = {
        (group, name, value) for group, points in groups.items() for name, value in points.items()
    }
    try:
        installed = distribution(project["name"])
    except PackageNotFoundError:
        return
    if {(point.group, point.name, point.value) for point in installed.entry_points} == wanted:
        return
    folder = Path(tempfile.mkdtemp(prefix="entry-points-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    about = folder / f"{project['name'].replace('-', '_')}-{installed.version}.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text(installed.read_text("METADATA") or "", encoding="utf-8")
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *map(" = ".join, points.items()))
    ]
    about.joinpath("entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(folder), os.environ.get("PYTHONPATH", "")])
    )
