"""`${params:train.epochs}`: values of the project's `params.yaml`, put in when a pipeline file is read.

A reference that is the whole value becomes what stands there, of whatever type; within a text, a scalar becomes part
of it. What was put in is blamed on its place in `params.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onnx_ops.config.document import BROKEN, Document, Finding, Loc, child, path_text
from onnx_ops.config.environment import texts_with
from onnx_ops.config.overrides import parse_path
from onnx_ops.config.text import read_file
from onnx_ops.config.words import describe, did_you_mean, shorten
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import NotFoundError

FILE = "params.yaml"

NOT_IN: tuple[tuple[str, ...], ...] = (("schema",), ("pipeline",), ("deploy", "endpoint"))
"""Keys from the root, indices of lists left out, whose values other files and programs read as they are written."""

_MARK = "${params:"
_REFERENCE = re.compile(r"\$\{params:([^}]*)\}?")
_COMPLETE = re.compile(r"\$\{params:([^{}]+)\}")


def substitute_parameters(document: Document, root: Path) -> Mapping[str, Json]:
    """Put the values in, in place; what cannot be put in becomes a finding of the document.

    Returns:
        What was used, by its path in `params.yaml`.

    Raises:
        ConfigError: `params.yaml` cannot be read.
    """
    found = list(texts_with(_MARK, document.value, ()))
    if not found:
        return {}
    try:
        params = read_file(root / FILE)
    except NotFoundError:
        document.findings += [
            Finding(loc=loc, message=f"there is no {FILE} at the project's root", on_key=key) for loc, key, _ in found
        ]
        return {}
    used: dict[str, Json] = {}
    for loc, key, text in found:
        problem = next(_findings(loc, key, text, params), None)
        if problem is not None:
            document.findings.append(problem)
        elif whole := _COMPLETE.fullmatch(text):
            used[whole[1]] = _put(document, loc, params, parse_path(whole[1]))
        else:
            names = [match[1] for match in _COMPLETE.finditer(text)]
            used |= {name: params.at(parse_path(name)) for name in names}
            document.at(loc[:-1])[loc[-1]] = _COMPLETE.sub(lambda match: _plain(params, match[1]), text)
    return used


def _findings(loc: Loc, key: bool, text: str, params: Document) -> Iterator[Finding]:
    keys = tuple(part for part in loc if isinstance(part, str))
    if key or keys in NOT_IN:
        what = "a key" if key else ".".join(keys)
        yield Finding(loc=loc, message=f"${{params:…}} is not allowed for {what}; write it out", on_key=key)
    for match in _REFERENCE.finditer(text):
        if not _COMPLETE.fullmatch(match[0]):
            yield Finding(loc=loc, message=f"'{shorten(match[0])}' is not of the form ${{params:path.to.value}}")
            continue
        yield from _lookup(loc, match[1], params, whole=match[0] == text)


def _lookup(loc: Loc, name: str, params: Document, *, whole: bool) -> Iterator[Finding]:
    try:
        wanted = parse_path(name)
    except ValueError as error:
        yield Finding(loc=loc, message=str(error))
        return
    value: Any = params.value
    for part in wanted:
        if not _has(value, part):
            hint = did_you_mean(name, {path_text(known) for known in params.places if known})
            yield Finding(loc=loc, message=f"{FILE} has no '{shorten(name)}'{hint}")
            return
        value = child(value, part)
    for finding in params.findings:
        if finding.loc[: len(wanted)] == wanted:
            place = finding.place or params.places.get(finding.loc)
            yield Finding(loc=loc, message=finding.message, place=place)
    if not whole and value is not BROKEN and not isinstance(value, str | int | float):
        message = f"'{shorten(name)}' is {describe(value)}, which cannot be part of a text"
        yield Finding(loc=loc, message=message, place=params.places[wanted])


def _has(value: Any, part: str | int) -> bool:
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


def _put(document: Document, loc: Loc, params: Document, wanted: Loc) -> Json:
    depth, value = len(wanted), params.at(wanted)
    places = {known[depth:]: place for known, place in params.places.items() if known[:depth] == wanted}
    keys = {known[depth:]: place for known, place in params.keys.items() if known[:depth] == wanted and known != wanted}
    document.replace(loc, value, places, keys)
    found: Json = value
    return found


def _plain(params: Document, name: str) -> str:
    value = params.at(parse_path(name))
    return str(value).lower() if isinstance(value, bool) else str(value)
