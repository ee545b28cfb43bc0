#!/bin/sh
# Writes the versions and hashes of everything that the image installs: the exporter's dependencies for all supported
# versions of Python, and the tools that build its wheel. Run it after a change of the dependencies in pyproject.toml.
set -eu
cd "$(dirname "$0")/../.."
. deploy/environment.sh

make_venv "$venv"
find_uv
lock() {
    "$uv" pip compile --quiet --upgrade --universal --python-version 3.10 --generate-hashes --no-annotate \
        --custom-compile-command "sh deploy/image/lock.sh" "$@"
}
# The image builds the client of this repository.
lock --extra kubernetes --extra web --no-emit-package gpumem-client --output-file deploy/image/requirements.txt \
    pyproject.toml
build=$(mktemp)
trap 'rm -f "$build"' EXIT
# Python 3.10 has no tomllib, so this reads the one line that lists them.
sed -n 's/^requires = \[\(.*\)\]$/\1/p' pyproject.toml | tr -d '" ' | tr ',' '\n' >"$build"
lock --output-file deploy/image/build-requirements.txt - <"$build"
