"""What this machine knows of an endpoint in Azure: a lock, and the last generation that was sent."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onnx_ops.adapters.objects import durable_file
from onnx_ops.errors import ConflictError

_PAUSE_S = 0.02


class Memory:
    """Kept in `folder`. Azure's reads may be behind; what we sent ourselves we need not ask for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def alone(self, patience_s: float) -> Iterator[None]:
        """Keep other processes of this machine from changing the endpoint's traffic meanwhile.

        Raises:
            ConflictError: somebody else is at it for longer than `patience_s`.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        deadline = time.monotonic() + patience_s
        with (self._folder / "azureml.lock").open("a") as stream:
            while True:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise ConflictError(
                            "somebody else is changing this endpoint", where=self._folder.name
                        ) from None
                    time.sleep(_PAUSE_S)
                else:
                    break
            yield

    @property
    def generation(self) -> int | None:
        """The last one sent from here; 0 if the endpoint was only created. None if it never was."""
        try:
            text = (self._folder / "azureml.generation").read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        return int(text) if text.isdecimal() else None

    def sending(self, generation: int) -> None:
        """Written before it is sent: if we die in between, a read that never shows it is believed after a while."""
        self.believe(max(generation, self.generation or 0))

    def believe(self, generation: int | None) -> None:
        """What reads have shown for long enough is so; None if there is no endpoint."""
        path = self._folder / "azureml.generation"
        if generation is None:
            path.unlink(missing_ok=True)
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with durable_file(path) as temporary:
            temporary.write_text(str(generation), encoding="utf-8")
