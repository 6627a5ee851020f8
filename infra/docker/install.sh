#!/bin/sh
# Create the environment that the image runs: install.sh REQUIREMENT CONSTRAINTS VENV REPORTS. The Dockerfiles and their
# tests call it. REQUIREMENT is the folder of onnx-ops, or `--requirement=FILE` with a line that names its wheel.
# The environment contains only the wheel and the packages of its extras `serve`, `s3` and `blob`, at the versions of
# CONSTRAINTS. REPORTS is a folder for pip's report, which contains the hash of each installed package.
set -eu
requirement=$1
constraints=$2
venv=$3
reports=$4
mkdir -p "$reports"
python3 -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-cache-dir --quiet "$@"; }
pip wheel --no-deps --wheel-dir "$reports" "$requirement"
pip install --report "$reports/installed.json" --constraint "$constraints" "$(echo "$reports"/*.whl)[blob,s3,serve]"
pip uninstall --yes setuptools pip
"$venv/bin/python" -m compileall -q -j 0 "$venv/lib"
