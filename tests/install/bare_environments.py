"""Environments that contain only what the base of onnx-ops needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]


def requirements_of(extra: str) -> tuple[Requirement, ...]:
    """Return the requirements of an extra, or of the base if `extra` is empty."""
    lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return tuple(map(Requirement, lines))


def base_distributions() -> frozenset[str]:
    """Return the canonical names of all distributions that the base needs.

    This includes the requirements of its requirements.
    """
    found: set[str] = set()
    open_requirements = list(requirements_of(""))
    while open_requirements:
        requirement = open_requirements.pop()
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        found.add(name)
        for line in metadata.requires(name) or ():
            needed = Requirement(line)
            environments = [{"extra": extra} for extra in ("", *requirement.extras)]
            if needed.marker is None or any(map(needed.marker.evaluate, environments)):
                open_requirements.append(needed)
    return frozenset(found)


def link_base(folder: Path) -> Path:
    """Make an environment with links to the base distributions and to the sources.

    The distributions are those of this environment. Return the new interpreter.

    This takes a fraction of a second, where an installation takes many.
    """
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in base_distributions():
        distribution = metadata.distribution(name)
        for entry in {path.parts[0] for path in distribution.files or () if ".." not in path.parts}:
            if entry != "__pycache__" and not (packages / entry).exists():
                (packages / entry).symlink_to(Path(str(distribution.locate_file(entry))))
    (packages / "onnx_ops.pth").write_text(f"{ROOT}\n", encoding="utf-8")
    about = packages / f"onnx_ops-{PROJECT['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: onnx-ops\nVersion: {PROJECT['version']}\n", encoding="utf-8"
    )
    (about / "entry_points.txt").write_text("\n".join(_entry_points()), encoding="utf-8")
    return folder / "bin" / "python"


def _entry_points() -> Iterator[str]:
    for group, entries in PROJECT["entry-points"].items():
        yield f"[{group}]"
        yield from (f"{name} = {place}" for name, place in entries.items())


def build_wheel(source: Path, folder: Path) -> Path:
    """Build the wheel in a new folder, and return its path.

    The folder has no files of an earlier build.
    """
    shutil.copytree(
        ROOT / "onnx_ops", source / "onnx_ops", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    _call([sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(source)])
    (wheel,) = folder.glob("*.whl")
    return wheel


def install_base(folder: Path) -> Path:
    """Build the wheel and install it into a new environment; return its interpreter."""
    wheel = build_wheel(folder / "source", folder / "wheel")
    _call(["uv", "venv", "--quiet", "--python", sys.executable, str(folder / "environment")])
    python = folder / "environment" / "bin" / "python"
    options = [
        "--quiet",
        "--compile-bytecode",
        "--python",
        str(python),
        "--constraint",
        str(ROOT / "constraints.txt"),
    ]
    _call(["uv", "pip", "install", *options, str(wheel)])
    return python


def installed_in(python: Path) -> frozenset[str]:
    """Return the canonical names of the distributions of an environment."""
    code = "from importlib.metadata import distributions; print(*(d.name for d in distributions()))"
    names = _call([str(python), "-c", code]).split()
    return frozenset(map(canonicalize_name, names))


def environ_of(folder: Path) -> dict[str, str]:
    """Return the variables of this process without those of Python and of onnx-ops.

    Programs with these variables write below `folder`.
    """
    kept = {
        name: text
        for name, text in os.environ.items()
        if not re.match(r"PYTHON(?!DONTWRITE)|ONNX_OPS_|MLFLOW|PREFECT", name)
    }
    return {**kept, "HOME": str(folder), "COLUMNS": "200", "NO_COLOR": "1"}


def _call(command: list[str]) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
