#!/bin/sh
# Make the environment that the image runs: install.sh PROJECT VENV REPORTS. The Dockerfile and its test both call it.
# What it holds is the wheel with its extra `serve`, at the versions of constraints.txt, and nothing else.
# REPORTS is a folder for pip's report, which holds the hash of everything that it installed.
set -eu
project=$1
venv=$2
reports=$3
mkdir -p "$reports"
python3 -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-cache-dir --quiet "$@"; }
pip wheel --no-deps --wheel-dir "$reports" "$project"
pip install --report "$reports/installed.json" --constraint "$project/constraints.txt" "$(echo "$reports"/*.whl)[serve]"
pip uninstall --yes setuptools pip
"$venv/bin/python" -m compileall -q -j 0 "$venv/lib"
