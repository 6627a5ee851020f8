"""Options of the endpoint server as text.

The options are flags of its command line, or environment variables of a container.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from annotated_types import DocInfo, Unit

from onnx_ops.config.binding import default_of, file_fields, metadata_of, unwrap
from onnx_ops.config.quantities import format_quantity
from onnx_ops.protocol.server_process import OPTION_PREFIX, ContainerOptions, ServerOptions


def list_options() -> tuple[tuple[str, type, Any, str], ...]:
    """Return name, type, default and description of every option.

    A quantity is of type `str`, and its default has a unit.
    """
    described = []
    for name, (f, hint) in file_fields(ServerOptions).items():
        metadata = unwrap(hint)[1]
        description = metadata_of(metadata, DocInfo)
        default = _text(default_of(f), metadata) if metadata_of(metadata, Unit) else default_of(f)
        described.append(
            (name, type(default), default, description.documentation if description else "")
        )
    return tuple(described)


def format_flags(options: ServerOptions) -> list[str]:
    """Return the flags of the server's command line for these options."""
    return [
        f"--{name.replace('_', '-')}={text}"
        for name, text in _texts(options, ServerOptions).items()
    ]


def format_option_variables(options: ContainerOptions) -> dict[str, str]:
    """Return the environment variables that set the options of a container's server.

    Options with their default value are left out.
    """
    defaults = ContainerOptions()
    changed = {
        f.name
        for f in fields(ContainerOptions)
        if getattr(options, f.name) != getattr(defaults, f.name)
    }
    texts = _texts(options, ContainerOptions)
    return {
        f"{OPTION_PREFIX}{name.upper()}": text
        for name, text in sorted(texts.items())
        if name in changed
    }


def _texts(options: ContainerOptions, kind: type) -> Mapping[str, str]:
    return {
        name: _text(getattr(options, name), unwrap(hint)[1])
        for name, (_, hint) in file_fields(kind).items()
    }


def _text(value: Any, metadata: tuple[Any, ...]) -> str:
    unit = metadata_of(metadata, Unit)
    return format_quantity(value, unit.unit) if unit else str(value)
