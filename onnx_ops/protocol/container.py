"""What lies in the model folder of a container, whichever cloud has put it there."""

from __future__ import annotations

from onnx_ops.domain.execution import CPU

DEPLOYMENT_FILE = "deployment.json"
"""The deployment; its `location` means nothing there."""
MODEL_FOLDER = "model"
"""Beside it: the version's files, and nothing else."""
PROVIDERS = (CPU,)
"""Execution providers of the build of ONNX Runtime that the image installs."""
