"""What the tests of infra/ share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INFRA = ROOT / "infra"


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A command of this environment, run from the project's root."""
    command = [str(Path(sys.executable).with_name(name)), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
