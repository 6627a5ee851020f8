"""Selection of the deployment that answers a request.

The split of a routing table assigns a request by user, or randomly if it has no user.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from onnx_ops.errors import NotFoundError
from onnx_ops.protocol.messages import PIN_HEADERS, USER_CELLS
from onnx_ops.protocol.routing_table import RoutingTable
from onnx_ops.serving.inference.responses import RequestHead

_PINS = tuple(name.encode() for name in PIN_HEADERS)
_MASK = 0xFFFFFFFF


@dataclass(slots=True, eq=False)
class CellDraw:
    """The assignment of all cells of users to deployments, for one epoch.

    Epoch 0 is that of a split without epochs. `slots` has, for each cell, an index into
    `TrafficRouter.slots`. `is_timed` states whether latencies are counted by cell. They are counted
    for all requests of an epoch or for none. Otherwise, the requests that are left out could all
    belong to one version.
    """

    generation: int
    epoch: int
    slots: bytes
    is_timed: bool = True


_STICKY_SLOTS = bytes(cell * 100 // USER_CELLS for cell in range(USER_CELLS))


@dataclass(slots=True, kw_only=True)
class TrafficRouter:
    """The split of one table: one slot per percent of traffic, newest first.

    In a split with epochs, the cells of users are assigned anew in each epoch, independently of
    other epochs and generations. Without epochs and with two deployments, a higher weight of the
    newer deployment only moves users to it. The salt of the assignment depends on the newest
    deployment with traffic. So it is constant during an experiment and different in the next one.

    `fallback` answers while the server has no lease, unless the client selects a deployment. It is
    empty if no lease is needed. With `is_leased`, a server without a serving lease refuses all
    requests.

    `draw` is the last assignment that was used. Latencies are compared only in `comparable` slots.
    Each of two deployments has the same number of these slots, so both get the same traffic in them
    (see `ControlReplica`).
    """

    slots: tuple[str, ...]
    names: frozenset[str]
    experiment: str
    generation: int
    epoch_s: float
    fallback: str = ""
    is_leased: bool = False
    comparable: tuple[bool, ...] = field(init=False)
    _salt: int = field(init=False)
    draw: CellDraw = field(init=False, compare=False)

    def __post_init__(self) -> None:
        weights = Counter(self.slots)
        fewest = min(weights.values()) if len(weights) == 2 else len(self.slots)
        self.comparable = tuple(
            slot - self.slots.index(name) < fewest for slot, name in enumerate(self.slots)
        )
        self._salt = zlib.crc32(self.experiment.encode())
        self.draw = CellDraw(self.generation, 0, _STICKY_SLOTS)

    @classmethod
    def from_table(cls, table: RoutingTable) -> TrafficRouter:
        """Build the router of a routing table."""
        return cls(
            slots=table.list_slots(),
            names=frozenset(table.layout),
            experiment="\0".join(table.get_experiment()),
            generation=table.state.generation,
            epoch_s=table.state.split.epoch_s,
            fallback=table.fallback,
            is_leased=table.is_leased,
        )

    def get_cell(self, key: bytes) -> int:
        """Return the cell of a user, which depends on the experiment."""
        return mix_bits(zlib.crc32(key) ^ self._salt) * USER_CELLS >> 32

    def get_draw(self, epoch: int) -> CellDraw:
        """Return the assignment of an epoch; a split without epochs ignores the epoch."""
        draw = self.draw
        if draw.epoch != epoch and self.epoch_s:
            seed = "\0".join((self.experiment, str(self.generation), str(epoch)))
            draw = self.draw = CellDraw(self.generation, epoch, draw_slots(seed))
        return draw

    def route_cell(self, draw: CellDraw, cell: int) -> str:
        """Return the deployment of a cell of users, which is constant for one draw."""
        return self.slots[draw.slots[cell]]

    def get_pinned(self, head: RequestHead) -> str | None:
        """Return the deployment that the headers of a request select, if any.

        Raises:
            NotFoundError: the table has no such deployment.
        """
        for header in _PINS:
            if (value := head.get(header)) is not None:
                name = value.decode("latin-1")
                if name not in self.names:
                    raise NotFoundError(
                        f"no deployment is named {name!r} (header {header.decode()})"
                    )
                return name
        return None


def mix_bits(value: int) -> int:
    """Return a value in which every bit affects all bits, by MurmurHash3's finalizer.

    The function is a bijection (A. Appleby). CRC-32 is linear. Without this step, the shares of two
    salts would coincide or be disjoint. The users of one experiment's candidate would then all get
    the next experiment's candidate.
    """
    value ^= value >> 16
    value = value * 0x85EBCA6B & _MASK
    value ^= value >> 13
    value = value * 0xC2B2AE35 & _MASK
    return value ^ value >> 16


def draw_slots(seed: str) -> bytes:
    """Return the slot of each cell of users: a permutation that the seed determines.

    Every slot has the same number of cells. Cells are sorted by random numbers of SplitMix64
    (Steele, Lea and Flood 2014, OOPSLA, 453-472). Unlike NumPy's generators, SplitMix64 returns the
    same numbers in all versions. This matters because servers of different versions must agree.
    """
    start = np.frombuffer(hashlib.sha256(seed.encode()).digest(), "<u8", 1)
    numbers = start + np.arange(1, USER_CELLS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    slots = np.empty(USER_CELLS, np.uint8)
    slots[np.argsort(numbers ^ numbers >> np.uint64(31))] = np.frombuffer(_STICKY_SLOTS, np.uint8)
    return slots.tobytes()
