"""Python environments of their own, by what they hold: made once, whole or not at all, and used again offline."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from onnx_ops.adapters.isolation.output import last_lines
from onnx_ops.adapters.objects import durable_file
from onnx_ops.domain.artifact import digest_json
from onnx_ops.domain.pipeline import Environment
from onnx_ops.errors import NotFound, StageFailure, UserError

MARKER = "onnx-ops.json"
"""Written last: an environment without it was being made when its maker died."""

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
            NotFound: there is no such Python.
            StageFailure: the packages could not be installed.
        """
        place = self.place(wanted)
        with _locked(place.with_suffix(".lock")):
            python = place / "bin" / "python"
            if not ((place / MARKER).is_file() and python.exists()):
                shutil.rmtree(place, ignore_errors=True)
                self._make(place, wanted)
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

    def _make(self, place: Path, wanted: Environment) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        requirements = [*self.base, *wanted.requirements]
        python = str(place / "bin" / "python")
        if self.uv:
            _run([self.uv, "venv", "--quiet", "--python", wanted.python or sys.executable, str(place)])
            _run([self.uv, "pip", "install", "--quiet", "--python", python, *requirements])
            freeze = _run([self.uv, "pip", "freeze", "--quiet", "--python", python])
        else:
            _run([_interpreter(wanted.python), "-m", "venv", str(place)])
            pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
            _run([*pip, "install", "--quiet", *requirements])
            freeze = _run([*pip, "freeze", "--all"])
        document = {"requirements": requirements, "python": wanted.python, "installed": freeze.split()}
        with durable_file(place / MARKER) as temporary:
            temporary.write_text(json.dumps(document, indent=1), encoding="utf-8")


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
        raise NotFound(
            f"there is no python{asked} here",
            where="env.python",
            remedy="Install it, or install uv, which brings it.",
        )
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command,
        env=clean_environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        raise StageFailure(
            "its environment cannot be made",
            where="env.requirements",
            why=last_lines(done.stdout),
            remedy="Mend the requirements, or look whether the package index can be reached; then run again.",
        )
    return done.stdout.decode("utf-8", errors="replace")
