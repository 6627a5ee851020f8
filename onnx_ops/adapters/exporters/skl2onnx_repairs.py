"""Repairs of skl2onnx 1.20 that are active while it converts one model."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from onnx_ops.adapters.exporters.sklearn_wrappers import interpolate


@contextmanager
def repair_converters(parts: Sequence[object]) -> Iterator[None]:
    """Apply all repairs while the context is active.

    Args:
        parts: the estimators of the model.

    Raises:
        NotImplementedError: there is no converter for a part.
    """
    with ExitStack() as stack:
        stack.enter_context(_name_missing_converter())
        stack.enter_context(_write_whole_numbers())
        stack.enter_context(_ignore_flattening(parts))
        stack.enter_context(_keep_imputed_types())
        stack.enter_context(_interpolate_calibration())
        yield


@contextmanager
def _name_missing_converter() -> Iterator[None]:
    """Raise an error that names the estimator for which there is no converter.

    The error replaces skl2onnx's error, which advises to write a converter.

    Raises:
        NotImplementedError: there is no converter for an estimator.
    """
    exceptions: Any = importlib.import_module("skl2onnx.common.exceptions")
    try:
        yield
    except exceptions.MissingShapeCalculator as error:
        name = re.search(r"'([\w.]+)'>", str(error))
        part = name[1].rpartition(".")[2] if name else "an estimator of the model"
        raise NotImplementedError(f"skl2onnx has no converter for {part}") from error


@contextmanager
def _write_whole_numbers() -> Iterator[None]:
    """Write booleans in lists of attributes as integers while converters run.

    Some converters pass lists of booleans as attributes, which protobuf 7 refuses.
    """
    container: Any = importlib.import_module("skl2onnx.common._container")
    make_node = container.make_node

    def make(*arguments: Any, **attributes: Any) -> Any:
        plain = {
            name: [int(v) if type(v).__name__ in ("bool", "bool_") else v for v in value]
            if isinstance(value, list)
            else value
            for name, value in attributes.items()
        }
        return make_node(*arguments, **plain)

    container.make_node = make
    try:
        yield
    finally:
        container.make_node = make_node


@contextmanager
def _ignore_flattening(parts: Sequence[object]) -> Iterator[None]:
    """Switch off `flatten_transform` of voting classifiers.

    skl2onnx refuses the default of this option, although the option affects only `transform`.
    """
    voting: list[Any] = [part for part in parts if getattr(part, "flatten_transform", False)]
    for part in voting:
        part.flatten_transform = False
    try:
        yield
    finally:
        for part in voting:
            part.flatten_transform = True


@contextmanager
def _keep_imputed_types() -> Iterator[None]:
    """Give an imputer's output the type of its inputs, if all have the same type.

    skl2onnx declares the output before it joins the columns, and uses the type of the first column.
    So it refuses columns of integers that precede columns of fractions.
    """
    registry: Any = importlib.import_module("skl2onnx.common._registration")
    name = "SklearnSimpleImputer"
    compute_shapes = registry.get_shape_calculator(name)

    def compute(operator: Any) -> None:
        (output,) = operator.outputs
        if len({type(value.type) for value in operator.inputs}) == 1:
            output.type = type(operator.inputs[0].type)(output.type.shape)
        compute_shapes(operator)

    registry.register_shape_calculator(name, compute, overwrite=True)
    try:
        yield
    finally:
        registry.register_shape_calculator(name, compute_shapes, overwrite=True)


@contextmanager
def _interpolate_calibration() -> Iterator[None]:
    """Interpolate between the steps of an isotonic calibration.

    skl2onnx returns the value of the nearest step.
    """
    module: Any = importlib.import_module("skl2onnx.operator_converters.calibrated_classifier_cv")
    name = "_transform_isotonic"
    original = getattr(module, name)

    def transform(
        scope: Any, container: Any, model: Any, scores: str, k: int, _: Any, proto_type: int
    ) -> str:
        value = scope.get_unique_variable_name("calibration_scores")
        shape = scope.get_unique_variable_name("calibration_shape")
        # The element type 7 is TensorProto.INT64.
        container.add_initializer(shape, 7, [2], [-1, 1])
        container.add_node(
            "Reshape", [scores, shape], value, name=scope.get_unique_operator_name("Reshape")
        )
        calibrator = model.calibrators[k]
        for operator, array in interpolate(calibrator.X_thresholds_, calibrator.y_thresholds_):
            constant = scope.get_unique_variable_name("calibration")
            container.add_initializer(
                constant, proto_type, list(array.shape), array.ravel().tolist()
            )
            result = scope.get_unique_variable_name("calibrated")
            container.add_node(
                operator, [value, constant], result, name=scope.get_unique_operator_name(operator)
            )
            value = result
        return str(value)

    setattr(module, name, transform)
    try:
        yield
    finally:
        setattr(module, name, original)
