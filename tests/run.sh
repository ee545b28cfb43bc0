#!/bin/sh
# Installs what the tests need and runs them.
#
#   sh tests/run.sh                          everything, in parallel; prints the 30 slowest tests
#   sh tests/run.sh --coverage               the same, with the line coverage, for twice the CPU time
#   sh tests/run.sh --quick                  what needs no torch, no browser and no Prometheus
#   sh tests/run.sh tests/exporter -k ledger  arguments go to pytest, which then runs in one process
#
# Run as root, it also installs the system packages that are missing; otherwise it prints which to install.
# Environment: GPUMEM_TEST_WORKERS, the number of parallel workers (default: CPUs + 1, at most 8).
set -eu
cd "$(dirname "$0")/.."
. deploy/environment.sh

# One worker more than CPUs, because tests also wait. OMP_NUM_THREADS is set later: nproc reads it, too.
workers=${GPUMEM_TEST_WORKERS:-$(($(nproc) + 1))}
[ "$workers" -le 8 ] || workers=8

# Bytecode is kept: compiling torch in each of its processes takes as long as all tests together. One thread for each
# process: OpenMP's threads spin, and the models here are too small to gain from them.
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

parallel="-n $workers --dist loadfile --no-loadscope-reorder"

make_venv "$venv"

if [ "${1:-}" = --quick ]; then
    shift
    install_project quick
    exec "$python" -m pytest $parallel tests/exporter tests/client tests/toolkit tests/contract -m "not tools and not slow" "$@"
fi

install_project test
# Helm's engine also runs on Python 3.10 and 3.11, which its package does not say.
"$python" -c 'import helm_sdkpy' 2>/dev/null || "$python" -m pip install --quiet --ignore-requires-python --no-deps helm-sdkpy ||
    say "Helm's engine cannot be installed: the tests of the chart are skipped"

# The emulated node runs the caching allocator of torch's CUDA build. It is read, not imported: that takes seconds.
cuda=$("$python" -c '
import importlib.util, pathlib, runpy
print(runpy.run_path(str(pathlib.Path(importlib.util.find_spec("torch").origin).with_name("version.py")))["cuda"] or "none")
')
[ "$cuda" != none ] || fail "the torch in $venv is not a CUDA build: remove $venv and run this again"

# The emulated node is C; its build reads symbol tables, too.
if ! { have nm && echo '#include <stdlib.h>' | gcc -fsyntax-only -x c -; } >/dev/null 2>&1; then
    apt_install gcc libc6-dev binutils || fail "a C compiler is needed: run 'apt-get install gcc libc6-dev' as root"
fi
PATH=$PATH:$PWD/$tools/usr/bin
for tool in prometheus promtool; do
    # promtool is in Debian's package prometheus up to release 12, in one of its own after that
    debian_tool $tool prometheus || debian_tool $tool $tool || fail "$tool is needed: run 'apt-get install prometheus' as root"
done
for tool in prometheus-alertmanager amtool; do
    debian_tool $tool prometheus-alertmanager || fail "$tool is needed: run 'apt-get install prometheus-alertmanager' as root"
done
# Debian's Alertmanager reads its templates from this folder, wherever its program lies.
templates=/usr/share/prometheus/alertmanager
if [ ! -e "$templates" ]; then
    { mkdir -p "$templates" && cp -R "$tools$templates/." "$templates"; } 2>/dev/null ||
        fail "$templates is needed: run 'apt-get install prometheus-alertmanager' as root"
fi

# The live page is looked at in a real browser, whose package needs the libraries that come with it.
have chromium || apt_install chromium || fail "chromium is needed: run 'apt-get install chromium' as root"
# A tab is typed in the real shells.
have zsh || apt_install zsh || say "zsh cannot be installed: its completion is not tested"

case "${1:-}" in
"") exec "$python" -m pytest $parallel --durations=30 ;;
--coverage) shift && exec "$python" -m pytest $parallel --durations=30 --cov "$@" ;;
*) exec "$python" -m pytest "$@" ;;
esac
