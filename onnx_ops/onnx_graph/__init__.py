"""Read and rewrite ONNX files.

Functions that read a file also raise the errors of `files.read_structure`, unless their docstring
excludes them.
"""
