"""The shipped profiles, and the names of options that a target may set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.config.schema import target_schema
from onnx_ops.config.targets import (
    PROFILES,
    UNMEASURED,
    TargetFiles,
    load_provider_options,
    profile_names,
)
from onnx_ops.config.yaml_reader import read_text
from onnx_ops.domain.execution import PROVIDER_PACKAGES
from onnx_ops.errors import ConfigError, NotFoundError
from tests.support.golden import Golden

ROOT = Path(__file__).parents[2]
SET = [
    (name, provider.name, option)
    for name in profile_names()
    for provider in TargetFiles(PROFILES).load(name).providers
    for option in provider.options
]


def wrong(option: str) -> str:
    """Return the option with its middle letter doubled."""
    middle = len(option) // 2
    return option[:middle] + option[middle] + option[middle:]


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profile_is_valid_target(name: str, tmp_path: Path) -> None:
    from jsonschema import Draft202012Validator

    target = TargetFiles(tmp_path).load(name)
    assert target.name == name
    assert target.description
    assert all(provider.name in load_provider_options() for provider in target.providers)
    brought = target.env is not None or target.providers[0].name == "CPUExecutionProvider"
    assert brought or target.providers[0].name in PROVIDER_PACKAGES
    text = (PROFILES / f"{name}.yaml").read_text(encoding="utf-8")
    Draft202012Validator(target_schema()).validate(read_text(text, source=name).value)


@pytest.mark.parametrize(
    ("name", "provider", "option"), SET, ids=["-".join(parts) for parts in SET]
)
def test_profile_with_misspelt_option_reports_its_place(
    name: str, provider: str, option: str, project: Path
) -> None:
    text = (PROFILES / f"{name}.yaml").read_text(encoding="utf-8")
    before, named, after = text.partition(f"name: {provider}")
    changed = before + named + after.replace(f"{option}:", f"{wrong(option)}:", 1)
    (project / f"configs/targets/{name}.yaml").write_text(changed)
    with pytest.raises(ConfigError) as caught:
        TargetFiles(project).load(name)
    (problem,) = caught.value.problems
    assert (
        problem.message == f"{provider} has no option '{wrong(option)}'; did you mean '{option}'?"
    )
    assert changed.splitlines()[problem.line - 1][problem.column - 1 :].startswith(wrong(option))


@pytest.mark.parametrize(
    ("provider", "option"),
    [
        (provider, option)
        for provider, names in load_provider_options().items()
        for option in sorted(names)
    ],
)
def test_execution_provider_option_with_extra_letter_raises_config_error(
    provider: str, option: str, project: Path
) -> None:
    path = project / "configs/targets/one.yaml"
    path.write_text(f"name: one\nproviders: [{{name: {provider}, options: {{{option}: '1'}}}}]\n")
    assert TargetFiles(project).load("one").providers[0].options == {option: "1"}
    path.write_text(
        f"name: one\nproviders: [{{name: {provider}, options: {{{wrong(option)}: '1'}}}}]\n"
    )
    with pytest.raises(ConfigError, match=rf"has no option '{wrong(option)}'; did you mean"):
        TargetFiles(project).load("one")


def test_execution_provider_options_are_checked_only_for_known_provider(project: Path) -> None:
    path = project / "configs/targets/one.yaml"
    path.write_text(
        "name: one\nproviders: [{name: AcmeExecutionProvider, options: {speed: '9'}}]\n"
    )
    assert TargetFiles(project).load("one").providers[0].options == {"speed": "9"}
    path.write_text("name: one\nproviders: [{name: CPUExecutionProvider, options: {speed: '9'}}]\n")
    with pytest.raises(
        ConfigError,
        match=r"one\.yaml:2:52: .*CPUExecutionProvider has no option 'speed'; it has none",
    ):
        TargetFiles(project).load("one")


def test_target_files_prefer_project_and_suggest_names_of_both_sources(project: Path) -> None:
    assert TargetFiles(project).load("cpu-all").session.intra_op_threads == 0
    (project / "configs/targets/cpu-all.yaml").write_text(
        "name: cpu-all\nsession: {intra_op_threads: 3}\n"
    )
    assert TargetFiles(project).load("cpu-all").session.intra_op_threads == 3
    with pytest.raises(NotFoundError, match=r"Did you mean 'tensorrt'\?"):
        TargetFiles(project).load("tensorr")
    with pytest.raises(NotFoundError, match=r"Did you mean 'old'\?"):
        TargetFiles(project).load("olt")


def test_pipeline_with_unknown_profile_suggests_similar_profile(
    project: Path, pipeline_text: str, problems: Callable[[str], list[str]], golden: Golden
) -> None:
    def of_targets(text: str) -> list[str]:
        return [line for line in problems(text) if "benchmark.targets" in line]

    assert of_targets(pipeline_text.replace("targets: [cpu-1t]", "targets: [cpu-1t, cuda]")) == []
    (line,) = of_targets(pipeline_text.replace("targets: [cpu-1t]", "targets: [cpu-1t, cudaa]"))
    golden("errors", line)


def test_target_files_of_project_equal_shipped_profiles() -> None:
    for name in ("cpu-1t", "cpu-all"):
        assert TargetFiles(ROOT).load(name) == TargetFiles(PROFILES).load(name)


def test_target_digest_depends_on_plugin_package() -> None:
    one = TargetFiles(PROFILES).load("qnn")
    assert one.providers[0].package == "onnxruntime_qnn"
    bare = replace(one, providers=(replace(one.providers[0], package=""), *one.providers[1:]))
    assert one.digest() != bare.digest()


def test_target_profiles_page_states_options_and_measurement_of_each_profile() -> None:
    text = (ROOT / "docs/target-profiles.md").read_text(encoding="utf-8")
    rows = {
        line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| `")
    }
    assert set(rows) == {f"`{name}`" for name in profile_names()}
    for name, _, option in SET:
        assert f"`{option}`" in rows[f"`{name}`"], (
            f"{name} sets {option}, and its row does not say why"
        )
    assert {
        name
        for name in profile_names()
        if rows[f"`{name}`"].split("|")[-2].strip().startswith("no")
    } == UNMEASURED


def test_only_unmeasured_profile_files_have_a_not_measured_comment() -> None:
    comments = {
        name: (PROFILES / f"{name}.yaml").read_text(encoding="utf-8").count("# Not measured: ")
        for name in profile_names()
    }
    assert comments == {name: int(name in UNMEASURED) for name in profile_names()}


def test_is_measured_of_profile_returns_bool_and_of_other_target_none(project: Path) -> None:
    files = TargetFiles(project)
    assert [files.is_measured(name) for name in ("cuda", "tensorrt", "nowhere")] == [
        True,
        False,
        None,
    ]
    (project / "configs/targets/tensorrt.yaml").write_text("name: tensorrt\n")
    assert files.is_measured("tensorrt") is None
