#!/bin/sh
# Installs the exporter into a virtual environment in this folder and runs it: on this machine's GPUs where the driver
# answers, on simulated ones where it does not. Arguments are passed on to `gpumem-exporter serve`.
set -eu
cd "$(dirname "$0")/.."
. deploy/environment.sh

make_venv "$venv"
install_project

# A driver that hangs is answered for by the exporter, not here.
gpus=$(timeout 20 "$python" -c 'import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())' 2>/dev/null || echo 0)
if [ "$gpus" -gt 0 ]; then
    say "the driver lists $gpus GPU(s)"
else
    say "no NVIDIA driver answers: a demo on simulated devices"
    set -- --demo "$@"
fi
say "open http://127.0.0.1:9844/ (unless told another address), or from a second terminal in this folder:"
say "    curl -s http://127.0.0.1:9844/metrics"
say "    $venv/bin/gpumem-exporter info"
say "    $venv/bin/gpumem-exporter clear --all"
exec "$venv/bin/gpumem-exporter" serve "$@"
