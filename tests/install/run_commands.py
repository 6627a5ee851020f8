"""A program that runs command lines in one process.

It reads them from standard input as JSON, and writes the result of each.
"""

from __future__ import annotations

import json
import os
import sys

from typer.testing import CliRunner

from onnx_ops.cli.main import app


def main() -> None:
    results = []
    for arguments, environ in json.load(sys.stdin):
        done = CliRunner().invoke(app, arguments, env=environ)
        error = None if isinstance(done.exception, SystemExit | None) else repr(done.exception)
        results.append({"code": done.exit_code, "output": done.output, "error": error})
    os.write(1, json.dumps(results).encode())


if __name__ == "__main__":
    main()
