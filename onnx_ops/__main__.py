"""`python -m onnx_ops`: the command line for an interpreter whose scripts are not on the path."""

from onnx_ops.cli.main import main

main()
