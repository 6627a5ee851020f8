"""What lies in the model folder of a container, whichever cloud has put it there."""

from __future__ import annotations

DEPLOYMENT_FILE = "deployment.json"
"""The deployment; its `location` means nothing there."""
MODEL_FOLDER = "model"
"""Beside it: the version's files, and nothing else."""
