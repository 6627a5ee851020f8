"""Build archives that anybody can repeat and upload.

The metadata is in `pyproject.toml`. This file adds what setuptools cannot declare: the README as an
index of packages can show it, and archives without traces of the machine that built them.
"""

import gzip
import os
import re
import shutil
import tarfile
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
EPOCH = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
"""Time of the files in a source distribution; setuptools reads the variable for wheels."""

_COMMENT = re.compile(r"<!--.*?-->\n", re.DOTALL)
_IMAGE = re.compile(r"!\[[^]]*\]\((?!https:)[^)]*\)\n\n?")
_PAGE = re.compile(r"\[([^]]*)\]\(docs/([\w/-]+)\.md(?:#[\w-]+)?\)")
_LINK = re.compile(r"\[([^]]*)\]\((?!https:)[^)]*\)")


def convert_readme(text: str) -> str:
    """Return the README for an index of packages, which has no other files of the repository.

    A link to a page becomes the command that shows this page, since the pages are in the wheel.
    """
    text = _IMAGE.sub("", _COMMENT.sub("", text))
    return _LINK.sub(r"\1", _PAGE.sub(r"\1 (`onnx-ops docs \2`)", text))


def normalize_mode(path: Path) -> int:
    """Return the permissions of a file in a checkout of any user."""
    return 0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644


class Wheel(bdist_wheel):
    """A wheel whose permissions do not depend on the user's umask."""

    def write_wheelfile(self, wheelfile_base: str, *arguments: str) -> None:
        """Write the last file before the files are packed, and normalize the others."""
        super().write_wheelfile(wheelfile_base, *arguments)
        folder = Path(wheelfile_base).parent
        if folder == Path(self.bdist_dir):  # not for an editable installation
            for path in folder.rglob("*"):
                path.chmod(normalize_mode(path))


class SourceDistribution(sdist):
    """A source distribution whose bytes depend on its files only."""

    def make_archive(
        self, base_name: str, archive_format: str, base_dir: str | None = None, **_: str | None
    ) -> str:
        """Write the files in a fixed order, with fixed times, owners and permissions."""
        if archive_format != "gztar" or base_dir is None:
            raise ValueError(f"the format is {archive_format}, but only gztar is reproducible")
        file = Path(f"{base_name}.tar.gz")
        file.parent.mkdir(parents=True, exist_ok=True)
        with (
            file.open("wb") as stream,
            gzip.GzipFile("", "wb", mtime=EPOCH, fileobj=stream) as packed,
            tarfile.open(mode="w", fileobj=packed, format=tarfile.PAX_FORMAT) as archive,
        ):
            for path in sorted([Path(base_dir), *Path(base_dir).rglob("*")]):
                entry = archive.gettarinfo(str(path), path.as_posix())
                entry.uid = entry.gid = 0
                entry.uname = entry.gname = ""
                entry.mtime, entry.mode = EPOCH, normalize_mode(path)
                if path.is_file():
                    with path.open("rb") as content:
                        archive.addfile(entry, content)
                else:
                    archive.addfile(entry)
        return str(file)


if __name__ == "__main__":
    # Otherwise setuptools packs what a build of older sources has left in `build/lib`.
    shutil.rmtree("build/lib", ignore_errors=True)
    setup(
        cmdclass={"bdist_wheel": Wheel, "sdist": SourceDistribution},
        long_description=convert_readme((ROOT / "README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
    )
