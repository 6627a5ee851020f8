"""Models in memory: verified, loaded, warmed up."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from onnx_ops.domain.artifact import Manifest, TensorSpec, digest_file, short
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import DigestMismatch, EnvironmentFailure, NotFound, UserError
from onnx_ops.ports.models import Array, Tensors
from onnx_ops.protocol.tensors import DTYPE_OF_ONNX, numpy_dtype

_log = logging.getLogger(__name__)

MODEL_FILE = "model.onnx"

_WARM_UP_RUNS = 3
_RUNTIME_ERRORS = (
    ort_errors.EPFail,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """One deployment, ready to run. `run` may be called from several threads at once."""

    deployment: Deployment
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    session: Any

    def run(self, feed: Tensors, outputs: Sequence[str]) -> dict[str, Array]:
        """The named outputs for one feed of every input.

        Raises:
            UserError: the runtime refuses the inputs.
            EnvironmentFailure: the run failed.
        """
        try:
            values = self.session.run(list(outputs), feed)
        except ort_errors.InvalidArgument as error:
            raise UserError("the model refuses these inputs", why=first_line(error)) from error
        except _RUNTIME_ERRORS as error:
            raise EnvironmentFailure("the model failed on these inputs", why=first_line(error)) from error
        return dict(zip(outputs, values, strict=True))


def load_model(deployment: Deployment) -> LoadedModel:
    """Verify the deployment's files, load the model and run it a few times.

    Raises:
        NotFound: the folder or its model file is not there.
        DigestMismatch: a file is not what the deployment's manifest says.
        UserError: the model has an input or output that the JSON protocol cannot carry.
        EnvironmentFailure: the runtime cannot load or run the model.
    """
    folder = Path(deployment.location)
    verify(folder, deployment)
    path = folder / MODEL_FILE
    if not path.is_file():
        raise NotFound(f"no {MODEL_FILE} there", where=str(folder))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # errors are raised anyway; clients must not be able to fill the log
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except _RUNTIME_ERRORS as error:
        raise EnvironmentFailure("the runtime cannot load the model", where=str(path), why=first_line(error)) from error
    model = LoadedModel(
        deployment=deployment,
        inputs={node.name: _spec(node, path) for node in session.get_inputs()},
        outputs={node.name: _spec(node, path) for node in session.get_outputs()},
        session=session,
    )
    warm_up(model)
    return model


def verify(folder: Path, deployment: Deployment) -> None:
    """Compare every file below the folder with the deployment's manifest.

    Raises:
        NotFound: there is no such folder.
        DigestMismatch: the files are not those of the manifest.
        EnvironmentFailure: a file cannot be read.
    """
    if not folder.is_dir():
        raise NotFound("the model folder is not there", where=str(folder))
    try:
        files = {p.relative_to(folder).as_posix(): digest_file(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    except OSError as error:
        raise EnvironmentFailure("the model's files cannot be read", where=str(folder), why=str(error)) from error
    found = Manifest(files=files).digest()
    if found != deployment.manifest:
        raise DigestMismatch(
            f"digest mismatch: the manifest of {deployment.name} is {short(deployment.manifest)}",
            where=str(folder),
            why=f"the files there have {short(found)}",
            remedy="Fetch the version again; its files were changed after they were registered.",
        )


def warm_up(model: LoadedModel) -> None:
    """Run the model on zeros, with size 1 for every dimension that is free.

    Raises:
        EnvironmentFailure: the model fails although nothing but the batch size was guessed.
    """
    feed = {name: _zeros(spec) for name, spec in model.inputs.items()}
    guessed = any(isinstance(d, str) for spec in model.inputs.values() for d in spec.shape[1:])
    try:
        for _ in range(_WARM_UP_RUNS):
            model.run(feed, tuple(model.outputs))
    except (UserError, EnvironmentFailure) as error:
        if not guessed:
            raise EnvironmentFailure(
                "the model fails on zeros", where=model.deployment.location, why=error.why
            ) from error
        _log.warning("%s is not warm: it does not run on free dimensions of size 1", model.deployment.name)


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:500]


def _zeros(spec: TensorSpec) -> Array:
    shape = tuple(d if isinstance(d, int) else 1 for d in spec.shape)
    return np.full(shape, "", dtype=object) if spec.dtype == "string" else np.zeros(shape, numpy_dtype(spec.dtype))


def _spec(node: Any, path: Path) -> TensorSpec:
    dtype = DTYPE_OF_ONNX.get(node.type)
    if dtype is None:
        raise UserError(
            f"{node.name} is a {node.type}, which the JSON protocol cannot carry",
            where=str(path),
            remedy="Export the model with tensors only (for scikit-learn classifiers: without ZipMap).",
        )
    shape = tuple(d if isinstance(d, int) else str(d or "?") for d in node.shape)
    return TensorSpec(name=node.name, dtype=dtype, shape=shape)
