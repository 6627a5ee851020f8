"""Packages of JavaScript in folders of their own, with the real npm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onnx_ops.adapters.isolation.environments import MARKER, NpmPackages, parse_pins
from onnx_ops.errors import MeasurementError, StageError, UserError
from tests.adapters.runtime_places import require

SMALL = "long@5.3.2"


@pytest.fixture
def packages(tmp_path: Path) -> NpmPackages:
    require("npm")
    return NpmPackages(folder=tmp_path / "environments")


def test_they_are_made_once_whole_and_used_again_without_npm(
    packages: NpmPackages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = packages.installed((SMALL,))
    assert json.loads((place / "node_modules/long/package.json").read_text())["version"] == "5.3.2"
    assert json.loads((place / MARKER).read_text())["installed"] == {"node_modules/long": "5.3.2"}
    made = (place / MARKER).stat().st_mtime_ns
    monkeypatch.setenv("PATH", str(tmp_path))
    assert packages.installed((SMALL,)) == place
    assert (place / MARKER).stat().st_mtime_ns == made
    (place / MARKER).unlink()  # as if its maker had died
    with pytest.raises(MeasurementError, match="no npm") as missing:
        packages.installed((SMALL,))
    assert "apt-get install" in missing.value.remedy


def test_a_version_that_is_not_there_is_told_with_npm_s_words(packages: NpmPackages) -> None:
    with pytest.raises(StageError, match="cannot be made") as failure:
        packages.installed(("long@999.0.0",))
    assert "999.0.0" in failure.value.why
    assert not list(packages.folder.glob(f"*/{MARKER}"))


def test_exact_versions_are_told_apart_from_everything_else() -> None:
    exact = ("onnxruntime-web@1.30.0", "@scope/name@1.2.3-rc.1")
    assert parse_pins(exact) == {"onnxruntime-web": "1.30.0", "@scope/name": "1.2.3-rc.1"}
    others = "name name@latest name@^1.2.3 name@1.2 ./name@1.2.3 --flag@1.2.3 git+ssh://x@1.2.3"
    for other in ("", *others.split()):
        with pytest.raises(UserError, match="exact version"):
            parse_pins((other,))
