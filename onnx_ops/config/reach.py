"""What a pipeline file can reach beyond its project.

The settings allow variables, paths and packages.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from onnx_ops.config.messages import shorten
from onnx_ops.printable import hide_secrets_of, show

_REGISTERED = "models:/"
_SETTINGS = "onnx-ops.toml"
_GIT_ADDRESS = re.compile(r"[^/\\:]+@[^/\\:]+:.*|[A-Za-z][A-Za-z0-9+.-]+::.*")
"""Addresses of git without `://`: `user@host:path`, and `transport::address`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What the settings allow beyond the project.

    `variables` are names of environment variables (`AWS_ROLE`, `BUCKET_*`), `paths` are folders and
    URLs, and `packages` are packages of functions and of operator libraries.
    """

    variables: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    def explain_variable(self, name: str) -> str:
        """Return why `${env:NAME}` must not read a variable; empty if that is allowed."""
        if any(fnmatchcase(name, pattern) for pattern in self.variables):
            return ""
        return (
            f"pipeline files are not allowed to read variable {name}; "
            f"add it to allowed_variables in {_SETTINGS}"
        )

    def explain_path(self, text: str, root: Path) -> str:
        """Return why the path of a file is refused; empty if it is allowed.

        For a symbolic link, the path that it points to is checked. Models of the registry
        (`models:/`) are always allowed.
        """
        if text.startswith(_REGISTERED):
            return ""
        remedy = f"add its folder to allowed_paths in {_SETTINGS}"
        if is_url(text):
            return self._explain_url(text, remedy)
        try:
            place = os.path.realpath(root / text)
        except ValueError:
            return f"'{shorten(text)}' contains a null byte; remove it"
        folders = (root, *(root / folder for folder in self.paths if not is_url(folder)))
        if any(Path(place).is_relative_to(os.path.realpath(folder)) for folder in folders):
            return ""
        is_linked = os.path.normpath(root / text).startswith(f"{os.path.normpath(root)}{os.sep}")
        what = (
            f"leads to '{shorten(place)}' through a symbolic link"
            if is_linked
            else "is not below the project's root"
        )
        return f"'{shorten(text)}' {what}; {remedy}, or move the file into the project"

    def _explain_url(self, text: str, remedy: str) -> str:
        hide_secrets_of(text)
        if ".." in text:
            remedy = f"write the URL without '..', and {remedy}"
        else:
            prefixes = (prefix.rstrip("/") for prefix in self.paths if is_url(prefix))
            if any(text == prefix or text.startswith(f"{prefix}/") for prefix in prefixes):
                return ""
        return f"'{shorten(show(text))}' is not in the project; {remedy}"

    def explain_package(self, module: str) -> str:
        """Return why functions of a module outside the project are not allowed.

        The result is empty if they are allowed.
        """
        if self._allows(module):
            return ""
        parts = module.split(".")
        remedy = (
            f"add {parts[0]} to allowed_packages in {_SETTINGS}, or call the function from a "
            "module of the project"
        )
        return f"module '{shorten(module)}' is not in the project; {remedy}"

    def explain_library(self, package: str) -> str:
        """Return why a package's library must not be loaded; empty if it is allowed."""
        if self._allows(package):
            return ""
        return (
            f"the library of package '{package}' is not in the project; "
            f"add {package} to allowed_packages in {_SETTINGS}"
        )

    def _allows(self, module: str) -> bool:
        parts = module.split(".")
        return any(".".join(parts[: end + 1]) in self.packages for end in range(len(parts)))


PROJECT_ONLY = Reach()


def is_url(text: str) -> bool:
    """Return whether a text is a URL or another address of git, and not a path."""
    return "://" in text or _GIT_ADDRESS.fullmatch(text) is not None
