"""Requirements of a machine: texts of unmet ones, and a machine that meets them."""

from __future__ import annotations

from dataclasses import asdict, replace

from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.target import SPEED_FLAGS, HardwareFingerprint, Requirements
from tests.support.golden import Golden

BOX = HardwareFingerprint(
    machine="x86_64",
    cpu_model="AMD EPYC 9R14 96-Core Processor",
    cpu_flags=("avx2", "avx512f"),
    cores=8,
    memory_bytes=32_000_000_000,
    runtime="onnxruntime",
    runtime_version="1.31.1",
    accelerators=("NVIDIA H100 PCIe",),
    driver="550.54.15",
)


WANTED = (
    Requirements(),
    Requirements(machine="aarch64"),
    Requirements(cpu="epyc 9r14"),
    Requirements(cpu="Xeon"),
    Requirements(cpu_flags=("avx2", "amx_int8")),
    Requirements(cores=16),
    Requirements(memory=64_000_000_000),
    Requirements(accelerator="h100", driver="550.54"),
    Requirements(accelerator="B200"),
    Requirements(driver="560"),
    Requirements(driver="550.100"),
)


def test_find_missing_lists_unmet_requirements(golden: Golden) -> None:
    lines = []
    for wanted in WANTED:
        asked = ", ".join(f"{name} {value}" for name, value in asdict(wanted).items() if value)
        lines += [f"wanted: {asked}", *(f"    {reason}" for reason in wanted.find_missing(BOX))]
    golden("reasons", "\n".join(lines))


def test_find_missing_without_accelerator_omits_driver(golden: Golden) -> None:
    bare = replace(BOX, accelerators=(), driver="")
    wanted = Requirements(accelerator="H100", driver="550")
    golden("reasons", "\n".join(wanted.find_missing(bare)))


@given(
    wanted=st.builds(
        Requirements,
        machine=st.sampled_from(["", "x86_64", "aarch64"]),
        cpu=st.sampled_from(["", "EPYC"]),
        cpu_flags=st.lists(st.sampled_from(SPEED_FLAGS), unique=True).map(tuple),
        cores=st.integers(0, 1024),
        memory=st.none() | st.integers(1, 1 << 50),
        accelerator=st.sampled_from(["", "H100"]),
        driver=st.sampled_from(["", "550.1"]),
    )
)
def test_least_of_requirements_returns_machine_that_meets_them(wanted: Requirements) -> None:
    assert wanted.find_missing(wanted.least(BOX)) == ()
