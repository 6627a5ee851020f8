"""Sections that name a plugin: each has a key for the name, and `options`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from onnx_ops.codec import is_json, union_members
from onnx_ops.config.analysis import AnalysisServiceConfig
from onnx_ops.config.binding import file_fields, unwrap
from onnx_ops.config.settings import FileSettings, NotifierConfig
from onnx_ops.domain.endpoint import MetricsConfig
from onnx_ops.domain.pipeline import (
    Deploy,
    Export,
    FileData,
    Pipeline,
    PluginData,
    Quantize,
    Train,
)
from onnx_ops.domain.target import Target
from onnx_ops.plugins import KINDS

SECTIONS: Mapping[str, tuple[type, str]] = {
    "data": (PluginData, "source"),
    "exporters": (Export, "framework"),
    "optimizers": (Quantize, "method"),
    "endpoints": (Deploy, "provider"),
    "metrics": (MetricsConfig, "source"),
    "notifiers": (NotifierConfig, "notifier"),
}
"""The section that names a plugin of a kind, and the key of the plugin's role."""
WITHOUT_OPTIONS = {"runtimes", "pools"}
OTHER_VALUES = {(Train, "with"), (FileData, "values"), (PluginData, "values")}
"""Mappings of any values that are no options: parameters of a function, and inputs of models."""
PORTS = Path(__file__).parents[2] / "docs" / "ports.md"


def find_dataclasses(hint: Any, known: set[type]) -> Iterator[type]:
    """Yield the dataclasses of a type, and those of their fields."""
    kind, _ = unwrap(hint)
    if isinstance(kind, type) and is_dataclass(kind):
        if kind not in known:
            known.add(kind)
            yield kind
            for _, inner in file_fields(kind).values():
                yield from find_dataclasses(inner, known)
        return
    for part in () if is_json(kind) else (*union_members(kind), *get_args(kind)):
        yield from find_dataclasses(part, known)


def is_mapping_of_json(hint: Any) -> bool:
    arguments = get_args(unwrap(hint)[0])
    return len(arguments) == 2 and arguments[0] is str and is_json(arguments[1])


def test_plugin_kinds_have_section_or_no_options() -> None:
    assert SECTIONS.keys() | WITHOUT_OPTIONS == KINDS.keys()


@pytest.mark.parametrize("kind", SECTIONS)
def test_section_of_plugin_has_its_name_and_options(kind: str) -> None:
    section, role = SECTIONS[kind]
    hints = {key: hint for key, (_, hint) in file_fields(section).items()}
    assert unwrap(hints[role])[0] is str
    assert is_mapping_of_json(hints["options"])


@pytest.mark.parametrize("file", [Pipeline, Target, FileSettings, AnalysisServiceConfig])
def test_file_sections_have_free_mappings_only_as_plugin_options_or_listed_values(
    file: type,
) -> None:
    sections = {section for section, _ in SECTIONS.values()}
    for section in find_dataclasses(file, set()):
        for key, (_, hint) in file_fields(section).items():
            if is_mapping_of_json(hint) and (section, key) not in OTHER_VALUES:
                assert (key, section in sections) == ("options", True), (section, key)


def test_page_of_ports_lists_key_of_each_role() -> None:
    table = PORTS.read_text(encoding="utf-8").partition("## Options in files")[2].partition("##")[0]
    roles = re.findall(r"\| `(\w+)` \|$", table, flags=re.MULTILINE)
    assert roles == [role for _, role in SECTIONS.values()]
