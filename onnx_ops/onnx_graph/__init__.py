"""Read and rewrite ONNX files.

Functions that read a file raise as `files.read_structure` does, unless documented.
"""
