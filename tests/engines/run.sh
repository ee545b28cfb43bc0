#!/bin/sh
# Starts a real vLLM on an emulated node and clears a neighbor's cache meanwhile; see README.md. Needs 9 GB of disk, the
# network for Python's packages, gcc, and some minutes. Leaves only its virtual environment.
set -eu
cd "$(dirname "$0")/../.."
# vLLM pins its own torch.
GPUMEM_VENV=${GPUMEM_VENV:-.cache/engines}
. deploy/environment.sh

mkdir -p "$(dirname "$venv")"
make_venv "$venv"
install_project engines
exec "$python" -m pytest tests/engines/*checks.py -p no:randomly "$@"
