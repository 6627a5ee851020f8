"""Inputs of a model that take one encoded file per row, such as an image.

Such an input is a uint8 tensor of shape (rows, bytes). Each row is one file, padded with zeros at
its end. The decoder is a node of the model.
"""

from __future__ import annotations

import json

from onnx_ops.errors import UserError

ENCODED_PROPERTY = "onnx-ops.encoded-inputs"
"""Property of an ONNX file that maps each encoded input to the kind of its files.

The value is a JSON object, such as `{"image": "image"}`.
"""

IMAGE = "image"
"""Kind of an input whose rows are PNG or JPEG files."""


def format_encoded_inputs(kinds: dict[str, str]) -> str:
    """Return the value of the property."""
    return json.dumps(kinds, sort_keys=True)


def parse_encoded_inputs(value: str) -> dict[str, str]:
    """Return the kind of each encoded input; none for an empty value.

    Raises:
        UserError: the value is not a JSON object, or contains an unknown kind.
    """
    if not value:
        return {}
    try:
        kinds = json.loads(value)
    except ValueError:
        kinds = None
    if not isinstance(kinds, dict) or any(kind != IMAGE for kind in kinds.values()):
        raise UserError(
            f"the property {ENCODED_PROPERTY} of the file is not valid",
            why=f"it is {value[:80]!r}",
            remedy=f'Write an object such as {{"INPUT": "{IMAGE}"}}.',
        )
    return kinds
