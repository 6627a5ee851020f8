"""Send notifications through Prefect's notification blocks, such as Teams or SMS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onnx_ops.domain.notification import Notification
from onnx_ops.errors import ServiceUnavailableError, UserError
from onnx_ops.plugins import EXTRAS
from onnx_ops.ports import Notifier


class PrefectNotifier(Notifier):
    """A notifier that calls `notify` of an existing Prefect block.

    Args:
        place: type and name of the block, as Prefect shows them: `slack-webhook/ops`.
        state: the state folder; not used, since the block holds the secrets.

    Raises:
        UserError: the place does not name a block.
    """

    tools = EXTRAS["prefect"]

    def __init__(self, place: str, state: Path) -> None:
        kind, _, name = place.partition("/")
        if not (kind and name) or "/" in name:
            raise UserError(
                f"prefect:{place} does not name a block",
                remedy="Write prefect:TYPE/NAME, as in `prefect block ls`.",
            )
        self._place = place

    def send(self, notification: Notification) -> None:
        """Send the notification through the block."""
        block = self._block()
        try:
            block.notify(body="\n".join(notification.lines), subject=notification.title)
        except Exception as error:
            # A block is third-party code, whose exceptions can contain a secret of the block. So
            # only their type is reported.
            raise ServiceUnavailableError(
                "could not notify", where=self._where, why=type(error).__name__
            ) from None

    def check(self) -> str:
        """Return the name of the block; raise an error if it is not a notification block."""
        self._block()
        return f"through Prefect's block {self._place}"

    @property
    def _where(self) -> str:
        return f"prefect block {self._place}"

    def _block(self) -> Any:
        from prefect.blocks.abstract import NotificationBlock
        from prefect.blocks.notifications import AppriseNotificationBlock  # noqa: F401 (registers Prefect's own types)

        from onnx_ops.orchestration.blocks import load_block

        block = load_block(self._place)
        if not isinstance(block, NotificationBlock):
            raise UserError(
                "this is not a notification block",
                where=self._where,
                remedy="See `prefect block ls`.",
            )
        return block
