"""Read and rewrite ONNX files. What reads a file raises as `files.read_structure` does, unless it says otherwise."""
