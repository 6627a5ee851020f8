"""Counts by user as a server sends them: a vector of cells for each deployment, one a bucket of users.

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
REQUESTS, ERRORS, TIMED = range(3)
OVER = (3, 4, 5, 6)
"""Requests over the thresholds of `domain.rollout_policy.QUANTILES`, in their order."""
OUTCOMES, SUCCESSES = 7, 8
FIELDS = 9


def read(text: str) -> npt.NDArray[np.int64]:
    """The cells of one deployment, (`CELLS`, `FIELDS`).

    Raises:
        ValueError: the text is something else.
    """
    import numpy as np

    raw = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), CELLS * FIELDS * 8)
    return np.frombuffer(raw, dtype="<u8").astype(np.int64).reshape(CELLS, FIELDS)
