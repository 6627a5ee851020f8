"""Run the command line by `python -m onnx_ops` instead of the script `onnx-ops`.

Use it if the interpreter's scripts are not on `PATH`.
"""

from onnx_ops.cli.main import main

main()
