"""`--set path=value`: changes to a document from the command line, read with the same strict YAML.

A path is keys with dots and indices in brackets: `train.with.epochs`, `gates[1].max_drop`. Keys that are not there
yet are added; entries of lists must exist. What an override puts in is blamed on the override.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from onnx_ops.config.document import Document, Loc, Place, path_text
from onnx_ops.config.text import read_text
from onnx_ops.config.words import describe
from onnx_ops.errors import ConfigError, Problem

_PART = re.compile(r"\.?([^.\[\]=\s]+)|\[([0-9]{1,6})\]")


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Change the document in place; what is wrong with an override itself goes to `document.refused`."""
    for text in overrides:
        source = f"--set {text}"
        try:
            _apply(document, text, source)
        except ConfigError as error:
            document.refused += error.problems
        except ValueError as error:
            document.refused.append(Problem(file=source, line=0, column=0, path="", message=str(error)))


def parse_path(text: str) -> Loc:
    """The location that a path names.

    Raises:
        ValueError: it is not a path.
    """
    loc: list[str | int] = []
    position = 0
    while position < len(text):
        match = _PART.match(text, position)
        if match is None or (not loc and text[0] in ".["):
            raise ValueError(f"'{text}' is not a path; write keys with dots and indices in brackets: gates[1].max_drop")
        key, index = match.groups()
        loc.append(key if key is not None else int(index))
        position = match.end()
    if not loc:
        raise ValueError("expected path=value, such as train.with.epochs=3")
    return tuple(loc)


def _apply(document: Document, text: str, source: str) -> None:
    path, equals, value = text.partition("=")
    wanted = parse_path(path.strip() if equals else "")
    content = read_text(value, source=source, positions=False)
    loc: Loc = ()
    for part in wanted[:-1]:
        loc = _step(document, loc, part, Place(source=source))
    container, last = document.at(loc), wanted[-1]
    if container is None:
        document.replace(loc, {}, {(): Place(source=source)}, {})
    elif isinstance(container, list):
        _require_entry(container, last, loc)
    elif not isinstance(container, dict):
        raise ValueError(_no_room(container, loc))
    here = (*loc, last)
    document.replace(here, content.value, content.places, content.keys)
    document.findings += [replace(finding, loc=here + finding.loc) for finding in content.findings]


def _step(document: Document, loc: Loc, part: str | int, place: Place) -> Loc:
    """One step down. Index 0 of a lone mapping is that mapping; a key that is missing or blank becomes a mapping."""
    container = document.at(loc)
    if isinstance(container, list):
        _require_entry(container, part, loc)
    elif not isinstance(container, dict):
        raise ValueError(_no_room(container, loc))
    elif part == 0 and part not in container:
        return loc
    elif container.get(part) is None:
        document.replace((*loc, part), {}, {(): place}, {})
    return (*loc, part)


def _require_entry(container: list[object], part: str | int, loc: Loc) -> None:
    if not isinstance(part, int):
        raise ValueError(f"{path_text(loc)} is a list; name an entry by its index, such as {path_text((*loc, 0))}")
    if part >= len(container):
        count = f"{len(container)} {'entry' if len(container) == 1 else 'entries'}"
        raise ValueError(f"{path_text(loc)} has {count}, counted from 0; there is no {path_text((*loc, part))}")


def _no_room(container: object, loc: Loc) -> str:
    return f"{path_text(loc) or 'the file'} is {describe(container)}, so nothing can be set inside it"
