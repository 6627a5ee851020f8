"""JavaScript packages in folders of their own, by what they hold; made like environments of Python."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.adapters.isolation.places import made_once, run_installer
from onnx_ops.domain.artifact import digest_json
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import MeasurementError, UserError

_PINNED = re.compile(r"(?P<name>(@[a-z0-9~][\w.~-]*/)?[a-z0-9~][\w.~-]*)@(?P<version>\d+\.\d+\.\d+[\w.+-]*)")

_LAYOUT = 1
"""Raised when folders made by an older release cannot be used any more."""

NPM_REMEDY = "Install npm (Debian, Ubuntu: `apt-get install nodejs npm`), or bring the project's environments along."


@dataclass(frozen=True, slots=True, kw_only=True)
class NpmPackages:
    """Folders of packages below a folder, each named for the digest of its requirements."""

    folder: Path

    def installed(self, requirements: Sequence[str]) -> Path:
        """The folder whose `node_modules` holds the packages, which is made if it is not there.

        No script of a package is run: each is what its archive holds. Asks no network if the folder is there.

        Raises:
            UserError: a requirement is not an exact version.
            MeasurementError: there is no npm to make it with.
            StageError: the packages could not be installed.
        """
        pinned(requirements)
        place = self.folder / ("npm-" + digest_json([_LAYOUT, sorted(requirements)]).removeprefix("sha256:")[:16])
        made_once(place, place / "node_modules", lambda: _make(place, requirements))
        return place


def pinned(requirements: Sequence[str]) -> Mapping[str, str]:
    """Versions by name.

    Raises:
        UserError: a requirement is not `package@1.2.3`.
    """
    found = {requirement: _PINNED.fullmatch(requirement) for requirement in requirements}
    for requirement, match in found.items():
        if match is None:
            raise UserError(
                f"{requirement!r} is no exact version of a package",
                where="env.requirements",
                remedy="Write each as `package@1.2.3`. Registries are set in npm's own settings.",
            )
    return {match["name"]: match["version"] for match in found.values() if match}


def _make(place: Path, requirements: Sequence[str]) -> Mapping[str, Json]:
    npm = shutil.which("npm")
    if npm is None:
        raise MeasurementError("there is no npm here to install its packages", why="", remedy=NPM_REMEDY)
    place.mkdir()
    (place / "package.json").write_text('{"private": true}\n', encoding="utf-8")
    quiet = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-progress", "--save-exact", "--loglevel=error")
    run_installer([npm, "install", *quiet, *sorted(requirements)], os.environ, place)
    lock = json.loads((place / "package-lock.json").read_text(encoding="utf-8"))
    installed = {name: str(entry.get("version", "")) for name, entry in lock["packages"].items() if name}
    return {"requirements": sorted(requirements), "installed": installed}
