"""Send notifications through Prefect's notification blocks, such as Teams or SMS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import doc

from onnx_ops.config.binding import bind_options
from onnx_ops.domain.notification import Notification
from onnx_ops.domain.quantities import Json, Pattern
from onnx_ops.errors import ServiceUnavailableError, UserError
from onnx_ops.plugins import EXTRAS
from onnx_ops.ports import Notifier


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefectNotifierOptions:
    """Options of the notifier `prefect`."""

    block: Annotated[
        str,
        Pattern("[^/]+/[^/]+", "a block, TYPE/NAME, as in `prefect block ls`"),
        doc("Notification block: slack-webhook/ops."),
    ]


class PrefectNotifier(Notifier):
    """A notifier that calls `notify` of an existing Prefect block.

    Args:
        options: `PrefectNotifierOptions`.
        state: the state folder; not used, since the block holds the secrets.

    Raises:
        OptionsError: the options do not name a block.
    """

    tools = EXTRAS["prefect"]

    def __init__(self, options: Mapping[str, Json], state: Path) -> None:
        self._block_name = bind_options(
            options,
            PrefectNotifierOptions,
            where="notifier prefect",
            remedy='For example: {notifier = "prefect", options = {block = "slack-webhook/ops"}}.',
        ).block

    def send(self, notification: Notification) -> None:
        """Send the notification through the block."""
        block = self._block()
        try:
            block.notify(body="\n".join(notification.lines), subject=notification.title)
        except Exception as error:
            # A block is third-party code, whose exceptions can contain a secret of the block. So
            # only their type is reported.
            raise ServiceUnavailableError(
                "the block did not send the notification",
                where=self._where,
                why=type(error).__name__,
            ) from None

    def check(self) -> str:
        """Return a text with the block's name.

        Raises:
            UserError: the block does not exist, or is of another kind.
            ServiceUnavailableError: the block cannot be read, such as while Prefect's server is
                down.
        """
        self._block()
        return f"through Prefect's block {self._block_name}"

    @property
    def _where(self) -> str:
        return f"prefect block {self._block_name}"

    def _block(self) -> Any:
        from prefect.blocks.abstract import NotificationBlock
        from prefect.blocks.notifications import AppriseNotificationBlock  # noqa: F401 (registers Prefect's own types)

        from onnx_ops.orchestration.blocks import load_block

        block = load_block(self._block_name)
        if not isinstance(block, NotificationBlock):
            raise UserError(
                "this is not a notification block",
                where=self._where,
                remedy="See `prefect block ls`.",
            )
        return block
