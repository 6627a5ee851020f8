"""Models in memory: verified, loaded, warmed up."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from onnx_ops.domain.artifact import MODEL_FILE, TensorSpec
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.evidence import NAN_PROPERTY
from onnx_ops.errors import InfrastructureError, NotFoundError, UserError
from onnx_ops.ports.data import Array, Tensors
from onnx_ops.protocol.tensors import DTYPE_OF_ONNX, numpy_dtype
from onnx_ops.serving.bits import run_bits
from onnx_ops.serving.http import Unfit
from onnx_ops.serving.sessions import RUNTIME_ERRORS, Prepacked, first_line, open_session
from onnx_ops.serving.verified import Trust, verify
from onnx_ops.serving.wire import Signature

_log = logging.getLogger(__name__)


_WARM_UP_RUNS = 3
_SEED = 20_240_229


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """One deployment, ready to run. `run` may be called from several threads at once.

    `native` is the runtime's own function behind `session.run`, which looks for missing inputs once more and for other
    providers to fall back to: a sixth of a small model's run. It gets `options`, which a run only reads, since it takes
    as long again to see that there are none. `seconds` is how long a run on one row takes; 0 if that is not known.
    """

    deployment: Deployment
    signature: Signature
    session: Any
    native: Callable[..., Any]
    options: Any = field(default_factory=ort.RunOptions)
    seconds: float = 0.0

    def run(self, outputs: Sequence[str], feed: Tensors) -> Sequence[Array]:
        """The named outputs for one feed of every required input.

        Raises:
            Unfit: the runtime refuses the inputs.
            InfrastructureError: the run failed.
        """
        try:
            if self.signature.holds_bits:
                return run_bits(self.session, self.signature, feed, outputs)
            arrays: Sequence[Array] = self.native(outputs, feed, self.options)
        except ort_errors.InvalidArgument as error:
            raise Unfit("the model refuses these inputs", why=first_line(error)) from error
        except RUNTIME_ERRORS as error:
            raise InfrastructureError("the model failed on these inputs", why=first_line(error)) from error
        return arrays


def load_model(deployment: Deployment, prepacked: Prepacked | None = None, trust: Trust | None = None) -> LoadedModel:
    """Verify the deployment's files, load the model and run it a few times.

    Args:
        deployment: what to load.
        prepacked: where large models are kept in the form that this processor likes best.
        trust: whose word lets it be loaded; None if the caller's does.

    Raises:
        RefusedError: nobody who is trusted has signed for these files.
        NotFoundError: the folder or its model file is not there.
        DigestMismatchError: a file is not what the deployment's manifest says.
        UserError: the model has an input or output that the protocol cannot carry.
        InfrastructureError: the runtime cannot load or run the model.
    """
    folder = Path(deployment.location)
    verify(folder, deployment, trust)
    path = folder / MODEL_FILE
    if not path.is_file():
        raise NotFoundError(f"no {MODEL_FILE} there", where=str(folder))
    libraries = [folder / name for name in deployment.custom_ops]
    try:
        if prepacked is None:
            session = open_session(path, deployment.execution, libraries=libraries)
        else:
            session = prepacked.session(path, deployment, libraries)
    except RUNTIME_ERRORS as error:
        raise InfrastructureError(
            "the runtime cannot load the model", where=str(path), why=first_line(error)
        ) from error
    native = getattr(getattr(session, "_sess", None), "run", session.run)
    signature = _signature(session, deployment, path)
    model = LoadedModel(deployment=deployment, signature=signature, session=session, native=native)
    return replace(model, seconds=warm_up(model))


def warm_up(model: LoadedModel) -> float:
    """Run the model on zeros, with size 1 for every dimension that is free.

    Returns:
        The seconds of the last run; 0 if the model does not run on such sizes or categories.

    Raises:
        InfrastructureError: the model fails although nothing but the batch size and numbers was guessed.
    """
    feed = {name: _zeros(model.signature.inputs[name]) for name in model.signature.required}
    guessed = any(_may_be_refused(model.signature.inputs[name]) for name in feed)
    began = 0.0
    try:
        for _ in range(_WARM_UP_RUNS):
            began = time.perf_counter()
            model.run(tuple(model.signature.outputs), feed)
    except (UserError, InfrastructureError) as error:
        if not guessed:
            raise InfrastructureError(
                "the model fails on zeros", where=model.deployment.location, why=error.why
            ) from error
        _log.warning("%s is not warm: it does not run on zeros, empty texts and sizes of 1", model.deployment.name)
        return 0.0
    return time.perf_counter() - began


def _may_be_refused(spec: TensorSpec) -> bool:
    """Whether zeros of this input are a guess: of its size, or of a column whose categories the model knows."""
    sizes = spec.shape[1:]
    return any(isinstance(d, str) for d in sizes) or spec.dtype == "string" or (spec.dtype == "int64" and sizes == (1,))


def run_on_random(model: LoadedModel) -> None:
    """Run the model once on random numbers of size 1 in every free dimension. It may refuse them."""
    random = np.random.default_rng(_SEED)
    feed = {name: _random(model.signature.inputs[name], random) for name in model.signature.required}
    with contextlib.suppress(Unfit, InfrastructureError):
        model.run(tuple(model.signature.outputs), feed)


def _random(spec: TensorSpec, random: np.random.Generator) -> Array:
    zeros = _zeros(spec)
    # Integers may be indices, which must stay in range.
    return random.standard_normal(zeros.shape).astype(zeros.dtype) if zeros.dtype.kind == "f" else zeros


def _zeros(spec: TensorSpec) -> Array:
    shape = tuple(d if isinstance(d, int) else 1 for d in spec.shape)
    return np.full(shape, "", dtype=object) if spec.dtype == "string" else np.zeros(shape, numpy_dtype(spec.dtype))


def _signature(session: Any, deployment: Deployment, path: Path) -> Signature:
    """The model's tensors. Inputs of ONNX's optional type may be left out; so may inputs with a default of a single
    element. Larger defaults are weights of a model that was exported with them as inputs, and no client's business.
    """
    nodes = session.get_inputs()
    defaults = [node for node in session.get_overridable_initializers() if set(node.shape) <= {1}]
    inputs = {node.name: _spec(node, path) for node in (*nodes, *defaults)}
    signature = Signature(
        model=deployment.model,
        version=deployment.version,
        inputs=inputs,
        outputs={node.name: _spec(node, path) for node in session.get_outputs()},
        optional=frozenset(n.name for n in nodes if n.type.startswith("optional(")) | {n.name for n in defaults},
        refuses_nan=session.get_modelmeta().custom_metadata_map.get(NAN_PROPERTY) == "refused",
    )
    if signature.holds_bits and any(spec.dtype == "string" for spec in inputs.values()):
        raise UserError("the runtime takes no text beside bfloat16", where=str(path))
    return signature


def _spec(node: Any, path: Path) -> TensorSpec:
    kind = node.type.removeprefix("optional(")[:-1] if node.type.startswith("optional(") else node.type
    dtype = DTYPE_OF_ONNX.get(kind)
    if dtype is None:
        raise UserError(
            f"{node.name} is a {node.type}, for which the Open Inference Protocol has no name",
            where=str(path),
            remedy="Export the model with tensors of other types (for scikit-learn classifiers: without ZipMap).",
        )
    shape = tuple(d if isinstance(d, int) else str(d or "?") for d in node.shape)
    return TensorSpec(name=node.name, dtype=dtype, shape=shape)
