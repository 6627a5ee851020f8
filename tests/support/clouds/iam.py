"""Permissions of the roles of `infra/aws`.

Only the part of IAM's policy language that the roles use is implemented. An explicit deny precedes
an allow. Actions without a statement are denied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import yaml

from tests.support.clouds.sagemaker_parts import ACCOUNT, REGION
from tests.support.processes import ROOT

BUCKET = "models"
REPOSITORY = "acme/models"
"""The GitHub repository whose workflows are trusted."""
ROLE = f"arn:aws:iam::{ACCOUNT}:role/onnx-ops-sagemaker"
TOKEN = "token.actions.githubusercontent.com"  # noqa: S105 (the name of a provider)
PARAMETERS: Mapping[str, str] = {
    "AWS::AccountId": ACCOUNT,
    "AWS::Partition": "aws",
    "AWS::Region": REGION,
    "BucketName": BUCKET,
    "GitHubRepository": REPOSITORY,
    "GitHubProvider": f"arn:aws:iam::{ACCOUNT}:oidc-provider/{TOKEN}",
    "Images.Arn": f"arn:aws:ecr:{REGION}:{ACCOUNT}:repository/onnx-ops",
    "ContainerRole.Arn": ROLE,
    "Models.Arn": f"arn:aws:s3:::{BUCKET}",
}
"""Values of parameters and references.

They are parameters without a default, and references to the template's own resources.
"""
_NO_VALUE = "AWS::NoValue"
"""Reference by which the template leaves a list's item out."""


@dataclass(frozen=True, slots=True)
class Request:
    """A requested action on a resource. `context` has the values of condition keys."""

    action: str
    resource: str
    context: Mapping[str, str] = field(default_factory=dict)


def is_allowed(statements: Iterable[Mapping[str, Any]], request: Request) -> bool:
    """Return whether the statements of a role's policies allow the request."""
    effects = {statement["Effect"] for statement in statements if _applies(statement, request)}
    return effects == {"Allow"}


def may_assume(role: str, claims: Mapping[str, str]) -> bool:
    """Return whether a role can be assumed with a GitHub token that has these claims."""
    context = {f"{TOKEN}:{name}": value for name, value in claims.items()}
    document = resources()[role]["Properties"]["AssumeRolePolicyDocument"]
    trusting = [
        one
        for one in document["Statement"]
        if one["Principal"].get("Federated") == PARAMETERS["GitHubProvider"]
    ]
    request = Request("sts:AssumeRoleWithWebIdentity", "*", context)
    return is_allowed([{**one, "Resource": "*"} for one in trusting], request)


def caller(*given: tuple[str, str]) -> list[dict[str, Any]]:
    """Return the statements of the role that runs onnx-ops.

    `given` are parameters of the template.
    """
    policy = resources(*given)["Caller"]["Properties"]["PolicyDocument"]
    found: list[dict[str, Any]] = policy["Statement"]
    return found


def container(*given: tuple[str, str]) -> list[dict[str, Any]]:
    """Return the statements of the serving containers' role."""
    policies = resources(*given)["ContainerRole"]["Properties"]["Policies"]
    return [statement for policy in policies for statement in policy["PolicyDocument"]["Statement"]]


@cache
def resources(*given: tuple[str, str]) -> dict[str, Any]:
    """Return the template's resources with every function computed.

    `given` are parameters by name. Others have their defaults.
    """
    text = (ROOT / "infra" / "aws" / "onnx-ops.yaml").read_text(encoding="utf-8")
    document = yaml.load(text, Loader=_Template)  # noqa: S506 (a safe loader)
    values = {
        name: about["Default"]
        for name, about in document["Parameters"].items()
        if "Default" in about
    }
    values |= {**PARAMETERS, **dict(given)}
    conditions: dict[str, bool] = {}
    for name, condition in document["Conditions"].items():
        conditions[name] = _computed(condition, values, conditions)
    found: dict[str, Any] = _computed(document["Resources"], values, conditions)
    return found


class _Template(yaml.SafeLoader):
    """YAML loader for CloudFormation.

    Short forms of its functions become mappings from their name.
    """


def _function(loader: yaml.SafeLoader, tag: str, node: yaml.Node) -> dict[str, Any]:
    if isinstance(node, yaml.SequenceNode):
        return {f"!{tag}": loader.construct_sequence(node, deep=True)}
    return {f"!{tag}": loader.construct_scalar(node)}  # type: ignore[arg-type]


_Template.add_multi_constructor("!", _function)


def _computed(node: Any, values: Mapping[str, str], conditions: Mapping[str, bool]) -> Any:
    match node:
        case {"!Ref": name} | {"!GetAtt": name}:
            return values.get(name, name)
        case {"!Sub": text}:
            return re.sub(r"\$\{([\w:.]+)\}", lambda found: values[found[1]], text)
        case {"!If": [name, yes, no]}:
            return _computed(yes if conditions[name] else no, values, conditions)
        case {"!Equals": [one, other]}:
            return _computed(one, values, conditions) == _computed(other, values, conditions)
        case {"!Not": [condition]}:
            return not _computed(condition, values, conditions)
        case dict():
            return {key: _computed(value, values, conditions) for key, value in node.items()}
        case list():
            items = [_computed(value, values, conditions) for value in node]
            return [item for item in items if item != _NO_VALUE]
        case _:
            return node


def _applies(statement: Mapping[str, Any], request: Request) -> bool:
    actions = [action.lower() for action in _listed(statement["Action"])]
    return (
        any(_matches(action, request.action.lower()) for action in actions)
        and any(_matches(resource, request.resource) for resource in _listed(statement["Resource"]))
        and all(
            _is_met(operator, _listed(wanted), request.context.get(key))
            for operator, about in statement.get("Condition", {}).items()
            for key, wanted in about.items()
        )
    )


def _is_met(operator: str, wanted: list[str], value: str | None) -> bool:
    """Return whether a condition is met for the value of its key.

    The value is None if the request has no such key.
    """
    match operator:
        case "Null":
            return wanted == [str(value is None).lower()]
        case "StringEquals":
            return value in wanted
        case "Bool":
            return value is not None and value.lower() in wanted
        case "StringLike":
            return value is not None and any(_matches(pattern, value) for pattern in wanted)
        case _:
            raise NotImplementedError(
                f"the simulator does not know the condition operator {operator}"
            )


def _matches(pattern: str, text: str) -> bool:
    """Match IAM's wildcards: `*` stands for any text, `?` for one character."""
    plain = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(plain, text, re.DOTALL) is not None


def _listed(value: Any) -> list[str]:
    return [str(one) for one in (value if isinstance(value, list) else [value])]
