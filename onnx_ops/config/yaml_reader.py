"""Read strict YAML into a `Document` with PyYAML's composer.

Scalars are those of YAML 1.2's core schema. Tags construct no objects, because the loader stops
at the node graph. The size, the number of nodes, the depth and the expansion of aliases are
limited.
"""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer, ComposerError
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from onnx_ops.config.document import BROKEN, Document, Issue, Loc, Place
from onnx_ops.config.folders import PIPELINES, find_config_folder
from onnx_ops.config.messages import describe, shorten
from onnx_ops.errors import ConfigError, NotFoundError, Problem, UserError

MAX_BYTES = 1 << 20
MAX_NODES = 20_000
MAX_DEPTH = 40

_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_OTHER_BASE = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_MOST_DIGITS = 32

_CLOSE_NAME = 0.65
_LISTED = 3
"""Maximum number of pipeline files in a hint without a similar name."""


def read_file(path: Path) -> Document:
    """Read a YAML file from disk.

    Raises:
        NotFoundError: there is no such file.
        UserError: the file cannot be read, is binary, or is in UTF-16.
        ConfigError: the file is too large, has bytes other than UTF-8, or is not YAML.
    """
    source = format_path(path)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise NotFoundError("no such file", where=source, remedy=_near(path)) from error
    except IsADirectoryError as error:
        raise UserError(
            "this is a folder, not a file", where=source, remedy=_near(path / "file.yaml")
        ) from error
    except OSError as error:
        raise UserError(
            "the file cannot be read", where=source, why=error.strerror or str(error)
        ) from error
    if len(data) > MAX_BYTES:
        raise _refusal(Place(source=source), f"the file is larger than {MAX_BYTES >> 20} MiB")
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        remedy = f"Save it as UTF-8: iconv -f UTF-16 -t UTF-8 {source} > NEW.yaml"
        raise UserError(
            "the file is in UTF-16",
            where=source,
            why="onnx-ops reads only UTF-8",
            remedy=remedy,
        )
    if b"\0" in data:
        raise UserError(
            "the file is binary, not text", where=source, remedy=_near(path.with_suffix(".yaml"))
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        place = Place(source=source, line=line, column=column)
        raise _refusal(place, "this byte is not UTF-8; save the file as UTF-8") from error
    return read_text(text, source=source)


def _near(path: Path) -> str:
    """Return a hint to the file that was probably meant.

    The hint names a file with a similar name in the same folder or among the pipelines. Without
    such a file, it names up to `_LISTED` existing pipelines. It is empty if there are none.
    """
    usual = find_config_folder(Path()) / PIPELINES
    folders = dict.fromkeys((path.parent, usual, path.parent / usual))
    candidates = [
        str(other) for folder in folders for other in sorted(folder.glob("*.y*ml")) if other != path
    ]
    names: dict[str, str] = {}
    for place in candidates:
        names.setdefault(Path(place).stem, place)
    close = difflib.get_close_matches(path.stem, names, n=1, cutoff=_CLOSE_NAME)
    if close:
        return f"Did you mean {names[close[0]]}?"
    pipelines = [place for place in candidates if PIPELINES in Path(place).parts]
    listed = ", ".join((*pipelines[:_LISTED], *["…"] * (len(pipelines) > _LISTED)))
    return f"Pipeline files here: {listed}" if pipelines else ""


def read_text(text: str, *, source: str, positions: bool = True) -> Document:
    """Read a YAML text into a document.

    Without `positions`, every place is the source as a whole (for values from the command line).
    Problems of single values (duplicate keys, tags, ambiguous numbers) are collected as the
    document's issues.

    Raises:
        ConfigError: the text is not YAML, or exceeds a limit of this module.
    """
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        conversion = _Conversion(source, loader.tags, positions)
        value = None if node is None else conversion.convert(node, ())
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        why = f"character U+{int(error.character):04X} is not allowed"
        raise _refusal(
            Place(source=source, line=line if positions else 0, column=column), why
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark and positions else (0, 0)
        raise _refusal(
            Place(source=source, line=line, column=column), _syntax_message(error)
        ) from error
    first = Place(source=source, line=1, column=1) if positions else Place(source=source)
    conversion.places.setdefault((), first)
    return Document(
        source=source,
        value=value,
        places=conversion.places,
        keys=conversion.keys,
        issues=conversion.issues,
    )


def format_path(path: Path) -> str:
    """Return a path relative to the working directory, if the file is below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


class _Loader(Reader, Scanner, Parser, Composer, BaseResolver):
    """PyYAML's loader without its constructor: it stops at the node graph.

    The depth and the number of nodes are limited. `tags` has the explicit tags by the identity of
    the node.
    """

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)
        self.tags: dict[int, str] = {}
        self._depth = 0
        self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        self._depth += 1
        self._nodes += 1
        if self._depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise ComposerError(None, None, _too_much(self._depth), event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if tag := getattr(event, "tag", None):
            self.tags[id(node)] = tag
        return node


class _Conversion:
    """Conversion of a node graph to plain values.

    Aliases are expanded, and each use of an alias counts its nodes again.
    """

    def __init__(self, source: str, tags: dict[int, str], positions: bool) -> None:
        self.places: dict[Loc, Place] = {}
        self.keys: dict[Loc, Place] = {}
        self.issues: list[Issue] = []
        self._source = source
        self._tags = tags
        self._positions = positions
        self._nodes = 0

    def convert(self, node: yaml.Node, loc: Loc) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES or len(loc) > MAX_DEPTH:
            raise ComposerError(None, None, _too_much(len(loc)), node.start_mark)
        self.places[loc] = self._place(node)
        if tag := self._tags.get(id(node)):
            return self._broken(loc, f"tags are not allowed: '{_tag_text(tag)}'")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, loc)
        if not isinstance(node, yaml.MappingNode):
            return [self.convert(item, (*loc, index)) for index, item in enumerate(node.value)]
        result: dict[str | int, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, loc)
            if key is None:
                continue
            below = (*loc, key)
            if key in result:
                first = f" (first on line {self.keys[below].line})" if self._positions else ""
                self._blame(key_node, below, f"duplicate key '{shorten(str(key))}'{first}")
                continue
            self.keys[below] = self._place(key_node)
            result[key] = self.convert(value_node, below)
        return result

    def _key(self, node: yaml.Node, loc: Loc) -> str | int | None:
        """Return the key; add an issue and return None if the node cannot be a key."""
        if not isinstance(node, yaml.ScalarNode):
            self._blame(
                node, (*loc, ""), "a key must be a string or a whole number, not a list or mapping"
            )
            return None
        if tag := self._tags.get(id(node)):
            self._blame(node, (*loc, ""), f"tags are not allowed: '{_tag_text(tag)}'")
            return None
        if node.style is None and node.value == "<<":
            self._blame(node, (*loc, ""), "merge keys (<<) are not YAML 1.2; write the keys out")
            return None
        key = self._scalar(node, (*loc, ""))
        if isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool)):
            return key
        if key is not BROKEN:
            self._blame(
                node,
                (*loc, ""),
                f"a key must be a string or a whole number, got {describe(key)}; quote it",
            )
        return None

    def _scalar(self, node: yaml.ScalarNode, loc: Loc) -> Any:
        text: str = node.value
        if node.style is not None:
            return text
        try:
            return plain_scalar(text)
        except ValueError as error:
            return self._broken(loc, str(error))

    def _blame(self, node: yaml.Node, loc: Loc, message: str) -> None:
        self.issues.append(Issue(loc, message, on_key=True, place=self._place(node)))

    def _broken(self, loc: Loc, message: str) -> Any:
        self.issues.append(Issue(loc, message))
        return BROKEN

    def _place(self, node: yaml.Node) -> Place:
        if not self._positions:
            return Place(source=self._source)
        return Place(
            source=self._source, line=node.start_mark.line + 1, column=node.start_mark.column + 1
        )


def plain_scalar(text: str) -> str | int | float | bool | None:
    """Return the value of an unquoted scalar by YAML 1.2's core schema.

    Raises:
        ValueError: the scalar is a number that other readers interpret differently (`012`), that is
            NaN or infinite, or that exceeds 64 bits.
    """
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _LEADING_ZERO.fullmatch(text):
        plain = text.lstrip("+-0")
        plain = f"{'-' if text[0] == '-' else ''}{plain}" if plain else "0"
        raise ValueError(
            f"'{shorten(text)}' is ambiguous: some YAML parsers read a leading zero as "
            f"octal; write {shorten(plain)}, or quote it to make it a string"
        )
    if _INT.fullmatch(text) or _OTHER_BASE.fullmatch(text):
        if len(text) > _MOST_DIGITS or not -(2**63) <= int(text, 0) < 2**63:
            raise ValueError(
                f"the number {shorten(text)} does not fit in 64 bits; quote it to make it a string"
            )
        return int(text, 0)
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(f"{text} is not a finite number")
    if _FLOAT.fullmatch(text):
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(f"the number {shorten(text)} is too large")
        return number
    return text


def _too_much(depth: int) -> str:
    if depth > MAX_DEPTH:
        return f"the values are nested more than {MAX_DEPTH} levels deep"
    return f"there are more than {MAX_NODES} values (aliases count each time they are used)"


def _tag_text(tag: str) -> str:
    return shorten(tag.replace("tag:yaml.org,2002:", "!!"))


def _syntax_message(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "it cannot be parsed"
    if "another document" in problem:
        return "a second document begins here ('---'); write one document per file"
    if "'\\t'" in problem:
        return "not valid YAML: a tab is not allowed here; use spaces"
    if "'<block mapping start>'" in problem:
        return "not valid YAML: this key is indented differently from the keys around it"
    if isinstance(error, ComposerError) and not error.context:
        return problem
    context = f" {error.context}" if error.context else ""
    return f"not valid YAML:{context + ',' if context else ''} {problem}"


def _refusal(place: Place, message: str) -> ConfigError:
    problem = Problem(
        file=place.source, line=place.line, column=place.column, path="", message=message
    )
    return ConfigError((problem,))
