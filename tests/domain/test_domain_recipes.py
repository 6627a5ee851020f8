"""Recipes follow the machines of the targets, unless a person has set them."""

from __future__ import annotations

from importlib.metadata import entry_points

import hypothesis.strategies as st
import pytest
from hypothesis import given

from onnx_ops.domain.arithmetic import Arithmetic, detect_arithmetic
from onnx_ops.domain.execution import Provider
from onnx_ops.domain.quantization import (
    METHODS,
    choose_reduce_range,
    choose_static_recipe,
    find_type_conflict,
)
from onnx_ops.domain.target import HardwareFingerprint, Target

CPU, GPU = (
    Target(name="cpu"),
    Target(name="gpu", providers=(Provider(name="CUDAExecutionProvider"),)),
)

MACHINES = st.lists(
    st.builds(
        Arithmetic,
        family=st.sampled_from(["x86", "arm", "accelerator", "other"]),
        saturates=st.booleans(),
        fp16=st.booleans(),
        wide=st.booleans(),
    ),
    max_size=4,
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "activations": st.sampled_from(["uint8", "int8", "uint16"]),
        "weights": st.sampled_from(["int8", "uint8"]),
        "reduce_range": st.booleans(),
        "symmetric": st.booleans(),
    },
)


def machine(name: str, *flags: str) -> HardwareFingerprint:
    return HardwareFingerprint(
        machine=name,
        cpu_model="",
        cpu_flags=flags,
        cores=1,
        memory_bytes=1,
        runtime="onnxruntime",
        runtime_version="1",
    )


@pytest.mark.parametrize(
    ("hardware", "target", "expected"),
    [
        (machine("x86_64", "avx2"), CPU, Arithmetic(family="x86", saturates=True)),
        (machine("x86_64", "avx2", "avx_vnni"), CPU, Arithmetic(family="x86")),
        (
            machine("x86_64", "avx512f", "avx512bw"),
            CPU,
            Arithmetic(family="x86", saturates=True, wide=True),
        ),
        (
            machine("AMD64", "avx512f", "avx512bw", "avx512_vnni"),
            CPU,
            Arithmetic(family="x86", wide=True),
        ),
        (machine("x86_64", "avx512_vnni", "avx512_fp16"), CPU, Arithmetic(family="x86", fp16=True)),
        (machine("aarch64", "asimddp", "asimdhp"), CPU, Arithmetic(family="arm", fp16=True)),
        (machine("arm64"), CPU, Arithmetic(family="arm")),
        (machine("riscv64"), CPU, Arithmetic(family="other")),
        (machine("x86_64", "avx2"), GPU, Arithmetic(family="accelerator", fp16=True)),
    ],
)
def test_detect_arithmetic_uses_cpu_flags_and_execution_provider(
    hardware: HardwareFingerprint, target: Target, expected: Arithmetic
) -> None:
    assert detect_arithmetic(hardware, target) == expected


@given(options=OPTIONS, machines=MACHINES)
def test_choose_static_recipe_keeps_given_options(
    options: dict[str, object], machines: list[Arithmetic]
) -> None:
    recipe = choose_static_recipe(options, machines)
    chosen = {
        name: getattr(recipe, name)
        for name in ("activations", "weights", "reduce_range", "symmetric")
    }
    assert chosen | options == chosen
    assert all(note == note.strip() != "" for note in recipe.notes)


@given(options=OPTIONS, machines=MACHINES)
def test_choose_static_recipe_for_saturating_machine_reduces_range_or_warns(
    options: dict[str, object], machines: list[Arithmetic]
) -> None:
    recipe = choose_static_recipe(options, machines)
    mixed = recipe.activations == "uint8" and recipe.weights == "int8"
    if mixed and any(one.saturates for one in machines):
        assert recipe.reduce_range or "saturate" in recipe.notes[-1]
        assert recipe.reduce_range or options["reduce_range"] is False
    elif "reduce_range" not in options:
        assert not recipe.reduce_range


@given(machines=MACHINES)
def test_quantization_recipes_ignore_order_of_machines(machines: list[Arithmetic]) -> None:
    assert choose_static_recipe({}, machines) == choose_static_recipe({}, machines[::-1])
    assert choose_reduce_range({}, machines) == choose_reduce_range({}, machines[::-1])


@given(machines=MACHINES)
def test_choose_static_recipe_uses_int8_activations_only_if_all_machines_accept_it(
    machines: list[Arithmetic],
) -> None:
    families = {one.family for one in machines}
    signed = bool(machines) and not families & {"x86", "other"}
    assert (choose_static_recipe({}, machines).activations == "int8") is signed


@given(options=OPTIONS)
def test_find_type_conflict_rejects_only_unusable_combinations(options: dict[str, object]) -> None:
    no_kernel = options.get("activations") == "int8" and options.get("weights") == "uint8"
    nonsense = options.get("activations") == "uint16" and options.get("reduce_range") is True
    assert bool(find_type_conflict(options)) is (no_kernel or nonsense)


def test_methods_name_each_optimizer_of_onnx_ops() -> None:
    points = entry_points(group="onnx_ops.optimizers")
    own = {point.name for point in points if point.value.startswith("onnx_ops.")}
    assert set(METHODS) == own
