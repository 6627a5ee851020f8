"""`python -m onnx_ops`: the command line without its script.

It is for an interpreter whose scripts are not on the path.
"""

from onnx_ops.cli.main import main

main()
