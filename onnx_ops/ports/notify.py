"""The port of notifications."""

from __future__ import annotations

from abc import ABC, abstractmethod

from onnx_ops.domain.notification import Notification


class Notifier(ABC):
    """A way to reach people: a chat, an issue tracker, a mailbox.

    What it raises never holds a secret: no token, and no address that is one.
    """

    @abstractmethod
    def send(self, notification: Notification) -> None:
        """Send, and return once the service has accepted it, within seconds. Sending twice does no harm.

        Raises:
            ServiceUnavailableError: the service does not answer, or wants to be left alone for now; try again.
            RefusedError: it does not let us, or where it is asks for what may not be sent there.
            UserError: a setting or a secret is missing or wrong.
        """

    @abstractmethod
    def check(self) -> str:
        """Return where it would send to, without secrets. Nothing is sent.

        Raises:
            RefusedError: others may read the secret.
            UserError: a setting or a secret is missing or wrong.
        """

    @property
    def wants_steps(self) -> bool:
        """Whether it also gets every step of a rollout that passes."""
        return False
