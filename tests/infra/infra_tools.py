"""Helpers that the tests of infra/ share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INFRA = ROOT / "infra"


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command of this environment from the project's root."""
    command = [str(Path(sys.executable).with_name(name)), *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def steps(of: Any) -> Iterator[dict[str, Any]]:
    """Yield all steps below a value of a workflow, an action or an Azure pipeline."""
    if isinstance(of, dict):
        if {"run", "uses", "script", "task", "checkout", "publish"} & set(of):
            yield of
        for value in of.values():
            yield from steps(value)
    elif isinstance(of, list):
        for value in of:
            yield from steps(value)
