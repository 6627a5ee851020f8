"""The wheel and the source distribution, as they could be uploaded to an index."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest

from tests.install.bare_environments import PROJECT, ROOT, base_distributions
from tests.support.git import git

EPOCH = "1750000000"


def load_convert_readme() -> Callable[[str], str]:
    spec = importlib.util.spec_from_file_location("build_of_onnx_ops", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    convert: Callable[[str], str] = module.convert_readme
    return convert


def test_convert_readme_leaves_no_relative_link_and_names_pages_by_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = load_convert_readme()(text)
    links = re.findall(r"\]\(([^)]*)\)", shown)
    assert [link for link in links if not link.startswith("https://")] == []
    pages = re.findall(r"`onnx-ops docs ([\w/-]+)`", shown)
    assert len(pages) == len(re.findall(r"\]\(docs/[\w/-]+\.md", text)) > 10
    assert all((ROOT / "docs" / f"{page}.md").is_file() for page in pages)
    assert "<!--" not in shown
    assert shown.count("```") == text.count("```")


def test_metadata_has_no_urls_and_names_existing_licence_files() -> None:
    assert "urls" not in PROJECT
    assert all((ROOT / name).is_file() for name in PROJECT["license-files"])
    assert PROJECT["license"] == "Apache-2.0"


def copy_checkout(folder: Path, umask: int) -> Path:
    """Copy the files of the repository as a user with this umask would check them out."""
    names = git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (ROOT / name).exists():
            continue
        shutil.copyfile(ROOT / name, path, follow_symlinks=False)
        if not path.is_symlink():
            path.chmod(0o666 & ~umask)
    return folder


def build(source: Path, folder: Path) -> dict[str, bytes]:
    """Build both archives and return their bytes by name."""
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(folder), str(source)],
        env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH},
        capture_output=True,
        check=True,
    )
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archives")
    build(copy_checkout(folder / "source", 0o022), folder / "dist")
    return folder


@pytest.mark.nightly
def test_build_with_other_umask_in_other_folder_gives_same_bytes(
    archives: Path, tmp_path: Path
) -> None:
    first = {path.name: path.read_bytes() for path in sorted((archives / "dist").iterdir())}
    assert first == build(copy_checkout(tmp_path / "elsewhere", 0o002), tmp_path / "dist")
    version = PROJECT["version"]
    assert list(first) == [f"onnx_ops-{version}-py3-none-any.whl", f"onnx_ops-{version}.tar.gz"]


@pytest.mark.nightly
def test_source_distribution_builds_same_wheel_with_data_files_and_licence(
    archives: Path, tmp_path: Path
) -> None:
    (wheel,) = (archives / "dist").glob("*.whl")
    (source,) = (archives / "dist").glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    assert not (folder / "tests").exists()
    # A wheel that is built from the checkout has the same files.
    command = [sys.executable, "-m", "build", "--wheel", "--outdir"]
    for place, into in ((folder, "from-source"), (archives / "source", "from-checkout")):
        subprocess.run(
            [*command, str(tmp_path / into), str(place)],
            env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH},
            capture_output=True,
            check=True,
        )
    for into in ("from-source", "from-checkout"):
        (other,) = (tmp_path / into).iterdir()
        assert other.read_bytes() == wheel.read_bytes()
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    globs = patterns["tool"]["setuptools"]["package-data"]["onnx_ops"]
    with zipfile.ZipFile(wheel) as archive_of_wheel:
        names = set(archive_of_wheel.namelist())
        about = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive_of_wheel.read(about[0]).decode())
    for pattern in globs:
        for path in (ROOT / "onnx_ops").glob(pattern):
            assert not path.is_file() or path.relative_to(ROOT).as_posix() in names
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.nightly
def test_twine_check_of_archives_passes(archives: Path) -> None:
    files = list(map(str, (archives / "dist").iterdir()))
    command = ["uv", "tool", "run", "--from", "twine==7.0.0", "twine", "check", "--strict", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


@pytest.mark.nightly
def test_make_sbom_writes_packages_of_base_installation_beside_wheel(tmp_path: Path) -> None:
    source = copy_checkout(tmp_path / "source", 0o022)
    done = subprocess.run(
        ["make", "sbom", f"SOURCE_DATE_EPOCH={EPOCH}", f"PYTHON={sys.executable}"],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    bill = source / "dist" / f"onnx_ops-{PROJECT['version']}.cdx.json"
    document = json.loads(bill.read_text(encoding="utf-8"))
    assert document["bomFormat"] == "CycloneDX"
    assert document["metadata"]["component"]["name"] == "onnx-ops"
    versions = {
        one["name"].lower().replace("_", "-"): one["version"] for one in document["components"]
    }
    assert versions.keys() == base_distributions()
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").replace("_", "-").splitlines()
    tested = {f"{name}=={version}" for name, version in versions.items()}
    assert tested <= {pin.lower() for pin in pins}
    assert str(tmp_path) not in bill.read_text(encoding="utf-8")
