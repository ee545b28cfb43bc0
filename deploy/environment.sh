# shellcheck shell=sh
# How the entry scripts come by Python, by this project in a virtual environment, and by the tools that the tests use.
# Sourced, never run; the caller has gone to the repository's root. Needs sh, coreutils and, at least, python3.
#
# Environment: GPUMEM_VENV, where the virtual environment is or goes (default .venv);
#              PYTHON, the interpreter that makes it (default python3).

venv=${GPUMEM_VENV:-.venv}
python=$venv/bin/python
tools=.cache/tools

say() { printf 'gpumem: %s\n' "$*" >&2; }
fail() { say "$@" && exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

# apt_install PACKAGE...: from the system's packages; false where that is not for us to do.
apt_install() {
    [ "$(id -u)" -eq 0 ] && have apt-get || return 1
    say "installing system packages: $*"
    # A stale or partly failing list is no reason to stop: the install below says what is really missing.
    apt-get -qq update >&2 || true
    if ! output=$(DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" 2>&1); then
        printf '%s\n' "$output" >&2
        return 1
    fi
}

# can_run PYTHON: it starts, and is new enough.
can_run() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

# make_venv DIRECTORY: a virtual environment, by the first way that works here; nothing where there is one already.
# The system's own Python is often externally managed (PEP 668), so nothing is ever installed into that.
make_venv() {
    can_run "$1/bin/python" && return 0
    if [ -e "$1" ] && [ ! -e "$1/pyvenv.cfg" ]; then
        fail "$1 is there and is no virtual environment: move it away, or name another place in GPUMEM_VENV"
    fi
    base=${PYTHON:-python3}
    have "$base" || apt_install python3 || fail "there is no $base: install Python 3.10 or newer, or name one in PYTHON"
    can_run "$base" || fail "$base is $("$base" --version 2>&1): Python 3.10 or newer is needed, name one in PYTHON"

    why=$("$base" -m venv --clear "$1" 2>&1) && return 0
    if have uv && uv venv --quiet --seed --clear --python "$base" "$1"; then return 0; fi
    # A pip that may not install into its own Python may still fill a folder.
    if "$base" -m pip install --quiet --target "$tools/virtualenv" --upgrade virtualenv 2>/dev/null; then
        PYTHONPATH=$tools/virtualenv "$base" -m virtualenv --quiet --clear "$1" && return 0
    fi
    apt_install python3-venv && "$base" -m venv --clear "$1" && return 0
    rm -rf "$1"
    printf '%s\n' "$why" >&2
    fail "$base cannot make a virtual environment: run 'apt-get install python3-venv' as root, and this again"
}

# install_project GROUP...: this project, editable, with these dependency groups; nothing where that has been done.
install_project() {
    stamp=$venv/.installed$(printf -- '-%s' run "$@")
    wanted="$PWD $("$python" --version) $(cksum <pyproject.toml)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return 0; fi
    say "installing gpumem-exporter into $venv${*:+, with what is needed for: $*}"
    for group in "$@"; do
        shift
        set -- "$@" --group "$group"
    done
    # uv takes a torch of several GB in half a minute where pip takes many; pip is there where uv is not.
    if [ $# -gt 0 ] && find_uv && "$uv" pip install --quiet --compile-bytecode --python "$python" "$@" --editable .; then
        :
    elif "$python" -m pip --version >/dev/null 2>&1; then
        [ $# -eq 0 ] || "$python" -m pip install --quiet --upgrade 'pip>=25.1' || fail "pip cannot be brought up to date"
        "$python" -m pip install --quiet "$@" --editable . || fail "the installation failed; the lines above say why"
    else
        fail "neither uv nor pip could install into $venv; the lines above say why"
    fi
    printf '%s\n' "$wanted" >"$stamp"
}

# find_uv: sets $uv to a uv of the environment's own, installed there if need be, or else to the system's.
find_uv() {
    uv=$venv/bin/uv
    [ -x "$uv" ] || "$python" -m pip install --quiet uv 2>/dev/null || uv=$(command -v uv)
}

# debian_tool COMMAND PACKAGE: has COMMAND on PATH, if need be taken out of Debian's PACKAGE and kept in $tools.
# Not installed: the package would also start its service on the machine.
debian_tool() {
    have "$1" && return 0
    if have apt-get && have dpkg-deb; then
        say "fetching $1 from Debian's package $2 into $tools"
        mkdir -p "$tools" && (
            cd "$tools" || exit 1
            rm -f ./*.deb
            apt-get -qq -o APT::Sandbox::User=root download "$2" >/dev/null 2>&1 || {
                [ "$(id -u)" -eq 0 ] && apt-get -qq update >&2
                apt-get -qq -o APT::Sandbox::User=root download "$2" >&2
            } && for package in ./*.deb; do dpkg-deb --extract "$package" .; done
            rm -f ./*.deb
        )
    fi
    have "$1"
}
