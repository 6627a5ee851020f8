"""Check whether servers have enough memory for a second version.

A server measures a new version before its workers load it (`serving.workers.trial_load`). `check`
estimates the memory earlier, for the author of the pipeline file. The estimate assumes that the new
version is as large as the stable one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.evidence import Evidence
from onnx_ops.errors import OnnxOpsError
from onnx_ops.ports import Context
from onnx_ops.release.journal import read_readable_state


def find_memory_shortages(context: Context, config: EndpointConfig) -> Iterator[str]:
    """Yield a message for each server that lacks memory for a second version.

    Servers that do not answer are ignored. A worker is assumed to need its present memory or, if
    that is larger, the measured peak of the stable version.
    """
    from onnx_ops.serving.workers.memory_admission import find_shortage

    try:
        servers = context.provider(config.provider).list_memory(config)
        stable = read_readable_state(context, config.endpoint).roles.stable if servers else None
    except OnnxOpsError:  # `status` and the deploy stage report this error.
        return
    if stable is None:
        return
    peak_bytes = _read_peak(context, stable.evidence)
    for memory in servers:
        if why := find_shortage(memory, max(peak_bytes, memory.worker_bytes)):
            place = f"replica {memory.server}" if memory.server else "the server"
            yield (
                f"{place} of endpoint {config.endpoint} has too little memory for a second version "
                f"as large as {stable.name}: {why}. Use fewer workers or a server with more memory."
            )


def _read_peak(context: Context, evidence: Digest | None) -> int:
    """Return the peak memory in bytes of a process that loads a version.

    The value is read from the version's evidence; it is 0 without such a measurement.
    """
    if evidence is None:
        return 0
    try:
        starts = codec.loads(context.store.read(evidence), Evidence).starts
    except OnnxOpsError:
        return 0
    return (
        int(statistics.median(starts.peak_bytes)) if starts is not None and starts.peak_bytes else 0
    )
