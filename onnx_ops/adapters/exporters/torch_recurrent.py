"""Recurrent layers of torch as ONNX's operators, for any length of the sequence.

While torch.export traces a module, it uses decompositions for the shapes of `torch.lstm`,
`torch.gru` and `torch.rnn_*`. These decompositions have a loop over the sequence, which fixes its
length. Therefore this module replaces each of these functions by one operator. The operator has a
shape function, and a translation to ONNX's LSTM, GRU or RNN.

This module imports torch, so import it only where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnxscript
import torch
from torch.overrides import TorchFunctionMode

from onnx_ops.errors import UserError

# The type hints of onnxscript's opset functions omit lists, which the functions accept.
op: Any = onnxscript.opset18

_SIGNATURE = (
    "(Tensor input, {state} hx, Tensor[] params, bool has_biases, int num_layers, "
    "float dropout, bool train, bool bidirectional, bool batch_first) -> ({outputs})"
)
"""Schema of torch's functions for padded sequences.

`input` is (length, batch, features), or (batch, length, features) with `batch_first`.
"""


class RecurrentOperators(TorchFunctionMode):
    """Context in which recurrent layers call the operators of this module.

    Raises:
        UserError: ONNX's operators cannot express a layer. The error is raised in the layer's call.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the operator of this module in place of a recurrent function."""
        # This function of torch is private, so it is recognized by its name.
        if getattr(func, "__name__", "") == "_pack_padded_sequence":
            raise UserError(
                "the module uses packed sequences",
                where="export",
                why="ONNX has no packed sequences, whose sizes depend on the data",
                remedy="Pass padded sequences to the layer, and select the valid steps of its "
                "output by the lengths of the sequences.",
            )
        operator = _OPERATORS.get(func)
        if operator is None or len(args) != 9 or not isinstance(args[3], bool):
            return func(*args, **(kwargs or {}))
        if func is torch.lstm and args[1][0].shape[2] != args[1][1].shape[2]:
            raise UserError(
                "the module has an LSTM with proj_size",
                where="export",
                why="ONNX's LSTM has no projection of its state",
                remedy="Create the layer without proj_size.",
            )
        return operator(*args)


def _infer_shapes(steps: Any, hx: Any, params: Any, *settings: Any) -> tuple[Any, ...]:
    """Return empty tensors with the shapes of the outputs.

    The length of the sequence is not read as a number, so it stays free.
    """
    states = hx if isinstance(hx, list | tuple) else [hx]
    bidirectional = settings[4]
    answer = steps.new_empty((*steps.shape[:2], states[0].shape[2] * (2 if bidirectional else 1)))
    return (answer, *(torch.empty_like(state) for state in states))


def _register(function: Callable[..., Any], state: str, outputs: str) -> Any:
    """Register an operator that computes the result of a function of torch."""
    name = function.__name__
    schema = _SIGNATURE.format(state=state, outputs=outputs)
    torch.library.custom_op(
        f"onnx_ops::{name}", function, mutates_args=(), schema=schema
    ).register_fake(_infer_shapes)
    return getattr(torch.ops.onnx_ops, name).default


def _translate(
    layer: Callable[..., Any], gates: Sequence[int], *, activation: str = "", **settings: Any
) -> Callable[..., Any]:
    """Return the translation of a layer to operators of ONNX.

    Each layer becomes one operator, which computes all directions of the layer. `gates` are the
    positions of the operator's gates in torch's weights. `activation` is the activation of each
    direction; empty for the operator's default.
    """

    def write(
        steps: Any,
        hx: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Any, ...]:
        # Each state has the shape (layers * directions, batch, hidden).
        states = hx if isinstance(hx, list | tuple) else [hx]
        directions, hidden = 2 if bidirectional else 1, states[0].shape[2]
        direction = "bidirectional" if bidirectional else "forward"
        activations = {"activations": [activation] * directions} if activation else {}
        attributes = {"direction": direction, "hidden_size": hidden, **activations, **settings}
        weights = _stack_weights(params, gates, directions, hidden, has_biases=has_biases)
        answer = _swap_first_axes(steps) if batch_first else steps
        finals = []
        for layer_weights, first in zip(
            weights, range(0, num_layers * directions, directions), strict=True
        ):
            layer_states = [op.Slice(state, [first], [first + directions], [0]) for state in states]
            computed, *last = layer(answer, *layer_weights, None, *layer_states, **attributes)
            # The shape (length, directions, batch, hidden) becomes (length, batch, directions *
            # hidden).
            answer = op.Reshape(
                op.Transpose(computed, perm=[0, 2, 1, 3]), [0, 0, directions * hidden]
            )
            finals.append(last)
        final_states = (op.Concat(*parts, axis=0) for parts in zip(*finals, strict=True))
        return (_swap_first_axes(answer) if batch_first else answer, *final_states)

    return write


def _stack_weights(
    params: Sequence[Any], gates: Sequence[int], directions: int, hidden: int, *, has_biases: bool
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield W, R and B of each layer, for all its directions; B can be None.

    B is None if the layer has no biases.
    """
    # Each layer has a weight for the input and one for the state, and possibly two biases.
    count = 4 if has_biases else 2
    for first in range(0, len(params), count * directions):
        by_direction = [
            [_order_gates(weight, gates, hidden) for weight in params[start : start + count]]
            for start in range(first, first + count * directions, count)
        ]
        inputs, recurrent, *biases = zip(*by_direction, strict=True)
        stacked = _stack(inputs), _stack(recurrent)
        joined = [op.Concat(*pair, axis=0) for pair in zip(*biases, strict=True)]
        yield *stacked, _stack(joined) if has_biases else None


def _swap_first_axes(steps: Any) -> Any:
    """Swap the axes of length and batch."""
    return op.Transpose(steps, perm=[1, 0, 2])


def _order_gates(weight: Any, gates: Sequence[int], hidden: int) -> Any:
    parts = [op.Slice(weight, [gate * hidden], [(gate + 1) * hidden], [0]) for gate in gates]
    return op.Concat(*parts, axis=0) if len(parts) > 1 else weight


def _stack(weights: Sequence[Any]) -> Any:
    return op.Concat(*(op.Unsqueeze(weight, [0]) for weight in weights), axis=0)


_OPERATORS: Mapping[Any, Any] = {
    torch.lstm: _register(torch.lstm, "Tensor[]", "Tensor, Tensor, Tensor"),
    **{
        function: _register(function, "Tensor", "Tensor, Tensor")
        for function in (torch.gru, torch.rnn_tanh, torch.rnn_relu)
    },
}
TRANSLATIONS: Mapping[Any, Callable[..., Any]] = {
    # The order of the gates is iofc in ONNX, and ifgo in torch.
    _OPERATORS[torch.lstm]: _translate(op.LSTM, (0, 3, 1, 2)),
    # The order of the gates is zrh in ONNX, and rzn in torch.
    _OPERATORS[torch.gru]: _translate(op.GRU, (1, 0, 2), linear_before_reset=1),
    _OPERATORS[torch.rnn_tanh]: _translate(op.RNN, (0,), activation="Tanh"),
    _OPERATORS[torch.rnn_relu]: _translate(op.RNN, (0,), activation="Relu"),
}
"""Translations of this module's operators to ONNX, for `torch.onnx.export`."""
