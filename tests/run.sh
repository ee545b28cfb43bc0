#!/bin/sh
# Installs all that the tests need and runs them. Arguments are passed on to pytest: sh tests/run.sh tests/unit -k ledger
# Run as root, it also installs the system packages that are missing; otherwise it says which to install.
set -eu
cd "$(dirname "$0")/.."
. deploy/environment.sh

make_venv "$venv"
install_project test

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

# The live page is looked at in a real browser, whose package needs the libraries that come with it.
have chromium || apt_install chromium || fail "chromium is needed: run 'apt-get install chromium' as root"

exec "$python" -m pytest "$@"
