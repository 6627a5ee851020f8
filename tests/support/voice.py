"""A voice activity detector with a state and a sampling rate, and its faults.

It is built by hand, similar to a public one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.graphs import write_graph

WIDTH, HIDDEN = 12, 5
RATES = (16000, 8000)

_TEXT = """
(float[{rows},12] input, float[2,{state_rows},5] state, int64 sr) => (float[a,1] output, float[b,c,d] next)
{{
    is_fast = Equal(sr, fast_rate)
    features = If(is_fast) <
        then_branch = fast () => (float[p,5] u) {{ u = MatMul(input, fast_weight) }},
        else_branch = slow () => (float[p,5] v) {{
            is_slow = Equal(sr, slow_rate)
            known = Where(is_slow, slow_shape, wrong_shape)
            weight = Reshape(slow_weight, known)
            v = MatMul(input, weight)
        }}
    >
    state_taken = {state}
    h = Gather<axis = 0>(state_taken, zero)
    c = Gather<axis = 0>(state_taken, one)
    recurrent = MatMul(h, hidden_weight)
    before = Add(features, recurrent)
    candidate = Tanh(before)
    gate = Sigmoid(c)
    h_new = Mul(candidate, gate)
    c_new = Add(c, h_new)
    h_part = Unsqueeze(h_new, first)
    c_part = Unsqueeze(c_new, first)
    next = Concat<axis = 0>(h_part, c_part)
    logit = MatMul(h_new, out_weight)
    output = Sigmoid(logit)
}}
"""  # noqa: E501

FAULTS = {
    "state of row 0": "Expand(state_of_first, state_shape)",
    "states exchanged": "Slice(state, from_end, to_start, first, backwards)",
}


def write_voice_detector(
    path: Path,
    fault: str = "",
    *,
    rows: str = "N",
    state_rows: str = "N",
    other_slow_branch: bool = False,
) -> Path:
    """Write the model.

    Its inputs are input [N, 12], state [2, N, 5], and a scalar `sr` that must be 16000 or 8000.
    """
    draw = np.random.default_rng(5)
    shapes = {
        "fast_weight": (12, 5),
        "slow_weight": (12, 5),
        "hidden_weight": (5, 5),
        "out_weight": (5, 1),
    }
    weights = {
        name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    if other_slow_branch:
        weights["slow_weight"] = -weights["slow_weight"]
    text = _TEXT.format(
        rows=rows, state_rows=state_rows, state=FAULTS.get(fault, "Identity(state)")
    )
    if fault == "state of row 0":
        lines = (
            "state_of_first = Slice(state, first, one_row, row_axis) "
            "state_shape = Shape(state) state_taken"
        )
        text = text.replace("state_taken =", f"{lines} =", 1)
    return write_graph(
        path,
        text,
        **weights,
        fast_rate=np.int64(RATES[0]),
        slow_rate=np.int64(RATES[1]),
        slow_shape=[WIDTH, HIDDEN],
        wrong_shape=[WIDTH, HIDDEN + 1],
        zero=np.int64(0),
        one=np.int64(1),
        first=[0],
        one_row=[1],
        row_axis=[1],
        from_end=[-1],
        to_start=[-3],
        backwards=[-1],
    )


def make_voice_rows(count: int) -> dict[str, np.ndarray]:
    """Return rows as callers store them: the state has the rows on axis 1."""
    draw = np.random.default_rng(6)
    return {
        "input": draw.standard_normal((count, WIDTH)).astype(np.float32),
        "state": draw.standard_normal((2, count, HIDDEN)).astype(np.float32),
    }
