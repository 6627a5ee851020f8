"""What a container of a cloud is given: its model folder, and its server's options as environment variables."""

from __future__ import annotations

from collections.abc import Mapping

from onnx_ops.domain.execution import CPU
from onnx_ops.errors import UserError
from onnx_ops.protocol.options import options_of

DEPLOYMENT_FILE = "deployment.json"
"""The deployment; its `location` means nothing there."""
MODEL_FOLDER = "model"
"""Beside it: the version's files, and nothing else."""
PROVIDERS = (CPU,)
"""Execution providers of the build of ONNX Runtime that the image installs."""
OPTION_VARIABLE = "ONNX_OPS_SERVE_"
"""What the name of a server option's variable begins with."""
TRUSTED_KEYS_VARIABLE = "ONNX_OPS_SERVE_TRUSTED_KEYS"
_FIXED = frozenset({"access_log", "admin_socket", "endpoint", "trusted_keys"})
"""Options that a container decides itself."""

Scalar = str | int | float | bool


def server_options(
    settings: Mapping[str, Scalar], *, where: str = "", others: tuple[str, ...] = ()
) -> dict[str, Scalar]:
    """Return the server's options among an endpoint's settings, `others` being the provider's own.

    Raises:
        UserError: a name is neither, a value is not one of its option, or the container decides that option itself.
    """
    options = {name: value for name, value in settings.items() if name not in others}
    options_of(options, where=where, others=others)
    if refused := sorted(_FIXED & set(options)):
        raise UserError(f"{refused[0]} is the container's own business", where=where, remedy="Leave it out.")
    return options


def option_variables(options: Mapping[str, Scalar]) -> dict[str, str]:
    """Return the environment variables that give options to a container's server."""
    return {f"{OPTION_VARIABLE}{name.upper()}": _text(value) for name, value in sorted(options.items())}


def _text(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
