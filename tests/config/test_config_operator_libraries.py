"""Libraries of custom operators that a target names by an installed package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from onnx_ops.config.loader import load_pipeline
from onnx_ops.config.reach import Reach
from onnx_ops.config.targets import TargetFiles
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.target import CustomOps
from onnx_ops.errors import ConfigError, NotReadyError

LIBRARY = b"\x7fELF of a library with RegisterCustomOps"
PACKAGED = "name: boards\ncustom_ops:\n  package: {}\n  domains: [acme]\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an installed package that raises an error when imported."""
    folder = tmp_path / "site" / "acme_operators"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise SystemExit('imported')\n")
    (folder / "_acme.cpython-311.so").write_bytes(LIBRARY)
    (folder / "_helper.so").write_bytes(b"\x7fELF of another library")
    monkeypatch.syspath_prepend(folder.parent)
    return folder


def write(project: Path, text: str) -> TargetFiles:
    (project / "configs/targets/boards.yaml").write_text(text)
    return TargetFiles(project)


def test_load_target_with_package_returns_library_of_package(project: Path, package: Path) -> None:
    files = write(project, PACKAGED.format("acme_operators"))
    library = package / "_acme.cpython-311.so"

    target = files.load("boards")

    assert target.custom_ops == (
        CustomOps(
            path=str(library),
            digest=digest_bytes(LIBRARY),
            package="acme_operators",
            domains=("acme",),
        ),
    )
    assert "acme_operators" not in sys.modules
    by_path = write(
        project,
        f"name: boards\ncustom_ops: {{path: {library}, digest: '{digest_bytes(LIBRARY)}', "
        "domains: [acme]}\n",
    )
    assert by_path.load("boards").digest() == target.digest()


def test_load_target_after_upgrade_of_package_returns_other_digest(
    project: Path, package: Path
) -> None:
    files = write(project, PACKAGED.format("acme_operators"))
    before = files.load("boards").digest()

    (package / "_acme.cpython-311.so").write_bytes(LIBRARY + b" 2")

    assert files.load("boards").digest() != before


def test_load_target_with_missing_package_reports_place_and_remedy(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    files = write(project, PACKAGED.format("onnxruntime_extensions"))

    with pytest.raises(NotReadyError) as caught:
        files.load("boards")

    (problem,) = caught.value.problems
    assert (problem.line, problem.column, problem.path) == (3, 12, "custom_ops.package")
    assert "package onnxruntime_extensions is not installed" in problem.message
    assert problem.message.endswith("pip install 'onnx-ops[images]'")


@pytest.mark.parametrize(
    ("entry", "path", "message"),
    [
        ("package: ../acme_operators", ".package", "as Python imports it"),
        ("package: /etc/acme_operators", ".package", "as Python imports it"),
        ("package: acme_operators.inner", ".package", "as Python imports it"),
        ("package: acme-operators", ".package", "as Python imports it"),
        ("package: ''", ".package", "as Python imports it"),
        ('package: "acme_operators\\n"', ".package", "as Python imports it"),
        ("package: json", ".package", "has no library of custom operators"),
        ("package: sys", ".package", "has no library of custom operators"),
        ("package: acme_operators\n  path: a.so", ".path", "'package' and 'path' exclude"),
        (
            f"package: acme_operators\n  digest: {digest_bytes(b'')}",
            ".digest",
            "'package' and 'digest' exclude",
        ),
        ("path: a.so", "", "missing key 'digest'"),
        (f"digest: {digest_bytes(b'')}", "", "missing key 'path'"),
    ],
)
def test_load_target_with_wrong_library_reports_its_place(
    project: Path, package: Path, entry: str, path: str, message: str
) -> None:
    files = write(project, f"name: boards\ncustom_ops:\n  {entry}\n  domains: [acme]\n")

    with pytest.raises(ConfigError) as caught:
        files.load("boards")

    assert not isinstance(caught.value, NotReadyError)
    (problem,) = caught.value.problems
    assert problem.path == f"custom_ops{path}"
    assert message in problem.message


def test_load_target_without_library_reports_missing_keys(project: Path) -> None:
    files = write(project, "name: boards\ncustom_ops: [{domains: [acme]}]\n")

    with pytest.raises(ConfigError, match=r"2:14: custom_ops\[0\]: a library needs 'path' and"):
        files.load("boards")


def test_load_target_of_package_with_several_libraries_lists_them(
    project: Path, package: Path
) -> None:
    (package / "_acme_gpu.so").write_bytes(LIBRARY)
    files = write(project, PACKAGED.format("acme_operators"))

    with pytest.raises(ConfigError, match=r"_acme\.cpython-311\.so, _acme_gpu\.so; copy one"):
        files.load("boards")


def test_load_pipeline_allows_package_of_extra_or_of_settings(project: Path, package: Path) -> None:
    write(project, PACKAGED.format("acme_operators"))
    file = project / "toy.yaml"
    file.write_text(file.read_text().replace("[cpu-1t]", "[cpu-1t, boards]"))

    with pytest.raises(ConfigError, match=r"add acme_operators to allowed_packages"):
        load_pipeline(file, root=project)
    load_pipeline(file, root=project, reach=Reach(packages=("acme_operators",)))
    write(project, PACKAGED.format("onnxruntime_extensions"))
    load_pipeline(file, root=project)


def test_load_pipeline_without_machine_check_accepts_target_of_missing_package(
    project: Path,
) -> None:
    write(project, PACKAGED.format("acme_missing"))
    file = project / "toy.yaml"
    file.write_text(file.read_text().replace("[cpu-1t]", "[cpu-1t, boards]"))

    with pytest.raises(NotReadyError, match="package acme_missing is not installed"):
        load_pipeline(file, root=project)
    load_pipeline(file, root=project, machine=False)


def test_load_pipeline_without_machine_check_reports_opset_above_target_of_missing_package(
    project: Path,
) -> None:
    write(project, PACKAGED.format("acme_missing") + "\nmax_opset: 15\n")
    file = project / "toy.yaml"
    file.write_text(file.read_text().replace("[cpu-1t]", "[cpu-1t, boards]"))

    with pytest.raises(ConfigError, match="target 'boards' accepts opset <= 15") as caught:
        load_pipeline(file, root=project, machine=False)
    assert not isinstance(caught.value, NotReadyError)
