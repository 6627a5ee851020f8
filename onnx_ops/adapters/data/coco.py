"""Read the objects of images from an annotation file in the format of COCO.

https://cocodataset.org/#format-data describes the format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx_ops.errors import UserError, describe_error
from onnx_ops.ports.data import Array

OBJECTS, POSES = "objects", "poses"
"""Names of the arrays of boxes, and of boxes with keypoints."""

IMAGE_IDS = "image_id"
"""Name of the array that names the image of each row."""

_EMPTY = -1.0
"""Class of an unused place in the objects of a row."""

_LARGEST = 1e15
"""Largest absolute value of a number.

Larger numbers are not pixels, and can overflow.
"""

_OUTSIDE = 1.0
"""Pixels by which a box can exceed its image, since coordinates were rounded."""


def read_annotations(path: Path, arrays: Mapping[str, Array], *, where: str) -> Mapping[str, Array]:
    """Return the boxes of each row's objects, and their keypoints if there are any.

    `objects` has shape (rows, objects, 6): x1, y1, x2, y2, class, crowd. `poses` has also the area
    and x, y, visibility of each keypoint. Classes are numbers from 0 in the order of the ids of
    categories. Places without an object have the class -1.

    Args:
        arrays: arrays of the data set. Rows are in the order of its array `image_id` if there is
            one, else in that of the images of the file.

    Raises:
        UserError: the file has another format, an object is invalid, or `image_id` contains an id
            that the file does not.
    """
    content = _load(path, where)
    images = {_get(entry, "id", "an image", where): entry for entry in content["images"]}
    classes = _number_categories(content["categories"], where)
    entries = [(entry, f"annotation {entry.get('id', '?')}") for entry in content["annotations"]]
    keypoints = [_read_numbers(entry, "keypoints", place, where) for entry, place in entries]
    points = max(map(len, keypoints), default=0)
    by_image: dict[Any, list[list[float]]] = {identity: [] for identity in images}
    for (entry, place), given in zip(entries, keypoints, strict=True):
        image = _get(entry, "image_id", place, where)
        if image not in images:
            raise UserError(
                f"{place} names image {image}, which 'images' does not list",
                where=where,
                remedy="Add the image to 'images', or remove the annotation.",
            )
        corners = _read_box(entry, images[image], place, where)
        values = _read_values(entry, corners, classes, place, where)
        by_image[image].append([*corners, *values, *_complete_points(given, points, place, where)])
    return _stack([by_image[image] for image in _list_rows(images, arrays, where)], points)


def _number_categories(categories: Sequence[Mapping[str, Any]], where: str) -> dict[Any, int]:
    """Return the class of each category, in the order of the ids."""
    identities = [_get(entry, "id", "a category", where) for entry in categories]
    # Ids that are strings follow the integers, since the two types cannot be compared.
    ordered = sorted(identities, key=lambda identity: (isinstance(identity, str), identity))
    return {identity: number for number, identity in enumerate(ordered)}


def _load(path: Path, where: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(
            "the annotations cannot be read as JSON", where=where, why=describe_error(error)
        ) from error
    for key in ("images", "categories", "annotations"):
        entries = content.get(key) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
            raise UserError(
                f"the annotations have no list {key!r} of JSON objects",
                where=where,
                remedy="Use a file in the format of COCO: images, categories and annotations.",
            )
    return dict(content)


def _get(entry: Mapping[str, Any], key: str, place: str, where: str) -> Any:
    """Return the id under a key, an integer or a string.

    `place` names the entry in errors.
    """
    if not isinstance(entry.get(key), int | str):
        what = f"{place} has no {key!r} that is an integer or a string: {str(dict(entry))[:80]}"
        raise UserError(what, where=where)
    return entry[key]


def _read_numbers(entry: Mapping[str, Any], key: str, place: str, where: str) -> Sequence[float]:
    """Return a list of numbers, which is empty if the key is missing."""
    values = entry.get(key, [])
    if not isinstance(values, list) or not all(map(_is_number, values)):
        raise UserError(
            f"{place} has a {key!r} that is not a list of numbers within ±{_LARGEST:g}: "
            f"{str(values)[:80]}",
            where=where,
        )
    return [float(value) for value in values]


def _read_number(entry: Mapping[str, Any], key: str, place: str, where: str) -> float | None:
    """Return a number; None if the key is missing, null or 0."""
    value = entry.get(key)
    if value is not None and not _is_number(value):
        raise UserError(
            f"{place} has a {key!r} that is not a number within ±{_LARGEST:g}: {str(value)[:80]}",
            where=where,
        )
    return float(value) if value else None


def _is_number(value: object) -> bool:
    """Return whether a value is a number from -`_LARGEST` to `_LARGEST`."""
    return isinstance(value, int | float) and abs(value) <= _LARGEST


def _read_values(
    entry: Mapping[str, Any],
    corners: Sequence[float],
    classes: Mapping[Any, int],
    place: str,
    where: str,
) -> tuple[float, float, float]:
    """Return the class, whether the object is a crowd, and the area.

    Raises:
        UserError: the category is missing from the categories of the file, or the area is not a
            number from -`_LARGEST` to `_LARGEST`.
    """
    category = _get(entry, "category_id", place, where)
    if category not in classes:
        known = ", ".join(str(one) for one in list(classes)[:5])
        raise UserError(
            f"{place} has category {category}, which is not among the categories: {known}"
            f"{', …' if len(classes) > 5 else ''}",
            where=where,
        )
    box_area = (corners[2] - corners[0]) * (corners[3] - corners[1])
    area = _read_number(entry, "area", place, where) or box_area
    return float(classes[category]), float(bool(entry.get("iscrowd", 0))), area


def _complete_points(
    values: Sequence[float], points: int, place: str, where: str
) -> Sequence[float]:
    """Return the values of the keypoints; zeros if the object has none.

    `points` is the largest number of values that an annotation of the file has.

    Raises:
        UserError: the number of values does not fit the keypoints of the file.
    """
    if len(values) % 3:
        raise UserError(
            f"{place} has {len(values)} values of keypoints, but each keypoint needs three",
            where=where,
            remedy="Write x, y and visibility of each keypoint.",
        )
    if len(values) not in (0, points):
        raise UserError(
            f"{place} has {len(values)} values of keypoints instead of 0 or {points}",
            where=where,
            remedy="Give all annotations with keypoints the same number of keypoints.",
        )
    return values or [0.0] * points


def _read_box(
    entry: Mapping[str, Any], image: Mapping[str, Any], place: str, where: str
) -> list[float]:
    """Return the corners of a box.

    Raises:
        UserError: the box is malformed, or exceeds its image by more than a pixel.
    """
    box = entry.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
        raise UserError(
            f"{place} has no box of four numbers within ±{_LARGEST:g}: {box}",
            where=where,
            remedy="Write the box as x, y, width, height.",
        )
    x, y, width, height = (float(value) for value in box)
    if width < 0 or height < 0:
        raise UserError(
            f"{place} has a box with a negative size: {box}",
            where=where,
            remedy="Write the box as x, y, width, height.",
        )
    limits = {
        key: _read_number(image, key, f"image {image['id']}", where) for key in ("width", "height")
    }
    right, bottom = (limit or math.inf for limit in limits.values())
    outside = max(-x, -y, x + width - right, y + height - bottom)
    if outside > _OUTSIDE:
        size = ", ".join(f"{key} {limit:g}" for key, limit in limits.items() if limit)
        raise UserError(
            f"{place} has a box that extends beyond image {image['id']}: {box}",
            where=where,
            why=f"the image has {size}" if size else "",
            remedy="Write the box as x, y, width, height, within the image.",
        )
    return [max(0.0, x), max(0.0, y), x + width, y + height]


def _list_rows(images: Mapping[Any, Any], arrays: Mapping[str, Array], where: str) -> Sequence[Any]:
    """Return the id of the image of each row.

    Raises:
        UserError: `image_id` contains an id that the file does not.
    """
    if IMAGE_IDS not in arrays:
        return list(images)
    rows = arrays[IMAGE_IDS].reshape(-1).tolist()
    for row, image in enumerate(rows):
        if image not in images:
            raise UserError(
                f"row {row} of {IMAGE_IDS!r} names image {image}, which the annotations do not "
                "list",
                where=where,
            )
    return rows


def _stack(rows: Sequence[Sequence[Sequence[float]]], points: int) -> Mapping[str, Array]:
    """Return the arrays of objects, with at least one place in each row.

    `rows` contains the values of each row's objects, with `points` values of keypoints each.
    """
    import numpy as np

    places = max(1, *(len(row) for row in rows)) if rows else 1
    poses = np.zeros((len(rows), places, 7 + points))
    poses[..., 4] = _EMPTY
    for number, row in enumerate(rows):
        if row:
            poses[number, : len(row)] = row
    objects: dict[str, Array] = {OBJECTS: np.ascontiguousarray(poses[..., :6])}
    return objects | {POSES: poses} if points else objects
