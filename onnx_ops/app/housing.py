"""Exporters and optimizers by name: in this installation, or in an environment of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from onnx_ops import plugins
from onnx_ops.adapters.isolation.environments import PythonEnvironments, find_uv
from onnx_ops.adapters.isolation.isolated_tools import IsolatedExporter, IsolatedOptimizer
from onnx_ops.adapters.isolation.process import ProcessLimits
from onnx_ops.config.settings import Settings
from onnx_ops.domain.execution import Environment
from onnx_ops.errors import UserError
from onnx_ops.ports import Exporter, Exporters, Optimizer, Optimizers


def exporters(settings: Settings) -> Exporters:
    """An exporter that names `requirements` of its own runs isolated, with those, unless `env` says otherwise."""

    @functools.cache
    def exporter(name: str, env: Environment | None = None, /) -> Exporter:
        found: Exporter = plugins.load("exporters", name)
        wanted = environment(found, env)
        if wanted is None:
            return found
        return IsolatedExporter(
            exporter=plugins.find("exporters", name).value,
            python=_maker(settings, wanted),
            root=settings.root,
            limits=ProcessLimits(memory=wanted.memory, timeout=wanted.timeout),
        )

    return exporter


def optimizers(settings: Settings) -> Optimizers:
    """As for exporters."""

    @functools.cache
    def optimizer(name: str, env: Environment | None = None, /) -> Optimizer:
        found: Optimizer = plugins.load("optimizers", name)
        wanted = environment(found, env)
        if wanted is None:
            return found
        return IsolatedOptimizer(
            here=found,
            place=plugins.find("optimizers", name).value,
            python=_maker(settings, wanted),
            limits=ProcessLimits(memory=wanted.memory, timeout=wanted.timeout),
        )

    return optimizer


def _maker(settings: Settings, wanted: Environment) -> Callable[[], Path]:
    environments = PythonEnvironments(folder=settings.environments, uv=find_uv())
    return lambda: environments.python(wanted)


def environment(plugin: Exporter | Optimizer, env: Environment | None) -> Environment | None:
    """The environment to run an exporter or optimizer in; None for this installation.

    Raises:
        UserError: `env` asks for packages here, where none are installed for a stage, or names none at all.
    """
    own: tuple[str, ...] = getattr(plugin, "requirements", ())
    if env is not None and not env.isolated:
        if env.requirements or env.python:
            raise UserError(
                "`isolated: false` runs in this installation, which is never changed",
                where="env",
                remedy="Leave out `requirements` and `python`, or `isolated`.",
            )
        return None
    if env is None:
        return Environment(requirements=own) if own else None
    requirements = env.requirements or own
    if not requirements:
        raise UserError("the environment has no requirements", where="env", remedy="List the packages that it needs.")
    return Environment(requirements=requirements, python=env.python, memory=env.memory, timeout=env.timeout)
