"""Whether an endpoint's server runs models as a target does. Rules without a runtime: a pipeline is held against them
before anything runs."""

from __future__ import annotations

from collections.abc import Collection

from onnx_ops.domain.target import Target


def unservable(target: Target, available: Collection[str]) -> str:
    """Why a server cannot serve what was measured on the target; empty if it can.

    Args:
        target: where models were measured.
        available: execution providers of the server's build of ONNX Runtime.
    """
    if target.runtime != "onnxruntime":
        return f"it measures with runtime '{target.runtime}', and the server runs 'onnxruntime'"
    if target.env is not None and target.env.isolated:
        return "its runtime lives in an environment of its own, and the server's in the server's"
    if target.ort_format is not None:
        return "it runs .ort files, and the server .onnx files"
    for provider in target.providers:
        if provider.package:
            return f"the server loads no plug-in such as {provider.package}"
        if provider.name not in available:
            return f"the server's build of ONNX Runtime has no {provider.name}; it has {', '.join(sorted(available))}"
    return ""
