"""Draw the picture of the README.

It shows the terminal output of `make demo` after the first release.

python docs/picture.py
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "demo.svg"
WIDTH = 120
"""Width of the picture in columns; longer lines are wrapped."""


def main() -> None:
    """Run the demo and draw its output."""
    command = [sys.executable, ROOT / "examples" / "demo.py"]
    environ = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    begin, end = (
        next(i for i, line in enumerate(lines) if part in line)
        for part in ("── 2.", "requests were sent")
    )
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print("[bold]$ make demo[/bold]\n[dim]…[/dim]")
    console.print(
        Text.from_ansi("\n".join(lines[begin : end + 1]).replace(str(ROOT), "~/onnx-ops"))
    )
    PICTURE.write_text(console.export_svg(title="onnx-ops", unique_id="demo"), encoding="utf-8")


if __name__ == "__main__":
    main()
