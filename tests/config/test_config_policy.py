"""Promotion policies: strict reading, with the place of every problem."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.config.loader import LocatedPolicy, load_policy
from onnx_ops.domain.release import AliasRule, PromotionPolicy, is_among
from onnx_ops.errors import ConfigError, NotFoundError


def load(folder: Path, text: str) -> LocatedPolicy:
    path = folder / "policy.yaml"
    path.write_text(text, encoding="utf-8")
    return load_policy(path)


def test_load_policy_keeps_order_and_lines_of_rules(tmp_path: Path) -> None:
    located = load(
        tmp_path,
        'schema: 1\nrules:\n  - aliases: "champion-*"\n    users: [alice, bob]\n'
        '  - {aliases: "*-cpu-1t", models: "digits-*", users: ["*"]}\noverrides:\n  - alice\n',
    )
    assert located.policy == PromotionPolicy(
        rules=(
            AliasRule(aliases="champion-*", users=("alice", "bob")),
            AliasRule(aliases="*-cpu-1t", models="digits-*", users=("*",)),
        ),
        overrides=("alice",),
    )
    assert located.places == ("policy.yaml:3", "policy.yaml:5")
    assert located.overrides_at == "policy.yaml:7"
    assert located.policy.names() == {"alice", "bob"}


def test_load_policy_without_overrides_names_file_as_place(tmp_path: Path) -> None:
    located = load(tmp_path, 'rules: [{aliases: "*", users: [alice]}]')
    assert (located.policy.overrides, located.overrides_at) == ((), "policy.yaml:1")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file is empty"),
        ("rules: []", ":1:8: rules"),
        ("rules:\n  - {aliases: x}", ":2:5: rules[0]: "),
        ("rules:\n  - {aliases: x, users: []}", ":2:25: rules[0].users"),
        ("rules:\n  - {alias: x, users: [a]}", "did you mean 'aliases'"),
        ("rules:\n  - {aliases: x, users: alice}", ":2:25: rules[0].users"),
        ("rules:\n  - {aliases: x, users: [1]}", ":2:26: rules[0].users[0]"),
        ("schema: 9\nrules: [{aliases: x, users: [a]}]", "needs a newer onnx-ops"),
        ("rules: [{aliases: x, users: [a]}]\nrules: []", ":2:1"),
    ],
)
def test_load_policy_of_invalid_file_reports_problem(
    tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path, text)
    assert problem in str(refusal.value)


def test_load_policy_of_missing_file_raises_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        load_policy(tmp_path / "policy.yaml")


def test_policy_rule_for_model_and_alias_returns_first_match() -> None:
    policy = PromotionPolicy(
        rules=(
            AliasRule(aliases="champion-*", users=("alice",), models="digits"),
            AliasRule(aliases="champion-cpu", users=("bob",)),
        )
    )
    assert policy.rule("digits", "champion-cpu") == 0
    assert policy.rule("faces", "champion-cpu") == 1
    assert policy.rule("faces", "champion-cuda") is None
    assert policy.rule("Digits", "champion-cuda") is None


def test_is_among_accepts_named_user_or_wildcard_but_no_listed_empty_name() -> None:
    assert is_among("", ("*",))
    assert not is_among("", ("", "alice"))
    assert is_among("alice", ("bob", "alice"))
