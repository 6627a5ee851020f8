"""The server's process: `python -m onnx_ops.serving.main --state-dir DIR …`."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import sys
from pathlib import Path

from onnx_ops.config.binding import bind_options
from onnx_ops.config.server_options import list_options
from onnx_ops.errors import OnnxOpsError
from onnx_ops.plugins import EXTRAS, require
from onnx_ops.protocol.server_process import ServerOptions

_SPARE_FILES = 256


def main(arguments: list[str] | None = None) -> int:
    """Serve until the process is stopped; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="onnx_ops.serving.main", description="Serve one endpoint."
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        required=True,
        help="folder of routing table, token and server record",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address of the public listener")
    parser.add_argument("--port", type=int, required=True, help="port of the public listener")
    parser.add_argument(
        "--admin-port", type=int, default=0, help="port of the admin listener on loopback"
    )
    parser.add_argument(
        "--must-load",
        action="store_true",
        help="exit if a deployment of the routing table cannot be loaded",
    )
    for name, kind, default, text in list_options():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=default, help=text.replace("%", "%%"))
    values = vars(parser.parse_args(arguments))
    folder, host = values.pop("state_dir"), values.pop("host")
    port, admin_port = values.pop("port"), values.pop("admin_port")
    must_load = values.pop("must_load")
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
    )
    # The variable is set before numpy is loaded. Otherwise numpy would start threads, and a process
    # that forks must have none.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        options = bind_options(values, ServerOptions)
        if options.grpc_port:
            require(*EXTRAS["grpc"], where="--grpc-port")
        # Each connection is an open file, and the usual limit is 1024.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = options.max_connections + _SPARE_FILES
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        if soft != resource.RLIM_INFINITY and soft < limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        from onnx_ops.serving.inference.request_log import find_collector
        from onnx_ops.serving.workers.supervisor import serve
        from onnx_ops.serving.workers.worker_memory import use_one_arena

        if variable := find_collector():
            require(*EXTRAS["otel"], where=variable)
        use_one_arena()
        serve(folder, host, port, admin_port, options, must_load=must_load)
    except OnnxOpsError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # No remaining thread may delay the exit: a cloud service kills a container that ends too late.
    os._exit(code)
