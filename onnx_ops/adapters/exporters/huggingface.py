"""Hugging Face transformers with local weights, by torch.onnx.export."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from onnx_ops.adapters.exporters.torch import TorchExporter
from onnx_ops.errors import NotFoundError, UserError
from onnx_ops.ports.data import Array, Tensors
from onnx_ops.ports.export import ExportRequest, Tracer

CONFIG = "config.json"


class HuggingfaceExporter(TorchExporter):
    """The data set's `inputs:` are the names of `forward`'s arguments: input_ids, attention_mask, pixel_values,
    decoder_input_ids. The outputs are the tensors that the model answers: logits, last_hidden_state …"""

    tools = ("transformers", *TorchExporter.tools)

    def save(self, model: object, folder: Path) -> None:
        if not isinstance(model, importlib.import_module("transformers").PreTrainedModel):
            raise UserError(
                f"{type(model).__name__} is no model of transformers",
                where="train.run",
                remedy="It must return a PreTrainedModel; export.framework: torch takes any module.",
            )
        if getattr(importlib.import_module("transformers"), type(model).__name__, None) is not type(model):
            raise UserError(
                f"{type(model).__name__} is no class of transformers",
                where="train.run",
                why="the files of save_pretrained hold no code, and another class of that name would be loaded",
                remedy="Set export.framework: torch, which takes any module, and give it inputs and outputs there.",
            )
        model.save_pretrained(folder)

    def load(self, folder: Path) -> object:
        """A folder that `save_pretrained` wrote. Nothing is asked of a hub, and no code of the folder runs."""
        transformers = importlib.import_module("transformers")
        if not (folder / CONFIG).is_file():
            raise NotFoundError(
                f"no {CONFIG}", where=str(folder), remedy="Bring a folder that save_pretrained has written."
            )
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        names = config.architectures or []
        if len(names) != 1 or not hasattr(transformers, names[0]):
            raise UserError(
                f"transformers has no architecture {names}", where=CONFIG, remedy="Install the version that wrote it."
            )
        found = getattr(transformers, names[0])
        return found.from_pretrained(folder, local_files_only=True, attn_implementation="eager").eval()

    def export(self, model: object, request: ExportRequest) -> None:
        super().export(_named(model, tuple(request.samples)), request)

    def tracer(self, model: object, request: ExportRequest) -> Tracer:
        return super().tracer(_named(model, tuple(request.samples)), request)

    def reference(
        self, model: object, inputs: Tensors, precision: Literal["float32", "float64"]
    ) -> Mapping[str, Array] | None:
        return super().reference(_named(model, tuple(inputs)), inputs, precision)


def _named(model: Any, names: tuple[str, ...]) -> object:
    """The model as a module that takes its inputs in order and answers tensors only."""
    torch: Any = importlib.import_module("torch")

    class Named(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, *tensors: Any) -> dict[str, Any]:
            given = dict(zip(names, tensors, strict=True))
            extra = {"use_cache": False} if "use_cache" in vars(self.inner.config) else {}
            answer = self.inner(**given, **extra, return_dict=True)
            return {name: value for name, value in answer.items() if isinstance(value, torch.Tensor)}

    return Named().eval()
