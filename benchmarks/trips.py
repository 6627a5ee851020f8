"""Count the files and functions of the package that a command enters.

Only the command's own process is counted.

cd PROJECT && python -m benchmarks.trips rollback digits --reason test
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

import onnx_ops

ROOT = Path(onnx_ops.__file__).parent


def main() -> None:
    """Run `onnx-ops` with the arguments of this process, and print what it entered."""
    from onnx_ops.cli.main import app

    entered: set[tuple[str, str]] = set()

    def record(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_function = bool(code.co_flags & inspect.CO_NEWLOCALS) and not code.co_name.startswith(
            "<"
        )
        if event == "call" and is_function and code.co_filename.startswith(str(ROOT)):
            entered.add((code.co_filename, code.co_qualname))

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        app(sys.argv[1:], standalone_mode=False)
    except SystemExit as end:
        print(f"exit code {end.code}")
    finally:
        sys.setprofile(None)
    files = {Path(name).relative_to(ROOT) for name, _ in entered if name.endswith(".py")}
    print(f"{len(files)} files, {len(entered)} functions")
    print(
        ", ".join(
            f"{room} {count}"
            for room, count in Counter(file.parts[0] for file in files).most_common()
        )
    )


if __name__ == "__main__":
    main()
