"""Programs that the runtimes of JavaScript need of a machine."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from onnx_ops.domain.target import Diagnosis
from onnx_ops.errors import MeasurementError

NODE = ("node", "nodejs")
BROWSER = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

_REMEDIES = {
    "node": "Install Node.js 18 or newer (Debian, Ubuntu: `apt-get install nodejs npm`).",
    "npm": "Install npm (Debian, Ubuntu: `apt-get install npm`).",
    "chromium": "Install Chromium (Debian: `apt-get install chromium`).",
}


def find(names: Sequence[str]) -> str | None:
    """The first of the programs that is on the path."""
    return next((place for name in names if (place := shutil.which(name))), None)


def needed(names: Sequence[str], target: str) -> str:
    """The program's place.

    Raises:
        MeasurementError: it is not on the path.
    """
    place = find(names)
    if place is None:
        raise MeasurementError(
            f"there is no {names[0]} on this machine", where=f"target {target}", remedy=_REMEDIES[names[0]]
        )
    return place


def version_of(names: Sequence[str]) -> str:
    """What the program says of its version, without its name; `not installed` if there is none."""
    place = find(names)
    return _said(place) if place else "not installed"


def diagnosed(check: str, needs: Sequence[Sequence[str]]) -> Iterator[Diagnosis]:
    """One line: what is there, or what is missing. A runtime that nobody uses here is no fault."""
    missing = [names[0] for names in needs if find(names) is None]
    if missing:
        remedy = " ".join(_REMEDIES[name] for name in missing)
        yield Diagnosis(check=check, ok=True, absent=True, found=f"not installed: {', '.join(missing)}", remedy=remedy)
    else:
        yield Diagnosis(check=check, ok=True, found=", ".join(f"{names[0]} {version_of(names)}" for names in needs))


@functools.cache
def _said(place: str) -> str:
    try:
        done = subprocess.run([place, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "does not answer"
    words = [word.removeprefix("v") for word in done.stdout.split()]
    return next((word for word in words if word[:1].isdecimal()), "unknown")
