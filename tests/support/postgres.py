"""A separate PostgreSQL server, for tests of records that are stored there.

`.ci/run` installs PostgreSQL and requires services. Elsewhere, the tests are skipped if it is
missing.
"""

from __future__ import annotations

import getpass
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.extras import skip_or_fail
from tests.support.ports import free_port


@contextmanager
def postgres() -> Iterator[str]:
    """Run a new cluster, and yield the SQLAlchemy URL of an empty database."""
    programs = _programs()
    if programs is None:
        skip_or_fail("no PostgreSQL here (Debian: apt-get install postgresql)")
    folder, port = Path(tempfile.mkdtemp(prefix="onnx-ops-postgres-")), free_port()
    user = "postgres" if os.geteuid() == 0 else getpass.getuser()
    if os.geteuid() == 0:
        # PostgreSQL refuses to run as root.
        owner = pwd.getpwnam(user)
        os.chown(folder, owner.pw_uid, owner.pw_gid)
    data = folder / "data"
    settings = (
        f"-c listen_addresses=127.0.0.1 -p {port} -c unix_socket_directories={folder} -c fsync=off"
    )
    try:
        _as(
            user,
            [
                programs / "initdb",
                "-D",
                data,
                "-U",
                "onnx_ops",
                "--auth=trust",
                "-E",
                "UTF8",
                "--no-sync",
            ],
        )
        _as(
            user,
            [
                programs / "pg_ctl",
                "-D",
                data,
                "-w",
                "-t",
                "120",
                "-l",
                folder / "log",
                "-o",
                settings,
                "start",
            ],
        )
        try:
            yield f"postgresql+psycopg2://onnx_ops@127.0.0.1:{port}/postgres"
        finally:
            _as(user, [programs / "pg_ctl", "-D", data, "-w", "-m", "immediate", "stop"])
    finally:
        shutil.rmtree(folder)


def _programs() -> Path | None:
    """Return the folder of PostgreSQL's programs, which Debian keeps off the path."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    return max(
        Path("/usr/lib/postgresql").glob("*/bin"),
        key=lambda path: int(path.parent.name),
        default=None,
    )


def _as(user: str, command: Sequence[str | Path]) -> None:
    done = subprocess.run(
        command,
        user=user if os.geteuid() == 0 else None,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, f"{command[0]}: {done.stderr}"
