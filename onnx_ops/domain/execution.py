"""How a runtime executes a model: what a target declares, a decision is about, and a server does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le, doc

CPU = "CPUExecutionProvider"

GraphLevel = Literal["disabled", "basic", "extended", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """How the runtime builds a session. Threads: 0 lets the runtime choose."""

    intra_op_threads: Annotated[int, Ge(0), Le(1024), doc("Threads inside one operator; 0: one per core.")] = 1
    inter_op_threads: Annotated[int, Ge(0), Le(1024), doc("Operators run side by side; 0: one per core.")] = 1
    spinning: Annotated[bool, doc("Threads spin while they wait; fast alone, poison on shared cores.")] = False
    graph_level: Annotated[GraphLevel, doc("Graph optimisation level of ONNX Runtime.")] = "all"
    config: Annotated[Mapping[str, str], doc("Further session config entries, as the runtime names them.")] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """An execution provider and its options."""

    name: str
    options: Annotated[
        Mapping[str, str], doc("As the provider names them; `{cache}` is a folder of the model and the machine.")
    ] = field(default_factory=dict)
    package: Annotated[str, doc("Python package that brings the provider as a plug-in: onnxruntime_qnn.")] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Execution providers in order of preference, and the settings of sessions."""

    providers: tuple[Provider, ...] = (Provider(name=CPU),)
    session: SessionSettings = field(default_factory=SessionSettings)
