"""Attention of rank 3, which torch.onnx.export cannot translate.

Tensors of rank 3 lack an axis of heads. The translations of onnxscript 0.7 and torch 2.13 support
only rank 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_HEADS = 1
"""Index of the axis of heads, which follows the batch axis."""

_MATRIX_RANK = 3


class AttentionOperators(TorchFunctionMode):
    """Context in which attention of rank 3 is computed with one head.

    The axes are batch, steps and features.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Add an axis of heads to the arguments, and remove this axis from the result.

        Other functions, and attention whose query has another rank, are called unchanged.
        """
        given = dict(kwargs or {})
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **given)
        named = (
            dict(
                zip(
                    ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
                    args,
                    strict=False,
                )
            )
            | given
        )
        if named["query"].dim() != _MATRIX_RANK:
            return func(*args, **given)
        tensors = {
            name: named[name].unsqueeze(_HEADS)
            for name in ("query", "key", "value", "attn_mask")
            if named.get(name) is not None and named[name].dim() == _MATRIX_RANK
        }
        return func(**{**named, **tensors}).squeeze(_HEADS)
