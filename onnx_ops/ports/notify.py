"""The port of notifications."""

from __future__ import annotations

from abc import ABC, abstractmethod

from onnx_ops.domain.notification import Notification


class Notifier(ABC):
    """A way to reach people: a chat, an issue tracker, a mailbox.

    Its exceptions never contain a secret: no token, and no address that is one.
    """

    @abstractmethod
    def send(self, notification: Notification) -> None:
        """Send, and return within seconds once the service has accepted it. Sending twice does no harm.

        Raises:
            ServiceUnavailableError: the service does not answer, or limits the rate; try again.
            RefusedError: the service denies access, or requires content that must not be sent there.
            UserError: a setting or a secret is missing or wrong.
        """

    @abstractmethod
    def check(self) -> str:
        """Return the destination, without secrets. Nothing is sent.

        Raises:
            RefusedError: others may read the secret.
            UserError: a setting or a secret is missing or wrong.
        """

    @property
    def wants_steps(self) -> bool:
        """Whether it also gets every step of a rollout that passes."""
        return False
