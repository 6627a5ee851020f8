"""Folders that are made once, whole or not at all, and then used without a question to anybody."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from onnx_ops.adapters.isolation.output import last_lines
from onnx_ops.adapters.objects import durable_file
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import StageError

MARKER = "onnx-ops.json"
"""Written last: a folder without it was being made when its maker died."""


def made_once(place: Path, needed: Path, make: Callable[[], Mapping[str, Json]]) -> None:
    """Have `make` fill the folder `place`, unless it is whole; its answer is kept in the marker.

    Args:
        place: the folder; others may ask for it at the same time.
        needed: a file below it, without which it is not whole.
        make: fills it.
    """
    with locked(place.with_suffix(".lock")):
        if (place / MARKER).is_file() and needed.exists():
            return
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        document = make()
        with durable_file(place / MARKER) as temporary:
            temporary.write_text(json.dumps(document, indent=1), encoding="utf-8")


def run_installer(command: list[str], environ: Mapping[str, str], folder: Path | None = None) -> str:
    """What it prints.

    Raises:
        StageError: it failed.
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
            "its environment cannot be made",
            where="env.requirements",
            why=last_lines(done.stdout),
            remedy="Mend the requirements, or look whether the package index can be reached; then run again.",
        )
    return done.stdout.decode("utf-8", errors="replace")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock; the file is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
