#!/bin/sh
# Processes the results of the dashboards' queries with Grafana's own code; see README.md. Takes three minutes, and needs
# Node.js 20, npm and the network. Leaves only the virtual environment.
set -eu
cd "$(dirname "$0")/../.."
. deploy/environment.sh

for needed in node npm; do have $needed || fail "$needed is needed: install Node.js 20"; done
make_venv "$venv"
install_project test
PATH=$PATH:$PWD/$tools/usr/bin
debian_tool prometheus prometheus || fail "prometheus is needed: run 'apt-get install prometheus' as root"

work=$(mktemp -d "${TMPDIR:-/tmp}/gpumem-grafana.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM

say "installing Grafana's own code"
cp tests/grafana/package.json tests/grafana/*.mjs "$work"
version=$(sed -n 's|.*"@grafana/data": "\(.*\)".*|\1|p' tests/grafana/package.json)
# @grafana/prometheus depends on all of Grafana's front end; only one file of it is used, which needs little.
(
    cd "$work"
    npm install --no-audit --no-fund --loglevel error
    npm pack --loglevel error "@grafana/prometheus@$version"
    tar -xzf grafana-prometheus-*.tgz
    npx esbuild compare.mjs --bundle --platform=node --format=esm --log-level=error --outfile=bundle.mjs \
        --external:jsdom --alias:@grafana/runtime=./runtime.mjs \
        --alias:@grafana/prometheus/result_transformer=./package/dist/esm/result_transformer.mjs \
        "--banner:js=import { createRequire } from 'node:module'; const require = createRequire(import.meta.url);"
) >&2

say "querying a Prometheus that scrapes the demo for two minutes"
"$python" -m tests.grafana.answers "$work/answers.json"
node "$work/bundle.mjs" "$work/answers.json"
