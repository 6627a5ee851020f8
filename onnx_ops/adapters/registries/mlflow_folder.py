"""Folder of a LoggedModel: the ONNX files and the files for MLflow's loader."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from onnx_ops.domain.artifact import Digest, Manifest, canonical_json, digest_file
from onnx_ops.domain.release import VariantRecord
from onnx_ops.errors import DigestMismatchError, RefusedError, UserError
from onnx_ops.onnx_graph.files import list_external_names, parse_model

if TYPE_CHECKING:
    from mlflow.models import ModelSignature
    from mlflow.types import Schema

MLMODEL = "MLmodel"
MANIFEST = "manifest.json"
_REQUIREMENTS = "requirements.txt"
_PYTHON_ENV = "python_env.yaml"
_EXAMPLE, _SERVING_EXAMPLE = "input_example.json", "serving_input_example.json"
_OWN = frozenset(
    (
        MLMODEL,
        MANIFEST,
        _REQUIREMENTS,
        _PYTHON_ENV,
        _EXAMPLE,
        _SERVING_EXAMPLE,
        "conda.yaml",
        "registered_model_meta",
    )
)


def is_safe_name(name: str) -> bool:
    """Return whether a name is a relative path that stays in its folder.

    Its parts are free of characters that Windows or POSIX reserves, and do not end in a space or a
    dot. Device names of Windows, such as `nul`, are not recognized.
    """
    parts = name.split("/")
    return bool(name) and not any(
        part in ("", ".", "..")
        or part.endswith((" ", "."))
        or any(ord(c) < 32 or c in '\\:*?"<>|' for c in part)
        for part in parts
    )


def validate_record(record: VariantRecord) -> None:
    """Validate names, weights and digests of a variant before anything is sent.

    Raises:
        UserError: a file name is unsafe, or is reserved by MLflow or onnx-ops. Or there is not
            exactly one ONNX file, or this file is invalid.
        RefusedError: the model's weights are not all among the files.
        DigestMismatchError: the manifest does not match the files.
    """
    where = f"variant {record.variant}"
    for name in (*record.files, *record.evidence):
        if not is_safe_name(name):
            raise UserError(
                f"{name!r} cannot be the name of an artifact",
                where=where,
                why="it must be a relative path whose parts are valid names on every operating "
                "system",
            )
    if reserved := sorted(set(record.files) & _OWN):
        raise UserError(
            f"{reserved[0]} is a name that MLflow or onnx-ops reserves",
            where=where,
            remedy="Give the file another name.",
        )
    # The signature of a version covers only its own files, so external data must be among them.
    external = list_external_names(record.files[find_model_file(record.files)])
    if outside := sorted({PurePosixPath(name).as_posix() for name in external} - set(record.files)):
        what = f"external data {outside[0]!r} of the model is not among the files of the version"
        remedy = "Export the model with its weights in the same folder."
        raise RefusedError(what, where=where, remedy=remedy)
    if set(record.files) != set(record.manifest.files):
        raise DigestMismatchError(
            "the files in the manifest differ from the files of the version", where=where
        )
    for name, path in record.files.items():
        if digest_file(path) != record.manifest[name]:
            raise DigestMismatchError(
                f"{name} does not match the manifest",
                where=where,
                remedy="Run the pipeline again with `onnx-ops run FILE`: it repeats the stage that "
                "made this file.",
            )


def find_model_file(names: Iterable[str]) -> str:
    """Return the ONNX file among the model's files.

    The other files contain external data of the model, or are libraries of custom operators.

    Raises:
        UserError: there is not exactly one ONNX file.
    """
    models = sorted(name for name in names if PurePosixPath(name).suffix == ".onnx")
    if len(models) != 1:
        raise UserError(
            "a version must have exactly one .onnx file, "
            f"not {len(models)}: {', '.join(models) or 'none'}"
        )
    return models[0]


def build_folder(record: VariantRecord, folder: Path, *, model_id: str, run_id: str) -> Digest:
    """Fill an empty folder with a LoggedModel; return the digest of its MLmodel.

    The ONNX files are linked and not copied, since they can be larger than the free space for
    temporary files.
    """
    for name, path in record.files.items():
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path.absolute())
    (folder / MANIFEST).write_bytes(encode_manifest(record.manifest))
    requirements = [
        f"{name}=={version(name)}" for name in ("mlflow", "onnx", "onnxruntime", "numpy")
    ]
    (folder / _REQUIREMENTS).write_text("\n".join(requirements) + "\n")
    (folder / _PYTHON_ENV).write_text(
        f"python: {platform.python_version()}\nbuild_dependencies: [pip]\ndependencies: "
        f"[-r {_REQUIREMENTS}]\n"
    )
    from mlflow.models import Model

    data = find_model_file(record.files)
    signature = _build_signature(folder / data)
    example = None
    if record.example and signature is not None:
        # MLflow stores two examples: arrays for its loader, and a request for its server.
        (folder / _EXAMPLE).write_text(json.dumps(json.loads(record.example)["inputs"]))
        (folder / _SERVING_EXAMPLE).write_bytes(record.example)
        example = {"artifact_path": _EXAMPLE, "serving_input_path": _SERVING_EXAMPLE}
        example |= {"type": "ndarray", "format": "tf-serving"}
    described = Model(
        run_id=run_id,
        model_id=model_id,
        signature=signature,
        saved_input_example_info=example,
        model_size_bytes=sum(path.stat().st_size for path in record.files.values()),
    )
    # The flavor is written out here, so that the module mlflow.pyfunc need not be imported.
    described.add_flavor(
        "python_function",
        loader_module="mlflow.onnx",
        python_version=platform.python_version(),
        data=data,
        env={"virtualenv": _PYTHON_ENV},
    )
    described.add_flavor(
        "onnx",
        onnx_version=version("onnx"),
        data=data,
        providers=["CPUExecutionProvider"],
        onnx_session_options=None,
        code=None,
    )
    described.save(str(folder / MLMODEL))
    return digest_file(folder / MLMODEL)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the canonical JSON of the manifest, from which its digest is computed."""
    return canonical_json(dict(manifest.files))


def _build_signature(path: Path) -> ModelSignature | None:
    """Return MLflow's signature of the model's inputs and outputs.

    The result is None if MLflow cannot describe one of the inputs or outputs, or if the model lacks
    inputs or outputs.
    """
    from mlflow.models import ModelSignature

    graph = parse_model(path).graph
    constants = {initializer.name for initializer in graph.initializer}
    inputs = _schema([value for value in graph.input if value.name not in constants])
    outputs = _schema(list(graph.output))
    return ModelSignature(inputs=inputs, outputs=outputs) if inputs and outputs else None


def _schema(values: list[Any]) -> Schema | None:
    import numpy as np
    import onnx
    from mlflow.types import Schema, TensorSpec

    specs = []
    for value in values:
        tensor = value.type.tensor_type
        if (
            not value.type.HasField("tensor_type")
            or not tensor.HasField("shape")
            or not tensor.elem_type
        ):
            return None
        is_text = tensor.elem_type == onnx.TensorProto.STRING
        dtype = (
            np.dtype(str)
            if is_text
            else np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        )
        if dtype.kind not in "biufU":
            return None
        shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim)
        specs.append(TensorSpec(dtype, shape, name=value.name))
    return Schema(specs) if specs else None  # type: ignore[arg-type]
