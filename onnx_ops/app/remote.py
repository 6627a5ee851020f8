"""A benchmark on another machine: the request that goes there, and the answer that comes back through the store.

Both sides share the store, where inputs and results lie by digest; nothing else travels but the stage itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, Manifest, digest_json
from onnx_ops.domain.pipeline import Stage, StageKind
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import ConflictError, MeasurementError, OnnxOpsError, RefusedError, from_document
from onnx_ops.pipeline.stage_settings import REVISIONS
from onnx_ops.ports import Pools, Store

Perform = Callable[[Stage, Digest, Mapping[str, Manifest]], Manifest]

_ERROR = "error.json"


def pool_of(stage: Stage) -> str:
    """The pool that measures this stage; empty for this machine."""
    if stage.kind is not StageKind.BENCHMARK:
        return ""
    hints: Mapping[str, Any] = stage.hints
    return str(hints["target"].get("pool", ""))


def ask(
    pools: Pools, store: Store, stage: Stage, key: Digest, inputs: Mapping[str, Manifest], attempt: str
) -> Manifest:
    """What a worker of the stage's pool measured.

    Args:
        pools: hands out the work.
        store: shared with the workers.
        stage: a benchmark.
        key: its key.
        inputs: its inputs.
        attempt: new for each asking, so that an old answer is never taken for this one's.

    Raises:
        OnnxOpsError: what was raised there.
        MeasurementError: nobody answered.
    """
    pool = pool_of(stage)
    pools.measure(pool, stage.id, {**request_of(stage, key, inputs), "attempt": attempt}, timeout=stage.timeout)
    answer = store.lookup(_answer_key(attempt))
    if answer is None:
        raise MeasurementError(
            f"the worker of pool {pool} has ended, and its answer is not in the store",
            where=stage.id,
            remedy="Give both machines one store: `store` in onnx-ops.toml, such as s3://bucket/onnx-ops.",
        )
    if _ERROR in answer:
        raise from_document(json.loads(store.read(answer[_ERROR])))
    return answer


def request_of(stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> dict[str, Json]:
    """A stage and what it is done with, as JSON."""
    return {
        "stage": codec.to_json(stage),
        "key": key,
        "inputs": {name: dict(manifest.files) for name, manifest in inputs.items()},
    }


def requested(request: Mapping[str, Json]) -> tuple[Stage, Digest, Mapping[str, Manifest]]:
    """What `request_of` was given."""
    stage = codec.from_json(request["stage"], Stage, where="request")
    files = codec.from_json(request["inputs"], dict[str, dict[str, Digest]], where="request")
    return stage, Digest(str(request["key"])), {name: Manifest(files=found) for name, found in files.items()}


def answer(perform: Perform, store: Store, request: Mapping[str, Json]) -> OnnxOpsError | None:
    """The worker's side: measure here, and leave what came of it in the store; what failed is returned too.

    Raises:
        OnnxOpsError: the store itself failed, or the request is none.
    """
    attempt = str(request["attempt"])
    stage, key, inputs = requested(request)
    try:
        _check(stage)
        manifest = perform(stage, key, inputs)
    except OnnxOpsError as error:
        document = json.dumps(error.as_document()).encode("utf-8")
        store.record(_answer_key(attempt), Manifest(files={_ERROR: store.put_bytes(document)}))
        return error
    store.record(_answer_key(attempt), manifest)
    return None


def _answer_key(attempt: str) -> Digest:
    return digest_json(["answer", attempt])


def _check(stage: Stage) -> None:
    """Only benchmarks are done for others, and only as the asking side would do them."""
    if stage.kind is not StageKind.BENCHMARK:
        raise RefusedError(f"a worker measures, and does nothing else: {stage.kind.value}", where=stage.id)
    asked = stage.settings.get("revision")
    if asked != REVISIONS[stage.kind]:
        raise ConflictError(
            f"this worker measures by revision {REVISIONS[stage.kind]} of the benchmark, not {asked}, as asked",
            where=stage.id,
            remedy="Install the same release of onnx-ops on both machines.",
        )
