#!/bin/sh
# Installs the exporter into a virtual environment in this folder and runs it: on this machine's GPUs if the driver
# answers, otherwise on simulated ones. It listens on 127.0.0.1:9844 only. Arguments are passed to
# `gpumem-exporter serve`: `sh deploy/quickstart.sh --web.listen-address :9844` listens on all addresses.
set -eu
cd "$(dirname "$0")/.."
. deploy/environment.sh

make_venv "$venv"
install_project

# The exporter handles a driver that hangs; here it counts as no driver.
gpus=$(timeout 20 "$python" -c 'import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())' 2>/dev/null || echo 0)
if [ "$gpus" -gt 0 ]; then
    say "the driver lists $gpus GPU(s)"
else
    say "no NVIDIA driver answers: a demo on simulated devices"
    set -- --demo "$@"
fi
# The machine alone reaches the page, unless an argument or the variable says otherwise.
export GPUMEM_WEB_LISTEN_ADDRESS="${GPUMEM_WEB_LISTEN_ADDRESS:-127.0.0.1:9844}"
say "open http://$GPUMEM_WEB_LISTEN_ADDRESS/ (or the address of your argument), or run in a second terminal in this folder:"
say "    $venv/bin/gpumem-exporter top"
say "    $venv/bin/gpumem-exporter clear --all --dry-run"
exec "$venv/bin/gpumem-exporter" serve "$@"
