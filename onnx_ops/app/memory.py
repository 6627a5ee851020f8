"""What it takes to do a benchmark again, kept under the digest of the evidence that it gave."""

from __future__ import annotations

from collections.abc import Mapping

from onnx_ops.app.remote import request_of
from onnx_ops.domain.artifact import Digest, Manifest, canonical_json, digest_json
from onnx_ops.domain.pipeline import Stage
from onnx_ops.ports import Store

REQUEST = "request.json"


def remember(store: Store, stage: Stage, key: Digest, inputs: Mapping[str, Manifest], evidence: Digest) -> None:
    """Keep what it takes to do a benchmark again, for whoever holds the digest of its evidence."""
    held = {f"{name}/{file}": digest for name, manifest in inputs.items() for file, digest in manifest.files.items()}
    request = store.put_bytes(canonical_json(request_of(stage, key, inputs)))
    store.record(_memory(evidence), Manifest(files={**held, REQUEST: request}))


def recall(store: Store, evidence: Digest) -> Manifest | None:
    """What was remembered: the request, and the files of its inputs."""
    return store.lookup(_memory(evidence))


def _memory(evidence: Digest) -> Digest:
    return digest_json(["measured", evidence])
