"""Results of every request of a load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]
FOREVER_NS = int(np.iinfo(np.int64).max)


class Failure(IntEnum):
    """Why a request got no answer, in place of the HTTP status."""

    REFUSED = -1
    """No connection could be made."""
    RESET = -2
    """The connection was reset before the answer was complete."""
    CLOSED = -3
    """The connection was closed before the answer was complete."""
    TIMED_OUT = -4
    GARBLED = -5
    """The received bytes are not HTTP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """One row for each request, in the order in which they ended.

    Times are those of the machine's monotonic clock, in nanoseconds. All processes of a machine
    share this clock.

    Args:
        due_ns: when the request was to be sent. In an open loop it may be earlier than `sent_ns`.
        sent_ns: taken just before the request was sent.
        done_ns: when its answer was complete, or it had failed.
        status: the HTTP status, or a `Failure`.
        deployment: an index into `names`, the deployments that answered; names[0] is "" for answers
            without a name.
        number: the number of the request in the plan.
        key: the user that sent the request.
    """

    due_ns: Column
    sent_ns: Column
    done_ns: Column
    status: Column
    deployment: Column
    number: Column
    key: Column
    names: tuple[str, ...]

    @classmethod
    def from_rows(cls, rows: NDArray[np.int64], names: Sequence[str]) -> Records:
        """Return the records of rows, whose columns are in the order of the fields."""
        return cls(**dict(zip(_COLUMNS, rows.T.copy(), strict=True)), names=tuple(names))

    def __len__(self) -> int:
        return len(self.status)

    def select(self, mask: NDArray[np.bool_]) -> Records:
        """Return the records for which a mask of shape (n,) is true."""
        return replace(self, **{name: getattr(self, name)[mask] for name in _COLUMNS})

    @property
    def failed(self) -> int:
        """Return the number of requests that were not answered with 200."""
        return int((self.status != 200).sum())

    def failures(self) -> dict[str, int]:
        """Return the numbers of failures by HTTP status or name of the `Failure`."""
        counts = Counter(self.status[self.status != 200].tolist())
        return {
            Failure(code).name.lower() if code < 0 else str(code): n
            for code, n in sorted(counts.items())
        }

    def by_deployment(self) -> dict[str, int]:
        """Return the number of answers with 200 by deployment."""
        counts = Counter(self.deployment[self.status == 200].tolist())
        return {self.names[index]: n for index, n in sorted(counts.items())}

    def latencies_ms(self) -> NDArray[np.float64]:
        """Return the latencies of the answers with 200, from when each request was due."""
        good = self.status == 200
        return np.asarray((self.done_ns - self.due_ns)[good] / 1e6, dtype=np.float64)

    @property
    def seconds(self) -> float:
        """Return the seconds from the first request's sending to the last one's end."""
        return float(self.done_ns.max() - self.sent_ns.min()) / 1e9 if len(self) else 0.0

    def summary(self) -> dict[str, Any]:
        """Return a summary of the load.

        `requests_per_s` counts answers with 200. Quantiles are null if there are none.
        """
        good, spans = len(self) - self.failed, self.latencies_ms()
        quantiles = {
            f"p{q}_ms": float(np.percentile(spans, q)) if len(spans) else None for q in (50, 90, 99)
        }
        return {
            "requests": len(self),
            "failed": self.failed,
            "failures": self.failures(),
            "deployments": self.by_deployment(),
            "seconds": self.seconds,
            "requests_per_s": good / self.seconds if self.seconds else 0.0,
            **quantiles,
            "max_ms": float(spans.max()) if len(spans) else None,
        }

    def save(self, path: Path) -> None:
        columns: Mapping[str, Any] = {name: getattr(self, name) for name in _COLUMNS}
        with path.open("wb") as stream:
            np.savez(stream, names=np.array(self.names, dtype=np.str_), **columns)

    @classmethod
    def read(cls, path: Path) -> Records:
        with np.load(path, allow_pickle=False) as stored:
            columns = {name: stored[name] for name in _COLUMNS}
            return cls(names=tuple(stored["names"].tolist()), **columns)


_COLUMNS = ("due_ns", "sent_ns", "done_ns", "status", "deployment", "number", "key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A change of an endpoint.

    `names` are the deployments that have traffic after the change. A call of unknown outcome has
    `returned_ns=FOREVER_NS`.
    """

    names: frozenset[str]
    begun_ns: int
    returned_ns: int


def stale(records: Records, publications: Sequence[Publication]) -> Column:
    """Return the rows of answers (200) that no state of the endpoint allows.

    Publication k is possibly in force from the start of its call until a later call has returned.
    An answer is allowed if a publication that gives its deployment traffic was possibly in force
    between the request's sending and its end. That is linearizability of a register (Herlihy and
    Wing 1990). A request that is sent after a publication returned never gets a version that the
    publication replaced.

    Args:
        records: the load; requests before the first publication belong to none and count as stale.
        publications: in the order in which they were made, one at a time.
    """
    returned = [p.returned_ns for p in publications[1:]] + [FOREVER_NS]
    ends = np.array(list(accumulate(reversed(returned), min))[::-1], dtype=np.int64)
    begun = np.array([p.begun_ns for p in publications], dtype=np.int64)
    allowed = records.status != 200
    for index, name in enumerate(records.names):
        holds = np.array([k for k, p in enumerate(publications) if name in p.names], dtype=np.int64)
        rows = np.flatnonzero((records.deployment == index) & ~allowed)
        if not len(holds) or not len(rows):
            continue
        # The times in `begun` and in `ends` both ascend. Of the publications that began before the
        # answer, the last one also ends last.
        last = np.searchsorted(begun[holds], records.done_ns[rows], side="right") - 1
        allowed[rows] = (last >= 0) & (ends[holds[last]] >= records.sent_ns[rows])
    return np.flatnonzero(~allowed)
