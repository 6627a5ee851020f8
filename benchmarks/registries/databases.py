"""A temporary PostgreSQL server, and the rows of a large registry."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy

from onnx_ops.adapters.registries.mlflow import MlflowRegistry
from tests.support.ports import free_port

TAG_BYTES = 900
"""Approximate size of a signed decision."""


def program(name: str) -> str | None:
    """Return the path of a PostgreSQL program; Debian keeps them off the PATH."""
    found = [
        shutil.which(name),
        *map(str, sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)),
    ]
    return next((path for path in found if path), None)


def why_no_postgresql() -> str:
    """Return why PostgreSQL cannot be measured here; empty if it can."""
    if not (program("initdb") and program("postgres")):
        return "PostgreSQL is not installed (apt-get install postgresql)"
    try:
        import psycopg2  # noqa: F401
    except ImportError:
        return "its driver is not installed (pip install psycopg2-binary)"
    return ""


@contextmanager
def postgresql(folder: Path) -> Iterator[str]:
    """Run a PostgreSQL server, and yield its address.

    For root, the server runs as the user `postgres`, since PostgreSQL refuses to run as root.
    """
    user = "postgres" if os.geteuid() == 0 else None
    data, port = folder / "postgresql", free_port()
    data.mkdir(parents=True)
    if user:
        shutil.chown(data, user)
        for parent in [folder, *folder.parents]:
            if parent.owner() == "root" and parent.stat().st_mode & 0o777 == 0o700:
                parent.chmod(0o711)
    made = [
        str(program("initdb")),
        "-D",
        str(data),
        "-U",
        "onnxops",
        "--auth=trust",
        "-E",
        "UTF8",
        "--no-locale",
    ]
    subprocess.run(made, check=True, user=user, stdout=subprocess.DEVNULL, cwd="/")
    options = ["-p", str(port), "-c", "listen_addresses=127.0.0.1", "-k", str(data)]
    with (folder / "postgresql.log").open("wb") as log:
        server = subprocess.Popen(
            [str(program("postgres")), "-D", str(data), *options],
            user=user,
            stdout=log,
            stderr=log,
            cwd="/",
        )
    try:
        _until_it_listens(port, server)
        yield f"postgresql+psycopg2://onnxops@127.0.0.1:{port}"
    finally:
        # SIGINT is PostgreSQL's fast shutdown, which does not wait for clients.
        server.send_signal(signal.SIGINT)
        server.wait(timeout=60)


def create_database(server: str, name: str) -> str:
    engine = sqlalchemy.create_engine(f"{server}/postgres", isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return f"{server}/{name}"


def _until_it_listens(port: int, server: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        if server.poll() is not None:
            raise SystemExit("PostgreSQL did not start")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            time.sleep(1)
            return
    raise SystemExit("PostgreSQL does not listen")


def populate(uri: str, folder: Path, *, models: int, versions: int, alias: str) -> None:
    """Fill a registry's database with models and versions.

    The versions are spread evenly over the models. Each has the tags of a registered release. The
    last version of each model has the alias.
    """
    MlflowRegistry(uri, artifact_root=str(folder)).all_aliases()  # This call creates the tables.
    engine = sqlalchemy.create_engine(uri)
    tables = sqlalchemy.MetaData()
    tables.reflect(
        engine,
        only=[
            "registered_models",
            "model_versions",
            "model_version_tags",
            "registered_model_aliases",
        ],
    )
    each, now = versions // models, 1_700_000_000_000
    names = [f"model-{number:03d}" for number in range(models)]
    numbered = [(name, number) for name in names for number in range(1, each + 1)]
    said = {
        "release": "sha256:" + "0" * 64,
        "variant": "fp32",
        "mlflow.onnx_ops.digest": "sha256:" + "1" * 64,
        "gate.cpu-1t": "pass",
    }
    said["mlflow.onnx_ops.decision.cpu-1t"] = "x" * TAG_BYTES
    stamp = {"creation_time": now, "last_updated_time": now}
    with engine.begin() as connection:
        connection.execute(
            tables.tables["registered_models"].insert(), [{"name": name, **stamp} for name in names]
        )
        rows = [
            {
                "name": name,
                "version": number,
                "current_stage": "None",
                "status": "READY",
                "source": f"m-{number}",
                **stamp,
            }
            for name, number in numbered
        ]
        connection.execute(tables.tables["model_versions"].insert(), rows)
        tags = [
            {"name": name, "version": number, "key": key, "value": value}
            for name, number in numbered
            for key, value in said.items()
        ]
        connection.execute(tables.tables["model_version_tags"].insert(), tags)
        aliases = [{"name": name, "alias": alias, "version": each} for name in names]
        connection.execute(tables.tables["registered_model_aliases"].insert(), aliases)
        if engine.dialect.name == "postgresql":
            connection.execute(sqlalchemy.text("ANALYZE"))
    engine.dispose()
