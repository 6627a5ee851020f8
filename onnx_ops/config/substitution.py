"""Read files with overrides, environment variables and parameters.

An override is written `--set path=value`, an environment variable `${env:NAME}`, and a parameter
`${params:train.epochs}`.

A path consists of keys with dots and indices in brackets: `train.with.epochs`,
`gates[1].max_drop`. A problem with the value of an override is located at the option. A problem
with a parameter that is a whole value is located in `params.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx_ops.config.document import BROKEN, Document, Issue, Loc, Place, path_text
from onnx_ops.config.messages import describe, did_you_mean, shorten
from onnx_ops.config.reach import PROJECT_ONLY, Reach
from onnx_ops.config.yaml_reader import read_file, read_text
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import ConfigError, NotFoundError, Problem
from onnx_ops.printable import hide

NEWEST_SCHEMA = 1
"""The newest `schema` of files that this version of onnx-ops reads.

A file without the key `schema` has schema 1.
"""

PARAMETERS_FILE = "params.yaml"
WITHOUT_PARAMETERS: tuple[tuple[str, ...], ...] = (
    ("schema",),
    ("pipeline",),
    ("deploy", "endpoint"),
)
"""Keys whose values must not contain `${params:…}`.

These values are also read without parameters, for example the endpoints of other pipeline files.
The keys are listed from the root, without indices of lists.
"""
WITH_ENVIRONMENT: tuple[tuple[str, ...], ...] = (
    ("deploy", "options", "*"),
    ("deploy", "metrics", "options", "*"),
    ("data", "*", "file"),
    ("register", "model"),
    ("model",),
)
"""Keys whose values can contain `${env:NAME}`; `*` stands for any single key.

They are listed from the root, without indices of lists.
"""

_PART = re.compile(r"\.?([^.\[\]=\s]+)|\[([0-9]{1,6})\]")
_ENVIRONMENT_MARK = "${env:"
_ENVIRONMENT = re.compile(r"\$\{env:([^}]*)\}?")
_ENVIRONMENT_NAME = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_PARAMETER_MARK = "${params:"
_PARAMETER = re.compile(r"\$\{params:([^}]*)\}?")
_PARAMETER_PATH = re.compile(r"\$\{params:([^{}]+)\}")


def read_document(
    path: Path,
    *,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    reach: Reach = PROJECT_ONLY,
) -> Document:
    """Read a file, and apply overrides and environment variables.

    From now on, messages hide the values of the variables that were used, unless a value is very
    short. A `${env:NAME}` becomes an issue if `environ` lacks the variable, or `reach` forbids it.
    It also becomes an issue in a place other than `WITH_ENVIRONMENT`.

    Raises:
        NotFoundError, UserError: The file is missing, or cannot be read.
        ConfigError: The file is empty, too large or not YAML, or needs a newer onnx-ops.
    """
    document = read_file(path)
    if document.value is None:
        raise ConfigError((document.problem(Issue((), "the file is empty")),))
    for override in overrides:
        _apply_override(document, override)
    version = document.at(("schema",))
    if isinstance(version, int) and version > NEWEST_SCHEMA:
        message = (
            f"this file needs a newer onnx-ops: its schema is {version}, "
            f"and the installed version reads up to schema {NEWEST_SCHEMA}"
        )
        raise ConfigError((document.problem(Issue(("schema",), message)),))
    for loc, is_key, text in list(_texts_with(_ENVIRONMENT_MARK, document.value, ())):
        if issue := next(_check_environment(loc, is_key, text, environ or {}, reach), None):
            document.issues.append(issue)
        else:
            for name in _ENVIRONMENT_NAME.findall(text):
                hide((environ or {})[name], f"${{env:{name}}}")
            document.at(loc[:-1])[loc[-1]] = _ENVIRONMENT_NAME.sub(
                lambda match: (environ or {})[match[1]], text
            )
    return document


def parse_path(text: str) -> Loc:
    """Return the location that a path names.

    Raises:
        ValueError: The text is not a path.
    """
    loc: list[str | int] = []
    position = 0
    while position < len(text):
        match = _PART.match(text, position)
        if match is None or (not loc and text[0] in ".["):
            raise ValueError(
                f"'{text}' is not a path; write keys with dots and indices in brackets: "
                "gates[1].max_drop"
            )
        key, index = match.groups()
        loc.append(key if key is not None else int(index))
        position = match.end()
    if not loc:
        raise ValueError("expected path=value, such as train.with.epochs=3")
    return tuple(loc)


def _apply_override(document: Document, override: str) -> None:
    """Apply an override to the document in place.

    A problem with the override itself is added to `document.refused`.
    """
    source = f"--set {override}"
    try:
        path, equals, value = override.partition("=")
        *way, last = parse_path(path.strip() if equals else "")
        content = read_text(value, source=source, positions=False)
        loc: Loc = ()
        for part in way:
            loc = _descend(document, loc, part, source)
        if document.at(loc) is None:
            document.replace(loc, {}, {(): Place(source=source)}, {})
        _require_room(document.at(loc), last, loc)
        target = (*loc, last)
        document.replace(target, content.value, content.places, content.keys)
        document.issues += [replace(issue, loc=target + issue.loc) for issue in content.issues]
    except ConfigError as error:
        document.refused += error.problems
    except ValueError as error:
        document.refused.append(Problem(file=source, line=0, column=0, path="", message=str(error)))


def _descend(document: Document, loc: Loc, part: str | int, source: str) -> Loc:
    """Return the location of `part` in the value at `loc`, if there is room for it.

    If a list has a single entry that is written without its list, index 0 is this entry. The value
    of a missing or blank key becomes an empty mapping.
    """
    container = document.at(loc)
    _require_room(container, part, loc)
    if isinstance(container, dict):
        if part == 0 and part not in container:
            return loc
        if container.get(part) is None:
            document.replace((*loc, part), {}, {(): Place(source=source)}, {})
    return (*loc, part)


def _require_room(container: object, part: str | int, loc: Loc) -> None:
    """Raise ValueError unless something can be set at `part`.

    A value can be set at any key of a mapping, or at an existing entry of a list.
    """
    if isinstance(container, dict):
        return
    if not isinstance(container, list):
        raise ValueError(
            f"{path_text(loc) or 'the file'} is {describe(container)}, "
            "so nothing can be set inside it"
        )
    if not isinstance(part, int):
        raise ValueError(
            f"{path_text(loc)} is a list; name an entry by its index, "
            f"such as {path_text((*loc, 0))}"
        )
    if part >= len(container):
        count = f"{len(container)} {'entry' if len(container) == 1 else 'entries'}"
        raise ValueError(
            f"there is no {path_text((*loc, part))}: {path_text(loc)} has {count}, counted from 0"
        )


def _texts_with(mark: str, value: Any, loc: Loc) -> Iterator[tuple[Loc, bool, str]]:
    """Yield every text that contains `mark` below a location, and whether it is a key."""
    if isinstance(value, str) and mark in value:
        yield loc, False, value
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for part, item in items:
        if isinstance(part, str) and mark in part:
            yield (*loc, part), True, part
        yield from _texts_with(mark, item, (*loc, part))


def _check_environment(
    loc: Loc, is_key: bool, text: str, environ: Mapping[str, str], reach: Reach
) -> Iterator[Issue]:
    keys = [part for part in loc if isinstance(part, str)]
    is_allowed = any(
        len(keys) == len(pattern)
        and all(want in ("*", key) for want, key in zip(pattern, keys, strict=True))
        for pattern in WITH_ENVIRONMENT
    )
    if is_key or not is_allowed:
        places = ", ".join(".".join(pattern) for pattern in WITH_ENVIRONMENT)
        yield Issue(loc, f"${{env:…}} is not allowed here, only in {places}", on_key=is_key)
    for match in _ENVIRONMENT.finditer(text):
        if not _ENVIRONMENT_NAME.fullmatch(match[0]):
            message = f"'{shorten(match[0])}' is not ${{env:NAME}}"
            rule = "NAME has ASCII letters, digits and '_', and does not begin with a digit"
            yield Issue(loc, f"{message}; {rule}")
        elif why := reach.explain_variable(match[1]):
            yield Issue(loc, why)
        elif match[1] not in environ:
            yield Issue(loc, f"environment variable {match[1]} is not set")


def substitute_parameters(document: Document, root: Path) -> Mapping[str, Json]:
    """Substitute the values of the project's `params.yaml`, in place.

    References that cannot be replaced become issues of the document. A reference that is the whole
    value is replaced by the parameter, of any type. A reference within a text can be replaced only
    by a string, a number or a boolean.

    Returns:
        The values that were used, by their path in `params.yaml`.

    Raises:
        UserError: `params.yaml` cannot be read.
        ConfigError: `params.yaml` is too large or not YAML.
    """
    references = list(_texts_with(_PARAMETER_MARK, document.value, ()))
    if not references:
        return {}
    try:
        params = read_file(root / PARAMETERS_FILE)
    except NotFoundError:
        message = f"there is no {PARAMETERS_FILE} at the project's root"
        document.issues += [Issue(loc, message, on_key=is_key) for loc, is_key, _ in references]
        return {}
    used: dict[str, Json] = {}
    for loc, is_key, text in references:
        if issue := next(_check_parameters(loc, is_key, text, params), None):
            document.issues.append(issue)
        elif whole := _PARAMETER_PATH.fullmatch(text):
            path = parse_path(whole[1])
            value = used[whole[1]] = params.at(path)
            places, keys = (
                {
                    known[len(path) :]: place
                    for known, place in table.items()
                    if known[: len(path)] == path
                }
                for table in (params.places, params.keys)
            )
            document.replace(loc, value, places, keys)
        else:
            names = [match[1] for match in _PARAMETER_PATH.finditer(text)]
            used |= {name: params.at(parse_path(name)) for name in names}
            document.at(loc[:-1])[loc[-1]] = _PARAMETER_PATH.sub(
                lambda match: _plain(params.at(parse_path(match[1]))), text
            )
    return used


def _check_parameters(loc: Loc, is_key: bool, text: str, params: Document) -> Iterator[Issue]:
    keys = tuple(part for part in loc if isinstance(part, str))
    if is_key or keys in WITHOUT_PARAMETERS:
        what = "a key" if is_key else ".".join(keys)
        yield Issue(loc, f"${{params:…}} is not allowed for {what}; write a literal", on_key=is_key)
    for match in _PARAMETER.finditer(text):
        if _PARAMETER_PATH.fullmatch(match[0]):
            yield from _check_parameter(loc, match[1], params, is_part=match[0] != text)
        else:
            yield Issue(loc, f"'{shorten(match[0])}' is not of the form ${{params:path.to.value}}")


def _check_parameter(loc: Loc, name: str, params: Document, *, is_part: bool) -> Iterator[Issue]:
    """Yield the problems of a parameter that a text at `loc` names.

    The parameter is the whole text, or a part of it.
    """
    try:
        path = parse_path(name)
    except ValueError as error:
        yield Issue(loc, str(error))
        return
    if path not in params.places:
        hint = did_you_mean(name, {path_text(known) for known in params.places if known})
        yield Issue(loc, f"{PARAMETERS_FILE} has no '{shorten(name)}'{hint}")
        return
    for issue in params.issues:
        if issue.loc[: len(path)] == path:
            yield Issue(loc, issue.message, place=issue.place or params.places.get(issue.loc))
    value = params.at(path)
    if is_part and value is not BROKEN and not isinstance(value, str | int | float):
        message = f"'{shorten(name)}' is {describe(value)}, which cannot be part of a string"
        yield Issue(loc, message, place=params.places[path])


def _plain(value: Json) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
