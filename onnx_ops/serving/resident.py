"""One deployment that is loaded in this worker: it reads a request, runs the model, and writes the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.ports.data import Array
from onnx_ops.protocol import messages
from onnx_ops.serving import wire
from onnx_ops.serving.answers import Answer, Head, naming
from onnx_ops.serving.lanes import Lane
from onnx_ops.serving.run_time import RunTime
from onnx_ops.serving.shared import UNTIMED, Row

_BINARY_LENGTH = messages.BINARY_LENGTH_HEADER.encode()
_INLINE_TEXT = 1 << 16
"""Longer text is read on the lane's thread: on the event loop it would keep other requests waiting."""
_INLINE_BODY = 1 << 20
"""So would larger bodies in the binary form, of which only what stands before the tensors is text."""

Run = Callable[[Sequence[str], Mapping[str, Array]], Sequence[Array]]


@dataclass(slots=True, eq=False, kw_only=True)
class Resident:
    """Everything that a request to one deployment needs.

    Args:
        deployment: what is loaded.
        signature: its tensors.
        run: outputs by name for a feed; may be called from several threads at once.
        row: where its counts are kept, `slot` being the number of them.
        lane: where requests wait that are not run at once.
        run_time: how long `run` takes.
        untimed: how many of its next requests are too early to be held against another deployment.
    """

    deployment: Deployment
    signature: wire.Signature
    run: Run
    row: Row
    lane: Lane[Any]
    run_time: RunTime
    slot: int = 0
    untimed: int = UNTIMED
    lines: bytes = b""
    _heads: dict[object, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lines = naming(self.deployment.name)

    def at_once(self, leader: RunTime, head: Head, body: bytes) -> bool:
        """Whether a request is run where it came in, on the event loop, while `leader` says where models are run."""
        if not self.run_time.follows(leader):
            return False
        if len(body) <= _INLINE_TEXT:
            return True
        announced = head.get(_BINARY_LENGTH, b"")
        if len(body) > _INLINE_BODY or len(announced) > 5 or not announced.isdigit():
            return False
        return int(announced) <= _INLINE_TEXT and not self.signature.takes_text

    def read(self, invocation: bool, head: Head, body: bytes) -> wire.Call:
        """Raises UserError if the request does not fit the model."""
        announced = head.get(_BINARY_LENGTH)
        length = None if announced is None else wire.read_header_length(announced.decode("latin-1"))
        if not invocation:
            return wire.read_infer(body, length, self.signature)
        kind = head.get(b"content-type", b"application/json").decode("latin-1")
        return wire.read_invocation(body, kind, length, self.signature)

    def answer(self, call: wire.Call) -> Answer:
        """Run one request.

        Raises:
            UserError: the runtime refuses the inputs.
            InfrastructureError: the run failed.
        """
        began = time.perf_counter()
        arrays = self.run(call.outputs, call.feed)
        self.run_time.observe(time.perf_counter() - began)
        return self.write(call, arrays)

    def write(self, call: wire.Call, arrays: Sequence[Array]) -> Answer:
        body, pairs = wire.write(call, self.signature, arrays)
        lines = self._heads.get(pairs)
        if lines is None:
            lines = self._remember(pairs)
        return Answer(200, lines, body)

    def _remember(self, pairs: tuple[tuple[bytes, bytes], ...]) -> bytes:
        lines = b"".join(b"%s: %s\r\n" % pair for pair in pairs) + self.lines
        if len(self._heads) < 16:  # a binary answer's header length varies; not every one is worth keeping
            self._heads[pairs] = lines
        return lines
