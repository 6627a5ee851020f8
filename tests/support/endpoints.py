"""Deployments and endpoints as values, without files and servers."""

from __future__ import annotations

from typing import Any

from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import Deployment, EndpointConfig


def fileless_deployment(name: str, content: str = "", **fields: Any) -> Deployment:
    """Return a deployment of model `m` without files.

    Its digests are those of `content`. Deployment `v1` has version 1.
    """
    digest = digest_bytes((content or name).encode())
    usual = {
        "model": "m",
        "version": name.removeprefix("v"),
        "variant": "fp32",
        "location": f"/models/{name}",
    }
    return Deployment(name=name, **{"release": digest, "manifest": digest, **usual, **fields})


def endpoint_config(endpoint: str, **fields: Any) -> EndpointConfig:
    """Return the options of an endpoint of model `m`."""
    usual = {
        "provider": "local",
        "model": "m",
        "target": "cpu",
        "target_digest": digest_bytes(b"target"),
    }
    return EndpointConfig(endpoint=endpoint, **{**usual, "pipeline": "p", **fields})
