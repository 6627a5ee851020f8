"""Environments of their own for packages that this installation does not hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import doc

from onnx_ops.domain.quantities import Bytes, Json, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where a framework or runtime runs whose packages this installation does not hold, which is never changed."""

    requirements: Annotated[
        tuple[str, ...], doc("Packages, as pip takes them (npm for JavaScript); the plugin's own if empty.")
    ] = ()
    python: Annotated[str | None, doc("Python version, such as '3.12'; that of this installation if left out.")] = None
    memory: Annotated[Bytes | None, doc("Most memory of its process; what the machine has if left out.")] = None
    timeout: Annotated[Seconds | None, doc("Longest single answer of its process.")] = None
    isolated: Annotated[bool, doc("false: in this installation, whatever the plugin brings.")] = True

    def content(self) -> dict[str, Json]:
        """What shapes a result: how much memory and time there is does not."""
        return {"requirements": list(self.requirements), "python": self.python, "isolated": self.isolated}
