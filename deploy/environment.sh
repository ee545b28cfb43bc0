# shellcheck shell=sh
# Functions of the entry scripts: find Python, install this project into a virtual environment, and fetch the tools of the
# tests. Sourced from the repository's root, never run. Needs sh, coreutils and python3.
#
# Environment: GPUMEM_VENV, the folder of the virtual environment (default .venv);
#              PYTHON, the interpreter that creates it (default python3).

venv=${GPUMEM_VENV:-.venv}
python=$venv/bin/python
tools=.cache/tools
packages="--editable ./client --editable ./toolkit --editable ."

say() { printf 'gpumem: %s\n' "$*" >&2; }
fail() { say "$@" && exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

# apt_install PACKAGE...: installs system packages; false without root or apt-get.
apt_install() {
    [ "$(id -u)" -eq 0 ] && have apt-get || return 1
    say "installing system packages: $*"
    # A failing update does not matter: the install below reports what is missing.
    apt-get -qq update >&2 || true
    if ! output=$(DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" 2>&1); then
        printf '%s\n' "$output" >&2
        return 1
    fi
}

# can_run PYTHON: whether it starts and is new enough.
can_run() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

# make_venv DIRECTORY: creates a virtual environment with the first method that works; does nothing if there is one.
# Nothing is installed into the system's Python, which is often externally managed (PEP 668).
make_venv() {
    can_run "$1/bin/python" && return 0
    if [ -e "$1" ] && [ ! -e "$1/pyvenv.cfg" ]; then
        fail "$1 exists and is not a virtual environment: move it away, or set another folder in GPUMEM_VENV"
    fi
    base=${PYTHON:-python3}
    have "$base" || apt_install python3 || fail "$base is not installed: install Python 3.10 or newer, or set one in PYTHON"
    can_run "$base" || fail "$base is $("$base" --version 2>&1): Python 3.10 or newer is needed; set one in PYTHON"

    why=$("$base" -m venv --clear "$1" 2>&1) && return 0
    if have uv && uv venv --quiet --seed --clear --python "$base" "$1"; then return 0; fi
    # A pip that cannot install into its own Python can still install into a folder.
    if "$base" -m pip install --quiet --target "$tools/virtualenv" --upgrade virtualenv 2>/dev/null; then
        PYTHONPATH=$tools/virtualenv "$base" -m virtualenv --quiet --clear "$1" && return 0
    fi
    apt_install python3-venv && "$base" -m venv --clear "$1" && return 0
    rm -rf "$1"
    printf '%s\n' "$why" >&2
    fail "$base cannot create a virtual environment: run 'apt-get install python3-venv' as root, then run this again"
}

# install_project GROUP...: installs the three packages, editable, with these dependency groups, unless that was done before.
install_project() {
    stamp=$venv/.installed$(printf -- '-%s' run "$@")
    wanted="$PWD $("$python" --version) $(cat pyproject.toml client/pyproject.toml toolkit/pyproject.toml | cksum)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return 0; fi
    say "installing the three packages into $venv${*:+ with the dependency groups: $*}"
    for group in "$@"; do
        shift
        set -- "$@" --group "$group"
    done
    # uv installs torch, several GB, in half a minute; pip takes minutes and is the fallback.
    if [ $# -gt 0 ] && find_uv && "$uv" pip install --quiet --compile-bytecode --python "$python" "$@" $packages; then
        :
    elif "$python" -m pip --version >/dev/null 2>&1; then
        [ $# -eq 0 ] || "$python" -m pip install --quiet --upgrade 'pip>=25.1' || fail "pip cannot be updated"
        pip_install "$@" $packages || fail "the installation failed; see the lines above"
    else
        fail "neither uv nor pip could install into $venv; see the lines above"
    fi
    printf '%s\n' "$wanted" >"$stamp"
}

# pip_install ARGUMENT...: installs into the environment and names each package that pip fetches: that takes minutes on a
# slow connection.
pip_install() {
    failed=$venv/.pip-failed
    rm -f "$failed"
    { "$python" -m pip install --disable-pip-version-check --progress-bar off "$@" || : >"$failed"; } |
        while read -r word rest; do
            case "$word $rest" in
            Collecting*) say "    fetching ${rest%%[!A-Za-z0-9._-]*}" ;;
            "Installing collected"*) say "    installing all of them" ;;
            esac
        done
    [ ! -e "$failed" ]
}

# find_uv: sets $uv to the uv of the environment, installed there if necessary, otherwise to the system's.
find_uv() {
    uv=$venv/bin/uv
    [ -x "$uv" ] || "$python" -m pip install --quiet uv 2>/dev/null || uv=$(command -v uv)
}

# debian_tool COMMAND PACKAGE: makes COMMAND available, if necessary by extracting Debian's PACKAGE into $tools.
# The package is not installed, because that would start its service.
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
