"""How an endpoint server runs: the flags of `onnx-ops serve`, and the settings of a local endpoint in a pipeline."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args, get_type_hints

from annotated_types import DocInfo, Ge, Le, doc

from onnx_ops.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Sizes are in bytes, times in seconds."""

    workers: Annotated[int, Ge(1), Le(256), doc("Worker processes; each holds every model.")] = 1
    threads: Annotated[
        int, Ge(0), Le(256), doc("Threads of a worker for models that are not fast; 0 shares the cores evenly.")
    ] = 0
    queue: Annotated[
        int, Ge(1), Le(1 << 20), doc("Requests that may wait for their turn in a worker; more are answered 429.")
    ] = 128
    deadline: Annotated[
        float,
        Ge(0.001),
        Le(3600),
        doc("Longest wait for a model, unless x-request-timeout-ms says otherwise; then 504."),
    ] = 30.0
    max_body: Annotated[int, Ge(1), Le(2 << 30), doc("Bytes of the largest request body; more is answered 413.")] = (
        32 << 20
    )
    max_connections: Annotated[
        int, Ge(1), Le(1 << 20), doc("Open connections of all workers together; the idle ones give way first.")
    ] = 16_384
    read_timeout: Annotated[
        float, Ge(0.1), Le(3600), doc("A request that has not come whole by then is answered 408.")
    ] = 30.0
    keep_alive: Annotated[float, Ge(0.1), Le(3600), doc("An idle connection is closed after this time.")] = 75.0
    drain: Annotated[
        int, Ge(0), Le(3600), doc("Requests in flight get this long after SIGTERM; clouds kill after 30.")
    ] = 25
    prepack: Annotated[
        int, Ge(0), doc("Models from this size on are kept optimised and packed for this processor; 0: none.")
    ] = 4 << 20
    access_log: Annotated[str, doc("File that gets one JSON line per inference; `-` is standard output.")] = ""
    admin_socket: Annotated[str, doc("Unix socket of a second admin listener, open to its owner without a token.")] = ""
    allowed_hosts: Annotated[
        str,
        doc("Host headers that are answered besides those of loopback, separated by commas; `*`: any."),
    ] = ""
    allowed_origins: Annotated[
        str, doc("Origins of web pages that may send requests, separated by commas; `*`: any.")
    ] = ""
    trusted_keys: Annotated[
        str, doc("Folder of public keys, or keys in base64: only what they signed for is loaded; empty: anything.")
    ] = ""
    endpoint: Annotated[str, doc("Name of the endpoint in metrics; default: the name of its folder.")] = ""


def described() -> tuple[tuple[str, type, Any, str], ...]:
    """Name, type, default and description of every option."""
    hints = get_type_hints(ServerOptions, include_extras=True)
    return tuple((f.name, get_args(hints[f.name])[0], f.default, _text(hints[f.name])) for f in fields(ServerOptions))


def options_of(settings: Mapping[str, object], *, where: str = "", others: tuple[str, ...] = ()) -> ServerOptions:
    """Options from plain settings.

    Args:
        settings: values by the names of the options.
        where: what an error is located at.
        others: further names that are left to the caller.

    Raises:
        UserError: a name is none of the options, or a value is not of its type or out of its range.
    """
    known = {name: kind for name, kind, _, _ in described()}
    for name in settings:
        if name not in known and name not in others:
            close = difflib.get_close_matches(name, [*known, *others], n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"There are: {', '.join(sorted([*known, *others]))}."
            raise UserError(f"there is no setting {name!r}", where=where, remedy=hint)
    given = {name: _checked(name, kind, settings[name], where) for name, kind in known.items() if name in settings}
    return ServerOptions(**given)


def flags(options: ServerOptions) -> list[str]:
    """What to say on the server's command line to have these options."""
    given = ((name, getattr(options, name)) for name, _, _, _ in described())
    return [f"--{name.replace('_', '-')}={value}" for name, value in given]


def _checked(name: str, kind: type, value: object, where: str) -> Any:
    numeric = kind is float and type(value) is int
    if type(value) is not kind and not numeric:
        raise UserError(f"{name} must be of type {kind.__name__}, not {value!r}", where=where)
    hint = get_type_hints(ServerOptions, include_extras=True)[name]
    for limit in get_args(hint)[1:]:
        low = limit.ge if isinstance(limit, Ge) else None
        high = limit.le if isinstance(limit, Le) else None
        too_low = low is not None and not value >= low  # type: ignore[operator]
        too_high = high is not None and not value <= high  # type: ignore[operator]
        if too_low or too_high:
            bound = f"at least {low}" if too_low else f"at most {high}"
            raise UserError(f"{name} must be {bound}, not {value!r}", where=where)
    return kind(value)


def _text(hint: object) -> str:
    return next(extra.documentation for extra in get_args(hint) if isinstance(extra, DocInfo))
