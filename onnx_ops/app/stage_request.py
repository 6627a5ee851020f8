"""JSON documents for another process: a request to execute a stage, or its error."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, Manifest, digest_json
from onnx_ops.domain.plan import Stage
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import OnnxOpsError, from_document
from onnx_ops.ports import Store

_FAILURE = "error.json"

ExecuteStage = Callable[[Stage, Digest, Mapping[str, Manifest]], Manifest]


def build_request(stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> dict[str, Json]:
    """Return the request to execute a stage, as a JSON value."""
    return {
        "stage": codec.to_json(stage),
        "key": key,
        "inputs": {name: dict(manifest.files) for name, manifest in inputs.items()},
    }


def parse_request(request: Mapping[str, Json]) -> tuple[Stage, Digest, Mapping[str, Manifest]]:
    """Return the stage, its key and its inputs from a request of `build_request`."""
    stage = codec.from_json(request["stage"], Stage, where="request")
    files = codec.from_json(request["inputs"], dict[str, dict[str, Digest]], where="request")
    return (
        stage,
        Digest(str(request["key"])),
        {name: Manifest(files=content) for name, content in files.items()},
    )


def record_failure(store: Store, run: str, error: OnnxOpsError) -> None:
    """Record in the store the error of an execution, under the execution's name `run`."""
    failure = json.dumps(error.as_document()).encode("utf-8")
    store.record(_failure_key(run), Manifest(files={_FAILURE: store.put_bytes(failure)}))


def load_failure(store: Store, run: str) -> OnnxOpsError | None:
    """Return the recorded error of an execution; None if no error is recorded."""
    failed = store.lookup(_failure_key(run))
    return None if failed is None else from_document(json.loads(store.read(failed[_FAILURE])))


def _failure_key(run: str) -> Digest:
    return digest_json(["error", run])
