"""Explain the difference of two sequences of token ids, or of two texts."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt


def _drop_accents(text: str) -> str:
    parts = unicodedata.normalize("NFKD", text)
    return "".join(part for part in parts if not unicodedata.combining(part))


def _drop_special(text: str) -> str:
    words = (word for word in text.split() if not (word[:1] in "[<" and word[-1:] in "]>"))
    return " ".join(words)


def _repair_encoding(text: str) -> str:
    try:
        return text.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return text


_FORMS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("white space at the ends", str.strip),
    ("upper and lower case", str.lower),
    ("white space", lambda text: " ".join(text.split())),
    ("white space and case", lambda text: " ".join(text.lower().split())),
    ("Unicode normalization", lambda text: unicodedata.normalize("NFKC", text)),
    ("accents", _drop_accents),
    ("accents and case", lambda text: _drop_accents(text.lower())),
    ("punctuation", lambda text: "".join(c for c in text if c.isalnum() or c.isspace())),
    ("special tokens", _drop_special),
    ("encoding: UTF-8 was read as Latin-1", _repair_encoding),
)


def name_text_difference(reference: str, value: str) -> str:
    """Return the name of the simplification that makes two texts equal; else ""."""
    return next((name for name, simplify in _FORMS if simplify(reference) == simplify(value)), "")


def explain_texts(reference: str, value: str) -> str:
    """Return how the candidate's text differs from the reference."""
    if name := name_text_difference(reference, value):
        return f"text: the difference is {name}"
    shorter, longer = sorted((reference, value), key=len)
    if shorter and longer.startswith(shorter):
        side = "candidate" if len(value) < len(reference) else "source"
        return f"length: the {side} cuts the text to {len(shorter)} characters"
    if shorter and longer.endswith(shorter):
        side = "candidate" if len(value) < len(reference) else "source"
        return f"length: the {side} drops the first {len(longer) - len(shorter)} characters"
    place = next(
        (i for i, (a, b) in enumerate(zip(reference, value, strict=False)) if a != b), len(shorter)
    )
    return f"text: the first difference is at character index {place}"


def explain_tokens(reference: npt.NDArray[Any], value: npt.NDArray[Any]) -> str:
    """Return how the candidate's token ids differ from the reference."""
    ours, theirs = _flatten(reference), _flatten(value)
    if not ours or not theirs:
        return f"length: {len(theirs)} instead of {len(ours)} ids"
    left, right = _find_padding(ours, theirs), _find_padding(theirs, ours)
    a, b = _strip(ours, left), _strip(theirs, right)
    if a == b:
        return _explain_padding(ours, theirs, left, right)
    special = _explain_special(a, b)
    return special or _explain_truncation(a, b) or _explain_vocabulary(a, b)


def _flatten(array: npt.NDArray[Any]) -> list[int]:
    return [int(part) for part in array.reshape(-1)]


def _find_padding(ids: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the id that pads one end; None if there is none.

    A single id at an end pads only if it is 0, or if the other sequence ends with two or more ids
    of this value.
    """
    for end, step in ((ids[-1], -1), (ids[0], 1)):
        run = 0
        for part in ids[::step]:
            if part != end:
                break
            run += 1
        if run >= 2 or (run == 1 and end == 0):
            return end
    padding = other[-1] if len(other) > 1 and other[-1] == other[-2] else None
    return padding if padding is not None and padding in (ids[0], ids[-1]) else None


def _strip(ids: Sequence[int], padding: int | None) -> list[int]:
    start, end = 0, len(ids)
    while padding is not None and end > start and ids[end - 1] == padding:
        end -= 1
    while padding is not None and start < end and ids[start] == padding:
        start += 1
    return list(ids[start:end])


def _explain_padding(
    ours: Sequence[int], theirs: Sequence[int], left: int | None, right: int | None
) -> str:
    if len(ours) != len(theirs):
        return f"padding: to {len(theirs)} instead of {len(ours)} ids"
    if left is not None and right is not None and left != right:
        return f"padding: with id {right} instead of {left}"
    if left is not None and ours[-1] == left and theirs[-1] != left:
        return "padding side: the source pads on the right, the candidate on the left"
    if left is not None and ours[0] == left and theirs[0] != left:
        return "padding side: the source pads on the left, the candidate on the right"
    return "padding: as many padding ids, but divided differently between start and end"


def _explain_special(a: Sequence[int], b: Sequence[int]) -> str:
    """Return which ids around the text only one of the sides adds."""
    for side, longer, shorter in (("candidate", a, b), ("source", b, a)):
        for first, last in ((1, 1), (1, 0), (0, 1)):
            inner = list(longer[first : len(longer) - last])
            added = [*longer[:first], *longer[len(longer) - last :]]
            if inner == list(shorter) and shorter and not _is_cut(longer, shorter):
                return f"special tokens: the {side} lacks {', '.join(map(str, added))}"
    return ""


def _is_cut(longer: Sequence[int], shorter: Sequence[int]) -> bool:
    """Return whether `shorter` is probably a truncated copy of `longer`.

    Otherwise, it probably lacks a special token. Truncated sequences often have a multiple of 8
    ids.
    """
    return len(shorter) >= 8 and len(shorter) % 8 == 0 and list(longer[: len(shorter)]) == shorter


def _explain_truncation(a: Sequence[int], b: Sequence[int]) -> str:
    shorter, longer = (a, b) if len(a) < len(b) else (b, a)
    side = "source" if shorter is a else "candidate"
    common = sum(1 for _ in _take_equal(shorter, longer))
    # A closing special token may follow the cut.
    if len(shorter) < len(longer) and common >= len(shorter) - 1 and common >= 1:
        return f"truncation: the {side} cuts to {len(shorter)} ids of {len(longer)}"
    backwards = sum(1 for _ in _take_equal(shorter[::-1], longer[::-1]))
    if len(shorter) < len(longer) and backwards >= len(shorter) - 1 and backwards >= 1:
        return f"truncation: the {side} cuts the beginning, to {len(shorter)} ids of {len(longer)}"
    if len(a) == len(b) and (_overlap(a, b) or _overlap(a[1:-1], b[1:-1])):
        return "truncation side: both cut the text, at different ends"
    return ""


def _take_equal(a: Sequence[int], b: Sequence[int]) -> list[int]:
    taken = []
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        taken.append(left)
    return taken


def _overlap(a: Sequence[int], b: Sequence[int]) -> bool:
    """Return whether the end of one sequence is the beginning of the other.

    At least a quarter of the ids, and at least three, must be common.
    """
    length = len(a)
    return any(
        list(x[-size:]) == list(y[:size])
        for size in range(max(3, length // 4), length)
        for x, y in ((a, b), (b, a))
    )


def _explain_vocabulary(a: Sequence[int], b: Sequence[int]) -> str:
    if len(a) != len(b):
        return (
            f"tokenizer: {len(b)} instead of {len(a)} ids "
            "(another tokenizer, vocabulary or lower case)"
        )
    if Counter(a) == Counter(b):
        return "tokenizer: the same ids in another order"
    offsets = Counter(right - left for left, right in zip(a, b, strict=True) if left != right)
    count = offsets.total()
    if len(offsets) == 1 and count > 1:
        return f"vocabulary: {count} of {len(a)} ids differ by {next(iter(offsets)):+d}"
    unknown = Counter(y for x, y in zip(a, b, strict=True) if x != y).most_common(1)[0]
    if unknown[1] == count:
        return (
            f"tokenizer: {count} of {len(a)} ids are {unknown[0]} in the candidate "
            "(unknown words: another vocabulary or lower case)"
        )
    return f"tokenizer: {count} of {len(a)} ids differ (another tokenizer or lower case)"
