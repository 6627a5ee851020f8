"""Validation errors in the words of the person who wrote the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import ErrorDetails

from onnx_ops.config.binding import Bound, yaml_keys
from onnx_ops.config.document import BROKEN, Document, Finding
from onnx_ops.config.unions import CUSTOM
from onnx_ops.config.words import describe, did_you_mean, listing
from onnx_ops.domain.quantization import DISTRIBUTION

_KEY = "[key]"
_YAML_1_1 = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def explain(bound: Bound, document: Document) -> list[Finding]:
    """One finding for each error, without those about values that could not be read in the first place."""
    findings = [_finding(error, bound, document) for error in bound.errors]
    return [finding for finding in findings if document.at(finding.loc) is not BROKEN]


def _finding(error: ErrorDetails, bound: Bound, document: Document) -> Finding:
    parts = [part for part in error["loc"] if not (isinstance(part, str) and part.startswith("<"))]
    on_key = _KEY in parts
    context: dict[str, Any] = error.get("ctx", {})
    if below := context.get("below"):
        parts.append(below)
        on_key = below not in error["input"]
    loc = document.written(tuple(part for part in parts if part != _KEY))
    if error["type"] == "missing":
        return Finding(loc=loc, message=f"missing key '{parts[-1]}'", on_key=True)
    if error["type"] == "extra_forbidden":
        known = yaml_keys(bound.kinds[id(document.at(loc[:-1]))])
        hint = did_you_mean(str(loc[-1]), known) or f"; known keys: {', '.join(known)}"
        return Finding(loc=loc, message=f"unknown key '{loc[-1]}'{hint}", on_key=True)
    if error["type"] == CUSTOM:
        return Finding(loc=loc, message=context["message"], on_key=on_key)
    if on_key and error["type"] not in _EXPECTED:
        return Finding(loc=loc, message=_message(error["type"], context, loc[-1]), on_key=True)
    if on_key:
        message = f"a key here must be {_EXPECTED[error['type']]}, not {describe(loc[-1])}"
        return Finding(loc=loc, message=message + _advice(error["type"], loc[-1]), on_key=True)
    return Finding(loc=loc, message=_message(error["type"], context, document.at(loc)))


def _message(kind: str, context: Mapping[str, Any], written: Any) -> str:
    got = f"got {describe(written)}"
    if expected := _EXPECTED.get(kind):
        return f"expected {expected}, {got}{_advice(kind, written)}"
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return f"must be {words} {_limit(context[name], written)}, {got}"
    return _OTHER[kind](context, written)


_EXPECTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "list_type": "a list",
}
_LIMITS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


_REFUSED: Mapping[str, str] = {"distribution": DISTRIBUTION}
"""Words that a library knows and that are refused here, with the reason."""


def _literal(context: Mapping[str, Any], written: Any) -> str:
    if isinstance(written, str) and written in _REFUSED:
        return _REFUSED[written]
    known = [word.strip().strip("'") for word in str(context["expected"]).replace(" or ", ", ").split(",")]
    hint = did_you_mean(written, known) if isinstance(written, str) else ""
    return f"expected {'one of ' if len(known) > 1 else ''}{listing(known)}, got {describe(written)}{hint}"


_OTHER: Mapping[str, Callable[[Mapping[str, Any], Any], str]] = {
    "literal_error": _literal,
    "too_short": lambda context, _: f"needs at least {_entries(context['min_length'])}",
    "string_too_long": lambda context, written: f"'{written}' is longer than {context['max_length']} characters",
    "predicate_failed": lambda _, written: f"{describe(written)} is not a digest: sha256: and 64 digits of 0-9a-f",
    "string_pattern_mismatch": lambda _, written: (
        f"'{written}' is not a name: use lower-case letters, digits and dashes, beginning with a letter or digit"
    ),
}
"""What each remaining kind of error says; the only pattern is that of names (`NAME_PATTERN`), the only
predicate that of digests."""


def _entries(count: int) -> str:
    return "one entry" if count == 1 else f"{count} entries"


def _advice(kind: str, written: Any) -> str:
    if kind == "string_type" and isinstance(written, bool | int | float):
        text = str(written).lower() if isinstance(written, bool) else written
        return f"; put it in quotes: '{text}'"
    if kind in ("int_type", "float_type") and isinstance(written, str) and _is_number(written):
        return "; leave out the quotes"
    if kind == "bool_type" and isinstance(written, str) and (word := _YAML_1_1.get(written.lower())):
        return f"; write {word}"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _limit(limit: float, written: Any) -> str:
    """A limit in the unit that the value is written in; percentages are the only ones with a limit but zero."""
    return f"{limit * 100:g}%" if isinstance(written, str) and written.endswith("%") else f"{limit:g}"
