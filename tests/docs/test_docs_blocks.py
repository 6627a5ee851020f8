"""Static checks of the documentation's blocks.

Their commands, options and keys exist. The blocks do not run.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_page import commands, flags

from onnx_ops.config.analysis import load_analysis_config
from onnx_ops.config.loader import load_pipeline, load_policy
from onnx_ops.config.reach import Reach
from onnx_ops.config.schema import pipeline_schema, target_schema
from onnx_ops.config.targets import TargetFiles
from onnx_ops.config.yaml_reader import read_text
from tests.docs.docs_analysis import find_check
from tests.docs.docs_blocks import PAGES, ROOT, SHELL, Block, blocks_of, calls, commands_of

COMMANDS = dict(commands())
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
LANGUAGES = {"bash", "console", "python", "yaml", "json", "toml", "ini", "text"}

IN_A_CHECKOUT = (ROOT / "docs" / "endpoint-proof.md", ROOT / "docs" / "extend-command.md")
"""Pages for readers with a checkout.

They describe how to repeat this repository's measurements, and how to change its commands.
"""


def shaped(language: str) -> list[Any]:
    return [pytest.param(block, id=block.place) for block in BLOCKS if block.language == language]


@pytest.mark.parametrize("block", [pytest.param(block, id=block.place) for block in BLOCKS])
def test_block_names_language_and_reason_if_not_run(block: Block) -> None:
    assert block.language in LANGUAGES
    reason = block.note("not run")
    assert reason is None or (len(reason.split()) > 1 and block.language in (*SHELL, "python"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_has_no_commands_in_indented_blocks(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert not re.findall(r"\n\n    (?:\$ )?(?:onnx-ops|python|pip|mlflow|prefect) .*", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_uses_existing_commands_and_options(page: Path) -> None:
    blocks = blocks_of(page)
    texts = [block.text for block in blocks if block.language == "bash"]
    texts += [
        one.text for block in blocks if block.language == "console" for one in commands_of(block)
    ]
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    texts += [" ".join(found.split()) for found in re.findall(r"`(onnx-ops [^`]+)`", prose)]
    wrong = [found for text in texts for words in calls(text) if (found := unknown(words))]
    assert not wrong


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in IN_A_CHECKOUT], ids=lambda page: page.name
)
def test_page_imports_no_test_module(page: Path) -> None:
    texts = [block.text for block in blocks_of(page) if block.language in (*SHELL, "python")]
    assert not [text for text in texts if re.search(r"(-m |import |from )tests\b", text)]


def unknown(words: list[str]) -> str:
    """Return the unknown parts of a command.

    The result is empty if all parts are known, or if the command is not one of onnx-ops.
    """
    if words[:3] == ["python", "-m", "onnx_ops"]:
        words = ["onnx-ops", *words[3:]]
    if words[0] != "onnx-ops" or len(words) < 2 or words[1].startswith(("-", "…")):
        return ""
    name = words[1] if words[1] in COMMANDS else " ".join(words[1:3])
    if name not in COMMANDS:
        return f"no command {name!r}"
    known = flags(COMMANDS[name])
    strange = [
        word
        for word in words[2:]
        if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known
    ]
    return f"{name}: {', '.join(strange)}" if strange else ""


def test_unknown_command_or_option_is_detected() -> None:
    assert unknown(shlex.split("onnx-ops rolback digits"))
    assert unknown(shlex.split("onnx-ops rollback digits --becuase x"))


def test_calls_of_shell_text_yields_words_of_each_command_without_comments() -> None:
    assert list(calls("cd a && onnx-ops check b | head # why\nonnx-ops plan c")) == [
        ["cd", "a"],
        ["onnx-ops", "check", "b"],
        ["head"],
        ["onnx-ops", "plan", "c"],
    ]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with this project's targets and functions.

    It also has what the pages invent: functions of metrics, and parameters.
    """
    root = tmp_path_factory.mktemp("project")
    (root / "configs").mkdir()
    (root / "configs" / "targets").symlink_to(ROOT / "configs" / "targets")
    (root / "examples").symlink_to(ROOT / "examples")
    (root / "params.yaml").write_text("train: {epochs: 3, seed: 7}\nmodel: {hidden: [8]}\n")
    (root / "project.py").write_text("predict = decode = name_label = None\n")
    (root / "shop").mkdir()
    (root / "shop" / "scores.py").write_text("def profit(predictions, labels):\n    return 1.0\n")
    for module, function in (("speech", "transcribe"), ("translation", "translate")):
        (root / "shop" / f"{module}.py").write_text(f"def {function}(outputs):\n    return []\n")
    (root / "shop" / "slicing.py").write_text("def find(arrays):\n    return {}\n")
    return root


@pytest.mark.parametrize("block", shaped("yaml"))
def test_yaml_block_is_valid_for_its_reader(block: Block, project: Path, tmp_path: Path) -> None:
    document = read_text(block.text, source=block.place)
    assert not document.issues
    value = document.value
    if isinstance(value, list):
        assert all((ROOT / str(one["entrypoint"]).partition(":")[0]).is_file() for one in value)
    elif set(value) <= pipeline_schema()["properties"].keys():
        check_pipeline_part(block, value, project, tmp_path)
    elif set(value) <= target_schema()["properties"].keys():
        file = tmp_path / "configs" / "targets" / f"{value.get('name', 'part')}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(("" if "name" in value else "name: part\n") + block.text, encoding="utf-8")
        TargetFiles(tmp_path).load(file.stem)
    elif (check := find_check(value)) is not None:
        check(value)
    elif "analyses" in value:
        file = tmp_path / "analysis.yaml"
        file.write_text(block.text, encoding="utf-8")
        load_analysis_config(file)
    elif "rules" in value:
        file = tmp_path / "policy.yaml"
        file.write_text(block.text, encoding="utf-8")
        load_policy(file)
    else:
        other = "neither a pipeline, a target, a policy, a workflow nor a dvc.yaml"
        # `test_infra_page_workflows` checks workflows.
        workflow = {"name", "on", "permissions", "jobs"}
        assert set(value) in ({"jobs"}, workflow, {"repos"}, {"metrics", "plots"}), other


def check_pipeline_part(block: Block, value: dict[str, Any], project: Path, folder: Path) -> None:
    """Check a complete pipeline file, or sections of one.

    Sections replace those of a complete pipeline.
    """
    file = folder / "page.yaml"
    if "pipeline" in value:
        file.write_text(block.text, encoding="utf-8")
    else:
        whole = yaml.safe_load(
            (ROOT / "configs" / "pipelines" / "digits-mlp.yaml").read_text(encoding="utf-8")
        )
        written = yaml.safe_load(block.text)
        written["data"] = {**whole["data"], **written.get("data", {})}
        measured = {"benchmark": {"targets": ["cpu-1t", "browser-wasm"]}}
        if "model" in written:
            # A pipeline has either `model` or `train`.
            del whole["train"]
        file.write_text(
            yaml.safe_dump({**whole, **measured, **written}, sort_keys=False), encoding="utf-8"
        )
    # The project's files are links to files in ROOT, so the settings must permit ROOT.
    reach = Reach(paths=(str(ROOT), "https://models.example", "hf://acme"))
    load_pipeline(file, root=project, reach=reach)


@pytest.mark.parametrize("block", shaped("json"))
def test_json_block_is_valid_json(block: Block) -> None:
    for line in block.text.splitlines():
        json.loads(line)


@pytest.mark.parametrize("block", shaped("toml"))
def test_toml_block_is_valid_toml(block: Block) -> None:
    assert tomllib.loads(block.text)


@pytest.mark.parametrize("block", shaped("python"))
def test_python_block_compiles(block: Block) -> None:
    compile(block.text, block.place, "exec")
