"""ONNX Runtime sessions of a target, with built-in and plug-in providers."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from onnx_ops import plugins
from onnx_ops.adapters.runtimes.hardware import read_hardware
from onnx_ops.adapters.runtimes.ort_format import REPLAYED, prepare_model_file
from onnx_ops.domain.artifact import digest_json, hex_digits
from onnx_ops.domain.execution import PROVIDER_PACKAGES, Provider, SessionSettings
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.errors import MeasurementError, quoted
from onnx_ops.onnx_graph.compatibility import check_libraries
from onnx_ops.onnx_graph.files import digest_model, list_external_names
from onnx_ops.onnx_graph.ort_format import is_ort_format

DISTRIBUTION = "onnxruntime"

_LEVELS = {
    "disabled": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
_EXTERNAL_WEIGHTS = "session.optimized_model_external_initializers_file_name"
_LARGE = 1 << 30
"""Size in bytes above which the optimized model could exceed 2 GiB in protobuf."""

_REMEDIES = {
    "Failed to construct locale": "Install that locale (Debian: package locales and locale-gen), "
    "or set the attribute `locale` of the model's StringNormalizer nodes to C.",
    "Got invalid dimensions": "Supply rows of the shape that the model expects.",
    "Failed to load library": "Install the dependencies of the library; `ldd` lists those missing.",
    "is not a registered function/op": "Export with another opset, "
    "or add the operators to the target's `custom_ops`.",
    "NOT_IMPLEMENTED": "This build has no kernel for that operator and these types: "
    "export with other operators or types.",
}
"""Remedies of known errors of ONNX Runtime, by a part of the error's text."""

_ANY_REMEDY = "The cause is quoted from ONNX Runtime. Inspect the model: `onnx-ops inspect FILE`."

_QUIET = 4
"""Log level for fatal messages only.

Errors are raised as exceptions, and a warning would look like a warning of onnx-ops.
"""


def fingerprint_target(target: Target) -> HardwareFingerprint:
    """Return the hardware and runtime for which measurements on a target are valid.

    The versions of the target's plug-ins are part of the runtime.
    """
    versions = [plugins.version(DISTRIBUTION)]
    for package in (provider.package for provider in target.providers if provider.package):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} not installed")
    return read_hardware(target.runtime, ", ".join(versions))


def check_machine(target: Target) -> None:
    """Check that this machine has the target's providers; load the target's plug-ins.

    Raises:
        MeasurementError: the machine lacks an execution provider, its package or its device. Or the
            library of a plug-in cannot be loaded, or the target's runtime is in an isolated
            environment.
    """
    if target.env is not None and target.env.isolated:
        raise MeasurementError(
            "the target's build of ONNX Runtime is installed in a separate environment, not in "
            "that of this process",
            where=f"target {target.name}",
        )
    build = list_providers()
    missing = [
        provider.name
        for provider in target.providers
        if not provider.package and provider.name not in build
    ]
    if missing:
        remedy = PROVIDER_PACKAGES.get(
            missing[0], "Measure this target on a machine where its provider is installed."
        )
        what = f"execution provider {missing[0]} is not in this build of ONNX Runtime"
        raise MeasurementError(
            what,
            where=f"target {target.name}",
            why=f"the build has {', '.join(build)}",
            remedy=remedy,
        )
    for provider in target.providers:
        if provider.package:
            register_plugin(provider, target)
            if not any(device.ep_name == provider.name for device in _ort().get_ep_devices()):
                remedy = "Measure this target on a machine that has its hardware."
                what = f"{provider.name} found no device on this machine"
                raise MeasurementError(what, where=f"target {target.name}", remedy=remedy)


def build_session(
    model: Path, target: Target, *, record_assignment: bool = False, write_to: Path | None = None
) -> Any:
    """Build a session with the target's providers and settings.

    If the target has an `ort_format`, the session loads the converted file, unless
    `record_assignment` or `write_to` is set. With `record_assignment`, the session records which
    provider runs which node. With `write_to`, the runtime writes its optimized graph to this file.

    Raises:
        MeasurementError: the machine lacks a requirement of the target, or the runtime refuses the
            model or a setting.
        NotFoundError: a library of custom operators is missing.
        DigestMismatchError: a library of custom operators differs from the declared library.
    """
    check_machine(target)
    check_libraries(target.custom_ops, f"target {target.name}")
    ort = importlib.import_module("onnxruntime")
    plugins.load_cuda(ort, [provider.name for provider in target.providers])
    loaded = (
        model if record_assignment or write_to is not None else prepare_model_file(model, target)
    )
    with convert_runtime_errors(model):
        options = _options(ort, target.session)
        if is_ort_format(loaded):
            # Without this entry, ONNX Runtime derives the format from the suffix of the file.
            options.add_session_config_entry("session.load_model_format", "ORT")
        if target.ort_format is not None and target.ort_format.style == "runtime":
            options.add_session_config_entry(REPLAYED, "1")
        for library in target.custom_ops:
            options.register_custom_ops_library(library.path)
        if record_assignment:
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        if write_to is not None:
            _write_optimized(options, model, write_to)
        fingerprint = partial(fingerprint_target, target)
        wanted = [
            (provider, resolve_provider_options(provider, loaded, fingerprint))
            for provider in target.providers
        ]
        # With its fallback, ONNX Runtime would print messages and use a provider that was not
        # requested.
        if not any(provider.package for provider in target.providers):
            providers = [(provider.name, dict(values)) for provider, values in wanted]
            return ort.InferenceSession(
                str(loaded), options, providers=providers, enable_fallback=0
            )
        _add_providers(ort, options, wanted)
        return ort.InferenceSession(str(loaded), options, enable_fallback=0)


@contextmanager
def convert_runtime_errors(model: Path) -> Iterator[None]:
    """Convert exceptions of the runtime to MeasurementError.

    The runtime's exceptions have no common base class, and some are plain ValueError or
    RuntimeError. So these two types are always converted.
    """
    try:
        yield
    except Exception as error:
        if type(
            error
        ).__module__ != "onnxruntime.capi.onnxruntime_pybind11_state" and not isinstance(
            error, ValueError | RuntimeError
        ):
            raise
        # Lines that contain only an ANSI color reset are left out.
        why = quoted(" ".join(part for part in str(error).splitlines() if part.strip(" \x1b[m")))
        remedy = next((remedy for part, remedy in _REMEDIES.items() if part in why), _ANY_REMEDY)
        raise MeasurementError(
            "ONNX Runtime cannot run the model",
            where=model.name,
            why=why,
            remedy=remedy,
        ) from error


def _write_optimized(options: Any, model: Path, target: Path) -> None:
    """Make the runtime write its optimized graph to a file.

    The weights of a large model, and external weights, are written to a second file in the same
    folder.
    """
    options.optimized_model_filepath = str(target)
    # External weights are named relative to the model's folder. The new model has another folder,
    # so its weights are written there too.
    if model.stat().st_size > _LARGE or list_external_names(model):
        options.add_session_config_entry(_EXTERNAL_WEIGHTS, f"{target.name}.data")


def _add_providers(
    ort: Any, options: Any, wanted: Iterable[tuple[Provider, Mapping[str, str]]]
) -> None:
    """Add providers, including plug-ins, in their order.

    ONNX Runtime 1.31 silently ignores plug-ins in a session's `providers`. A plug-in must be added
    through its devices.
    """
    for provider, values in wanted:
        if provider.package:
            devices = [device for device in ort.get_ep_devices() if device.ep_name == provider.name]
            options.add_provider_for_devices(devices, dict(values))
        else:
            options.add_provider(provider.name, dict(values))


def _options(ort: Any, settings: SessionSettings) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = _QUIET
    options.intra_op_num_threads = settings.intra_op_threads
    options.inter_op_num_threads = settings.inter_op_threads
    options.graph_optimization_level = getattr(
        ort.GraphOptimizationLevel, _LEVELS[settings.graph_level]
    )
    spinning = "1" if settings.spinning else "0"
    options.add_session_config_entry("session.intra_op.allow_spinning", spinning)
    options.add_session_config_entry("session.inter_op.allow_spinning", spinning)
    for key, value in settings.config.items():
        options.add_session_config_entry(key, value)
    return options


_CACHE = "{cache}"

_PLUGGED: dict[str, Path] = {}
"""Libraries of plug-ins that this process has registered, by provider."""


def list_providers() -> tuple[str, ...]:
    """Return the execution providers of the installed build, without plug-ins."""
    return tuple(name for name in _ort().get_available_providers() if name not in _PLUGGED)


def list_devices() -> tuple[str, ...]:
    """Return the devices of the build's own providers, with provider and vendor."""
    pairs = (
        (entry.ep_name, entry.device)
        for entry in _ort().get_ep_devices()
        if entry.ep_name not in _PLUGGED
    )
    return tuple(
        f"{name} on {device.type.name} ({device.vendor or 'unknown'})" for name, device in pairs
    )


def register_plugin(provider: Provider, target: Target) -> None:
    """Register the library of a provider's package, once per process.

    Raises:
        MeasurementError: the package is missing or contains no plug-in, or loading its library
            fails.
    """
    where = f"target {target.name}"
    try:
        library = Path(importlib.import_module(provider.package).get_library_path())
    except ModuleNotFoundError as error:
        package = provider.package.replace("_", "-")
        remedy = (
            f"Run `pip install {package}` on a machine with the target's hardware. If the target "
            f"has a separate environment, add {package}==VERSION to `env.requirements` instead."
        )
        raise MeasurementError(
            f"package {provider.package} is not installed", where=where, remedy=remedy
        ) from error
    except AttributeError as error:
        raise MeasurementError(
            f"package {provider.package} contains no execution provider",
            where=where,
            why="the package has no function get_library_path(), which plug-ins need",
        ) from error
    if provider.name in _PLUGGED:
        return
    try:
        _ort().register_execution_provider_library(provider.name, str(library))
    except Exception as error:
        raise MeasurementError(
            f"the library of {provider.name} cannot be loaded",
            where=where,
            why=quoted(error),
            remedy="Install the dependencies of the library; `ldd` lists those missing.",
        ) from error
    _PLUGGED[provider.name] = library


def resolve_provider_options(
    provider: Provider, model: Path, machine: Callable[[], HardwareFingerprint]
) -> Mapping[str, str]:
    """Return a provider's options with `{cache}` replaced by a folder.

    A compiled engine is valid for one model, device, driver and version of the runtime. TensorRT's
    file names do not reflect the weights, so a retrained model would otherwise run with the engine
    of its predecessor.
    """
    if _CACHE not in "".join(provider.options.values()):
        return provider.options
    key = hex_digits(
        digest_json(
            [digest_model(model), machine().digest(), provider.name, dict(provider.options)]
        )
    )
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "onnx-ops" / "providers" / key[:32]
    folder.mkdir(parents=True, exist_ok=True)
    return {name: value.replace(_CACHE, str(folder)) for name, value in provider.options.items()}


def _ort() -> Any:
    return importlib.import_module("onnxruntime")
