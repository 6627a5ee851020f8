"""The base of every plug-in.

It has the attributes that plans, checks and installations read.
"""

from __future__ import annotations

from abc import ABC


class Plugin(ABC):  # noqa: B024 (the base class of each kind has the abstract methods)
    """Attributes of every plug-in.

    Each attribute has a default, which a class or an instance can override. Attributes are read
    without calling a method, before packages of the plug-in are needed.
    """

    tools: tuple[str, ...] = ()
    """Distributions that the plug-in needs, and whose versions shape its results.

    With another version, stages run again. A command that needs the plug-in fails before it starts
    if one of these distributions is not installed.
    """

    converters: tuple[str, ...] = ()
    """Further distributions, which shape an export only.

    With another version, the export stage runs again, and the training stage does not.
    """

    requirements: tuple[str, ...] = ()
    """Packages of the isolated environment that the plug-in runs in by default.

    Exporters and optimizers can have such packages. Without packages, they run in this installation
    by default. The key `env` can request an isolated environment.
    """
