"""The entrypoint of the image, which serves the model of the container.

Usage: `python -m onnx_ops.serving.container [serve]`.

`ONNX_OPS_MODEL_DIR` or `AZUREML_MODEL_DIR` names the model's folder; default: `/opt/ml/model`. The
files are in this folder, or in a folder at most three levels below it. They are either a
`deployment.json` beside the version's files in `model/`, or a `model.onnx` with the other files of
the model.

With `ONNX_OPS_FOLLOW` and `ONNX_OPS_REPORTS`, the container is a replica. It follows the tables at
the first URL, and writes its reports to the second URL.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from onnx_ops import codec
from onnx_ops.config.server_options import list_options
from onnx_ops.domain.artifact import MODEL_FILE, digest_bytes, digest_folder
from onnx_ops.domain.endpoint import Deployment, EndpointState, TrafficSplit
from onnx_ops.errors import InfrastructureError, NotFoundError, OnnxOpsError, UserError
from onnx_ops.protocol.routing_table import TableFile, build_next_table
from onnx_ops.protocol.server_process import (
    DEPLOYMENT_FILE,
    FOLLOW_VARIABLE,
    IMAGE_VARIABLE,
    MODEL_FOLDER,
    OPTION_PREFIX,
    REPORTS_VARIABLE,
)
from onnx_ops.serving import main as server
from onnx_ops.serving.inference.integrity import COPIES_FOLDER, ModelCopies

_FOLDERS = ("ONNX_OPS_MODEL_DIR", "AZUREML_MODEL_DIR")
_SAGEMAKER_FOLDER = "/opt/ml/model"
_PORTS = ("ONNX_OPS_PORT", "SAGEMAKER_BIND_TO_PORT")
_REPLICA_VARIABLES = {
    "follow": FOLLOW_VARIABLE,
    "reports": REPORTS_VARIABLE,
    "replica": "ONNX_OPS_REPLICA",
    "address": "ONNX_OPS_ADDRESS",
    "image": IMAGE_VARIABLE,
}
"""Flags of the follower, with the environment variables that set them."""
_ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 (the container's own network; the cloud calls from outside)
_MAX_DEPTH = 3
"""Levels of folders below the model's folder that are also searched for the model.

Azure ML mounts a model below `AZUREML_MODEL_DIR`, in a folder with the model's name or path.
"""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Serve until the container is stopped; return the exit code."""
    try:
        if list(arguments) not in ([], ["serve"]):
            raise UserError(
                f"unknown argument: {' '.join(arguments)}", remedy="Use no argument, or `serve`."
            )
        folder = _make_folder(environment)
        if environment.get(FOLLOW_VARIABLE):
            _follow(folder, environment)
        deployment = find_deployment(
            Path(_get_first(environment, _FOLDERS) or _SAGEMAKER_FOLDER), environment
        )
        # The server verifies the signatures when it loads the model.
        ModelCopies(folder / COPIES_FOLDER).fetch(deployment)
        state = EndpointState(
            deployments=(deployment,),
            split=TrafficSplit(weights={deployment.name: 100}),
            generation=1,
        )
        TableFile(folder).write(build_next_table(None, state))
    except OnnxOpsError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return server.main([*_list_flags(folder, environment), "--must-load"])


def _make_folder(environment: Mapping[str, str]) -> Path:
    configured = environment.get("ONNX_OPS_STATE_DIR")
    try:
        # A temporary folder is enough: nothing in it is needed after the container ends.
        folder = Path(configured or tempfile.mkdtemp(prefix="onnx-ops-"))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InfrastructureError(
            "the folder for the server's state could not be created",
            why=str(error),
            remedy="Set ONNX_OPS_STATE_DIR to a writable folder, or mount one at /tmp.",
        ) from error
    return folder


def _list_flags(folder: Path, environment: Mapping[str, str]) -> list[str]:
    """Return the server's arguments, from the container's environment variables."""
    names = [
        name for name, _, _, _ in list_options() if f"{OPTION_PREFIX}{name.upper()}" in environment
    ]
    flags = [
        f"--{name.replace('_', '-')}={environment[OPTION_PREFIX + name.upper()]}" for name in names
    ]
    host, port = (
        environment.get("ONNX_OPS_HOST", _ALL_ADDRESSES),
        _get_first(environment, _PORTS) or "8080",
    )
    return ["--state-dir", str(folder), "--host", host, "--port", port, *flags]


def _follow(folder: Path, environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by the follower, which starts the server.

    The server does not get the credentials of the store.
    """
    given = {flag: environment.get(name, "") for flag, name in _REPLICA_VARIABLES.items()}
    if not given["reports"]:
        raise UserError(
            "ONNX_OPS_FOLLOW is set without ONNX_OPS_REPORTS",
            remedy="Set ONNX_OPS_REPORTS to the URL for the replica's reports.",
        )
    own = [f"--{flag}={value}" for flag, value in given.items()]
    command = [
        sys.executable,
        "-m",
        "onnx_ops.app.follower",
        *_list_flags(folder, environment),
        *own,
    ]
    os.execve(sys.executable, [*command, "--log=/dev/stdout"], dict(environment))  # noqa: S606 (a list, no shell)


def find_deployment(root: Path, environment: Mapping[str, str]) -> Deployment:
    """Return the deployment in a model folder, or in a folder below it.

    Without `deployment.json`, the names come from the environment, and the manifest from the files.

    Raises:
        NotFoundError: no folder contains a deployment or a model.
        InfrastructureError: a folder cannot be read.
        CorruptStateError: `deployment.json` is not a deployment.
    """
    try:
        level = [root]
        for _ in range(_MAX_DEPTH + 1):
            for folder in level:
                record = folder / DEPLOYMENT_FILE
                if record.is_file():
                    deployment = codec.loads(record.read_bytes(), Deployment, where=str(record))
                    return replace(deployment, location=str((folder / MODEL_FOLDER).resolve()))
                if (folder / MODEL_FILE).is_file():
                    return Deployment(
                        name=environment.get("ONNX_OPS_DEPLOYMENT", "model"),
                        model=environment.get("ONNX_OPS_MODEL", "model"),
                        version="1",
                        variant="",
                        release=digest_bytes(b""),
                        manifest=digest_folder(folder).digest(),
                        location=str(folder.resolve()),
                    )
            level = sorted(
                path
                for folder in level
                if folder.is_dir()
                for path in folder.iterdir()
                if path.is_dir()
            )
    except OSError as error:
        raise InfrastructureError(
            "the model's folder cannot be read", where=str(root), why=str(error)
        ) from error
    raise NotFoundError(
        f"there is neither {DEPLOYMENT_FILE} nor {MODEL_FILE} in the folder or up to {_MAX_DEPTH} "
        "levels below",
        where=str(root),
        remedy=f"Set {_FOLDERS[0]} to the folder of the model, or mount it at {_SAGEMAKER_FOLDER}.",
    )


def _get_first(environment: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)


if __name__ == "__main__":
    code = main(sys.argv[1:], os.environ)
    logging.shutdown()
    # No remaining thread may delay the exit: a cloud service kills a container that ends too late.
    os._exit(code)
