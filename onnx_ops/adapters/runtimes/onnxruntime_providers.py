"""Execution providers of ONNX Runtime: those of its build, those that packages plug in, and where they may cache."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from onnx_ops.domain.artifact import digest_json, hex_digits
from onnx_ops.domain.execution import Provider
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.errors import MeasurementError, quoted
from onnx_ops.onnx_graph.files import model_digest

_CACHE = "{cache}"

_PLUGGED: dict[str, Path] = {}
"""Libraries of plug-ins that this process has registered, by provider."""


def available_providers() -> tuple[str, ...]:
    """Execution providers of the installed build."""
    return tuple(name for name in _ort().get_available_providers() if name not in _PLUGGED)


def devices() -> tuple[str, ...]:
    """Devices that ONNX Runtime finds by itself, each with the provider that takes it and its vendor."""
    found = ((one.ep_name, one.device) for one in _ort().get_ep_devices() if one.ep_name not in _PLUGGED)
    return tuple(f"{name} on {device.type.name} ({device.vendor or 'unknown'})" for name, device in found)


def plug_in(provider: Provider, target: Target) -> None:
    """Register the library of a provider's package, once in a process; it stays until the process ends.

    Raises:
        MeasurementError: the package is not installed, is no plug-in, or its library cannot be loaded.
    """
    where = f"target {target.name}"
    try:
        library = Path(importlib.import_module(provider.package).get_library_path())
    except ModuleNotFoundError as error:
        raise MeasurementError(
            f"package {provider.package} is not installed",
            where=where,
            remedy=f"pip install {provider.package.replace('_', '-')} where the target's hardware is.",
        ) from error
    except AttributeError as error:
        raise MeasurementError(
            f"package {provider.package} brings no execution provider",
            where=where,
            why="it has no get_library_path(), which packages of plug-ins have",
        ) from error
    if provider.name in _PLUGGED:
        return
    try:
        _ort().register_execution_provider_library(provider.name, str(library))
    except Exception as error:
        raise MeasurementError(
            f"the library of {provider.name} cannot be loaded", where=where, why=quoted(error)
        ) from error
    _PLUGGED[provider.name] = library


def append(options: Any, provider: Provider, values: Mapping[str, str]) -> None:
    """Add a provider to session options. One that is plugged in and named in a session's `providers` is left out in
    silence by ONNX Runtime 1.31; only its devices bring it in.
    """
    if provider.package:
        found = [device for device in _ort().get_ep_devices() if device.ep_name == provider.name]
        options.add_provider_for_devices(found, dict(values))
    else:
        options.add_provider(provider.name, dict(values))


def check_devices(provider: Provider, target: Target) -> None:
    """Whether a plug-in finds a device here.

    Raises:
        MeasurementError: it finds none.
    """
    if not any(device.ep_name == provider.name for device in _ort().get_ep_devices()):
        raise MeasurementError(
            f"{provider.name} finds no device here",
            where=f"target {target.name}",
            remedy="Measure this target where its hardware is; it is not measured here.",
        )


def runtime_version(target: Target, own: str) -> str:
    """The runtime's version, with those of the plug-ins that the target names."""
    return ", ".join([own, *(f"{p.package} {_version(p.package)}" for p in target.providers if p.package)])


def provider_values(provider: Provider, model: Path, machine: Callable[[], HardwareFingerprint]) -> Mapping[str, str]:
    """A provider's options, with the folder that `{cache}` stands for.

    What a provider compiles holds for one model, one device, one driver and one version of the runtime. TensorRT's own
    file names do not hold the weights, so that a model trained anew would be answered by its predecessor's engine.
    """
    if _CACHE not in "".join(provider.options.values()):
        return provider.options
    key = hex_digits(digest_json([model_digest(model), machine().digest(), provider.name, dict(provider.options)]))
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "onnx-ops" / "providers" / key[:32]
    folder.mkdir(parents=True, exist_ok=True)
    return {name: value.replace(_CACHE, str(folder)) for name, value in provider.options.items()}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _ort() -> Any:
    return importlib.import_module("onnxruntime")
