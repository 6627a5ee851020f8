"""Find the folders of a project's pipelines and targets.

The files are in `configs/`, or in `onnx-ops/` within another project.
"""

from __future__ import annotations

from pathlib import Path

OWN = Path("configs")
"""The folder of pipelines and targets in a project that `onnx-ops init` created."""

WITHIN = Path("onnx-ops")
"""The folder of pipelines and targets in a repository to which onnx-ops was added.

Its name contains a hyphen, so that build tools do not treat the folder as a package.
"""

PIPELINES, TARGETS = "pipelines", "targets"


def find_config_folder(root: Path) -> Path:
    """Return the folder of pipelines and targets, relative to the project's root.

    The folder is `onnx-ops/` if it contains `pipelines/`, and `configs/` otherwise.
    """
    return WITHIN if (root / WITHIN / PIPELINES).is_dir() else OWN


def find_pipelines(root: Path) -> list[Path]:
    """Return the project's pipeline files, sorted."""
    return sorted((root / find_config_folder(root) / PIPELINES).glob("*.yaml"))


def list_source_folders(root: Path) -> list[Path]:
    """Return the folders in which Python searches for the project's modules.

    These are the root, and `src/` unless it is a package itself.
    """
    src = root / "src"
    return [root, src] if src.is_dir() and not (src / "__init__.py").is_file() else [root]
