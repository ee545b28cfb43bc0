#!/bin/sh
# Installs the exporter into a virtual environment in this folder and runs it: on this machine's GPUs if the driver
# answers, otherwise on simulated ones. Arguments are passed to `gpumem-exporter serve`.
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
say "open http://127.0.0.1:9844/ (or the address that you set), or run in a second terminal in this folder:"
say "    curl -s http://127.0.0.1:9844/metrics"
say "    $venv/bin/gpumem-exporter info"
say "    $venv/bin/gpumem-exporter clear --all"
exec "$venv/bin/gpumem-exporter" serve "$@"
