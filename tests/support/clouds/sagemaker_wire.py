"""Requests and answers of SageMaker as bytes.

They are checked against botocore's service model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tests.support.clouds.sagemaker_parts import Invalid

_UNICODE = re.compile(r"\\p\{[A-Z]\}")


class Wire:
    """The service model of SageMaker's control plane."""

    def __init__(self) -> None:
        import botocore.session

        self._model = botocore.session.get_session().get_service_model("sagemaker")

    def read(self, target: str, body: bytes) -> tuple[str, dict[str, Any]]:
        """Return the operation and the request.

        Raises:
            Invalid: the operation is unknown, or the service model does not allow the request.
        """
        from botocore.validate import ParamValidator

        operation = target.removeprefix("SageMaker.")
        if not target.startswith("SageMaker.") or operation not in self._model.operation_names:
            raise Invalid(f"no operation {target}", code="UnknownOperationException")
        request: dict[str, Any] = json.loads(body)
        shape = self._model.operation_model(operation).input_shape
        report = ParamValidator().validate(request, shape)
        if report.has_errors():
            raise Invalid(report.generate_report())
        check(request, shape, operation)
        return operation, request

    def write(self, operation: str, answer: Mapping[str, Any]) -> bytes:
        """Return the members of an answer that the service model contains, as JSON.

        Raises:
            AssertionError: the fake returns other members too, except for Describe operations.
        """
        shape = self._model.operation_model(operation).output_shape
        known = {} if shape is None else shape.members
        assert set(answer) <= set(known) or operation.startswith("Describe"), (
            operation,
            sorted(answer),
        )
        return json.dumps({key: value for key, value in answer.items() if key in known}).encode()


def check(value: Any, shape: Any, where: str) -> None:
    """Check the rules that botocore leaves to the service.

    These are limits, patterns and enumerations.

    Raises:
        Invalid: the value breaks one of them.
    """
    if shape.type_name == "structure":
        for name, one in value.items():
            check(one, shape.members[name], f"{where}.{name}")
    elif shape.type_name == "list":
        _limit(len(value), shape, where)
        for one in value:
            check(one, shape.member, where)
    elif shape.type_name == "map":
        _limit(len(value), shape, where)
        for key, one in value.items():
            check(key, shape.key, where)
            check(one, shape.value, where)
    elif shape.type_name == "string":
        _limit(len(value), shape, where)
        pattern = _UNICODE.sub(
            r"\\w\\s", shape.metadata.get("pattern", "").replace("[\\p{L}\\p{Z}\\p{N}", "[\\w\\s")
        )
        if pattern and not re.fullmatch(pattern, value):
            raise Invalid(f"{where}: {value!r} does not match {pattern}")
        if shape.metadata.get("enum") and value not in shape.metadata["enum"]:
            raise Invalid(f"{where}: {value!r} is not among {shape.metadata['enum']}")
    elif shape.type_name in ("integer", "long", "float", "double"):
        _limit(value, shape, where)


def _limit(size: float, shape: Any, where: str) -> None:
    low, high = shape.metadata.get("min"), shape.metadata.get("max")
    if (low is not None and size < low) or (high is not None and size > high):
        raise Invalid(f"{where}: {size} is not from {low} to {high}")
