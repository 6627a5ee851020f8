"""Run the command line with `python -m onnx_ops` instead of the script `onnx-ops`.

Use this command if the interpreter's scripts are not on `PATH`.
"""

from onnx_ops.cli.main import main

main()
