"""Record the values of a system's steps while onnx-ops calls the system.

The user's code imports this module, so it imports neither numpy nor other modules of onnx-ops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

_current = threading.local()


@dataclass(slots=True)
class StepRecording:
    """Values of the steps of one call of a system, in the order of their recording.

    `repeated` names steps that were recorded more than once; `values` has the first value of each.
    """

    copy: Callable[[Any], Any]
    values: dict[str, Any] = field(default_factory=dict)
    repeated: dict[str, None] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        """Store a copy of a step's first value.

        The system can change the value itself later.
        """
        if name in self.values:
            self.repeated[name] = None
        else:
            self.values[name] = self.copy(value)


def record_step(name: str, value: T) -> T:
    """Return the value, and record it as the result of a step of the system.

    Values are recorded while `onnx-ops judge --system`, or the section `system` of a pipeline,
    calls the system. Only the thread of that call records values.

    Args:
        name: name of the step. `input` is what the model receives, `output` what it returns.
        value: array, image, text, number, or lists and dictionaries of these.
    """
    recording: StepRecording | None = getattr(_current, "recording", None)
    if recording is not None:
        recording.add(name, value)
    return value


@contextmanager
def recording_steps(copy: Callable[[Any], Any]) -> Iterator[StepRecording]:
    """Record the steps of this thread until the end of the block.

    Args:
        copy: returns a copy of a value that later changes of the value do not affect.
    """
    previous = getattr(_current, "recording", None)
    recording = StepRecording(copy=copy)
    _current.recording = recording
    try:
        yield recording
    finally:
        _current.recording = previous
