#!/bin/sh
# Make the environment that the image runs: install.sh PROJECT VENV. The Dockerfile and its test both call it.
set -eu
project=$1
venv=$2
python3 -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-cache-dir --quiet "$@"; }
pip install --constraint "$project/constraints.txt" --requirement "$project/infra/docker/requirements.txt"
pip install --no-deps "$project"
pip uninstall --yes setuptools
"$venv/bin/python" -m compileall -q -j 0 "$venv/lib"
