#!/bin/sh
# Make the environment that the image runs: install.sh PROJECT VENV REPORTS. The Dockerfile and its test both call it.
# REPORTS is a folder for pip's reports, which hold the hash of everything that it installed.
set -eu
project=$1
venv=$2
reports=$3
mkdir -p "$reports"
python3 -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-cache-dir --quiet "$@"; }
pip install --report "$reports/server.json" --constraint "$project/constraints.txt" \
    --requirement "$project/infra/docker/requirements.txt"
pip wheel --no-deps --wheel-dir "$reports" "$project"
pip install --report "$reports/onnx-ops.json" --no-deps "$reports"/*.whl
pip uninstall --yes setuptools pip
"$venv/bin/python" -m compileall -q -j 0 "$venv/lib"
