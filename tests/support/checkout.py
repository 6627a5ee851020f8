"""Copies of parts of this checkout, as a start for other projects."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.processes import ROOT


def copy_parts(folder: Path, *names: str) -> None:
    """Copy files and folders of this checkout to the same places below another folder."""
    for name in names:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(ROOT / name, place)
