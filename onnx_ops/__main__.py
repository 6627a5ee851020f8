"""`python -m onnx_ops`: the command line without its script.

Use it if the scripts of the interpreter are not on the path.
"""

from onnx_ops.cli.main import main

main()
