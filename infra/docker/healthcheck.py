"""Exit with 0 if the container's server answers its ping within two seconds."""

import os
import urllib.request

port = os.environ.get("ONNX_OPS_PORT") or os.environ.get("SAGEMAKER_BIND_TO_PORT") or "8080"
with urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=2):
    pass
