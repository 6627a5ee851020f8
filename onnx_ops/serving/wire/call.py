"""One decoded request."""

from __future__ import annotations

from enum import Enum

from onnx_ops.ports.data import Array


class Form(Enum):
    """How the answer is written: Open Inference v2, or MLflow's predictions by output name or one record a row."""

    INFER = 1
    NAMED = 2
    RECORDS = 3


class Call:
    """One decoded request.

    Attributes:
        feed: one array an input; bfloat16 as its bits in uint16, text as an array of objects.
        outputs: the outputs asked for, in the order of the answer.
        rows: length of axis 0, if that axis is free in every input of the feed and in every output, and the same in
            all inputs; else 0: such a request cannot be joined with others. Requests that are joined must also agree
            in the names of their feed and in all other dimensions.
        form: how the answer is written.
        identity: the request's own name for itself, echoed.
        binary: for each output whether its data is written in the binary form; empty if for none.
        sagemaker: the lengths of the binary form stand in the content type, since SageMaker passes no other header.
    """

    __slots__ = ("binary", "feed", "form", "identity", "outputs", "rows", "sagemaker")

    def __init__(
        self,
        feed: dict[str, Array],
        outputs: tuple[str, ...],
        rows: int,
        form: Form = Form.INFER,
        identity: str | None = None,
        binary: tuple[bool, ...] = (),
    ) -> None:
        self.feed = feed
        self.outputs = outputs
        self.rows = rows
        self.form = form
        self.identity = identity
        self.binary = binary
        self.sagemaker = False
