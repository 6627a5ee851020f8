"""`${env:NAME}`: values that come from environment variables, in the few places where that is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from onnx_ops.config.document import Document, Finding, Loc
from onnx_ops.config.words import shorten

ALLOWED: tuple[tuple[str, ...], ...] = (
    ("deploy", "settings", "*"),
    ("deploy", "metrics", "*"),
    ("data", "*", "file"),
    ("register", "model"),
    ("model",),
)
"""Keys from the root, `*` for any one; indices of lists are left out."""

_MARK = "${env:"
_REFERENCE = re.compile(r"\$\{env:([^}]*)\}?")
_COMPLETE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")


def substitute(document: Document, environ: Mapping[str, str]) -> None:
    """Put in the values, in place; what is not allowed, malformed or unset becomes a finding of the document."""
    for loc, key, text in list(texts_with(_MARK, document.value, ())):
        for finding in _findings(loc, key, text, environ):
            document.findings.append(finding)
            break
        else:
            if not key:
                document.at(loc[:-1])[loc[-1]] = _COMPLETE.sub(lambda match: environ[match[1]], text)


def _findings(loc: Loc, key: bool, text: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    if key or not _is_allowed(loc):
        places = ", ".join(".".join(pattern) for pattern in ALLOWED)
        yield Finding(loc=loc, message=f"${{env:…}} is not allowed here; it is in {places}", on_key=key)
    for match in _REFERENCE.finditer(text):
        if not _COMPLETE.fullmatch(match[0]):
            yield Finding(loc=loc, message=f"'{shorten(match[0])}' is not of the form ${{env:NAME}}")
        elif match[1] not in environ:
            yield Finding(loc=loc, message=f"environment variable {match[1]} is not set")


def texts_with(mark: str, value: Any, loc: Loc) -> Iterator[tuple[Loc, bool, str]]:
    """Every text below a location that holds `mark`, and whether it is a key."""
    if isinstance(value, str) and mark in value:
        yield loc, False, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, item in items:
        if isinstance(part, str) and mark in part:
            yield (*loc, part), True, part
        yield from texts_with(mark, item, (*loc, part))


def _is_allowed(loc: Loc) -> bool:
    keys = [part for part in loc if isinstance(part, str)]
    return any(
        len(keys) == len(pattern) and all(want in ("*", key) for want, key in zip(pattern, keys, strict=True))
        for pattern in ALLOWED
    )
