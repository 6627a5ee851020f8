"""Python environments of their own, by what they hold: made once, whole or not at all, and used again offline."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from onnx_ops.adapters.isolation.places import made_once, run_installer
from onnx_ops.domain.artifact import digest_json
from onnx_ops.domain.execution import Environment
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import NotFoundError, UserError

BASE = (*(f"{name}=={version(name)}" for name in ("annotated-types", "cattrs")), "numpy>=2", "onnx>=1.16")
"""What the inner side of the protocol imports, beside this package itself. `onnx` and `numpy` stay loose: the
framework decides."""

_LAYOUT = 1
"""Raised when environments made by an older release cannot be used any more."""

_NOT_INHERITED = (
    "KERAS_BACKEND",
    "PIP_PREFIX",
    "PIP_TARGET",
    "PIP_USER",
    "PYTHONHOME",
    "PYTHONPATH",
    "UV_PROJECT",
    "VIRTUAL_ENV",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """Environments below a folder, each named for the digest of its requirements and Python version."""

    folder: Path
    base: Sequence[str] = BASE
    uv: str | None = None
    """The uv to make them with; None for venv and pip."""

    def python(self, wanted: Environment) -> Path:
        """The interpreter of the environment, which is made if it is not there. Asks no network if it is.

        Raises:
            UserError: a requirement is none.
            NotFoundError: there is no such Python.
            StageError: the packages could not be installed.
        """
        place = self.place(wanted)
        python = place / "bin" / "python"
        made_once(place, python, lambda: self._make(place, wanted))
        return python

    def place(self, wanted: Environment) -> Path:
        """Where the environment is, or would be."""
        for requirement in wanted.requirements:
            if not requirement.strip() or requirement.lstrip().startswith("-"):
                raise UserError(
                    f"{requirement!r} is no requirement",
                    where="env.requirements",
                    remedy="Write each as pip takes it: `package==1.2`. Indexes are set in pip's or uv's own settings.",
                )
        python = wanted.python or f"{sys.version_info.major}.{sys.version_info.minor}"
        held = sorted({*self.base, *wanted.requirements})
        return self.folder / digest_json([_LAYOUT, python, held]).removeprefix("sha256:")[:16]

    def _make(self, place: Path, wanted: Environment) -> Mapping[str, Json]:
        requirements = [*self.base, *wanted.requirements]
        python, clean = str(place / "bin" / "python"), clean_environ()
        if self.uv:
            run_installer([self.uv, "venv", "--quiet", "--python", wanted.python or sys.executable, str(place)], clean)
            run_installer([self.uv, "pip", "install", "--quiet", "--python", python, *requirements], clean)
            freeze = run_installer([self.uv, "pip", "freeze", "--quiet", "--python", python], clean)
        else:
            run_installer([_interpreter(wanted.python), "-m", "venv", str(place)], clean)
            pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
            run_installer([*pip, "install", "--quiet", *requirements], clean)
            freeze = run_installer([*pip, "freeze", "--all"], clean)
        return {"requirements": requirements, "python": wanted.python, "installed": freeze.split()}


def find_uv() -> str | None:
    """The uv on the path, or beside this interpreter."""
    return shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))


def clean_environ() -> dict[str, str]:
    """This process's variables without those that would let one Python see into another, or choose for it."""
    return {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}


def _interpreter(asked: str | None) -> str:
    if asked is None:
        return sys.executable
    found = shutil.which(f"python{asked}")
    if found is None:
        raise NotFoundError(
            f"there is no python{asked} here",
            where="env.python",
            remedy="Install it, or install uv, which brings it.",
        )
    return found
