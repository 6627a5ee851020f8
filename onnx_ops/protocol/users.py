"""Counts by user as a server sends them: for each deployment and field a vector of cells, one a bucket of users.

Readers of several servers add the vectors of each deployment first: a user may be seen by all of them.
"""

from __future__ import annotations

import base64
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

BUCKETS = 1 << 14
"""Users are told apart by the first 14 bits of the hash that splits traffic. What has no key counts in a last cell."""
KEYLESS = BUCKETS
CELLS = BUCKETS + 1
REQUESTS, ERRORS, OUTCOMES, SUCCESSES, GRADES = range(5)
"""From `GRADES` on: timed requests by how many of the thresholds of a watch they exceed."""
MOST_LIMITS = 24
"""Thresholds of a watch: the places of a distribution, and the four quantiles where they allow for other slow-downs."""
FIELDS = GRADES + MOST_LIMITS + 1


def read(text: str) -> npt.NDArray[np.int64]:
    """The cells of one deployment, (`FIELDS`, `CELLS`).

    Raises:
        ValueError: the text is something else.
    """
    import numpy as np

    raw = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), CELLS * FIELDS * 8)
    return np.frombuffer(raw, dtype="<u8").astype(np.int64).reshape(FIELDS, CELLS)
