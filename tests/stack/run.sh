#!/bin/sh
# Builds the image from the Dockerfile and starts the services of docker-compose.yml, except Grafana, in real
# containers. Then runs the checks that README.md in this folder lists. Takes about two minutes. Needs root on Debian,
# 2 GB of disk, and the network for Debian's and Python's packages. Leaves nothing behind.
set -eu
cd "$(dirname "$0")/../.."
. deploy/environment.sh

[ "$(id -u)" -eq 0 ] || fail "the test creates containers and network namespaces: run it as root"
missing=
while read -r file package; do
    have "$file" || [ -e "$file" ] || missing="$missing $package"
done <<END
podman podman
runc runc
catatonit catatonit
/usr/lib/podman/netavark netavark
/usr/lib/podman/aardvark-dns aardvark-dns
iptables iptables
nft nftables
mmdebstrap mmdebstrap
ip iproute2
python3 python3
END
# shellcheck disable=SC2086 # one word a package
[ -z "$missing" ] || apt_install $missing || fail "install these packages:$missing"

work=$(mktemp -d "${TMPDIR:-/tmp}/gpumem-stack.XXXXXX")
service=
finish() {
    trap - EXIT INT TERM
    [ -z "$service" ] || kill "$service" 2>/dev/null || true
    "$work/podman" rm --all --force --time 1 >/dev/null 2>&1 || true
    "$work/podman" image umount --all >/dev/null 2>&1 || true
    umount "$work/root/overlay" 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 1' INT TERM

# A separate store of podman. runc and cgroupfs work without systemd.
cat >"$work/build.conf" <<END
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
netns = "host"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
network_config_dir = "$work/networks"
END
grep -v '^netns' "$work/build.conf" >"$work/run.conf"
cat >"$work/podman" <<END
#!/bin/sh
exec podman --root "$work/root" --runroot "$work/runroot" --storage-driver overlay "\$@"
END
chmod +x "$work/podman"
export CONTAINERS_CONF="$work/build.conf" DOCKER_HOST="unix://$work/podman.sock" DOCKER_BUILDKIT=0

# quietly COMMAND…: prints the output only if the command fails.
quietly() { "$@" >"$work/log" 2>&1 || { cat "$work/log" >&2; fail "failed: $*"; }; }

# The stand-in has the name of the Dockerfile's base, without the digest.
base=$(sed -n 's/^ARG PYTHON_IMAGE=\(.*\)@.*/\1/p' Dockerfile)
export PYTHON_IMAGE="$base"
say "making the stand-in for $base from Debian's packages"
set -- --quiet --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates
authorities=/etc/ssl/certs/ca-certificates.crt
# The authorities that this machine trusts, for a proxy with its own certificate.
[ ! -e $authorities ] || set -- "$@" --customize-hook="upload $authorities $authorities"
# shellcheck disable=SC2016 # mmdebstrap says what $1 is
quietly mmdebstrap "$@" --customize-hook='ln -s python3 "$1/usr/bin/python"' "${base##*-}" "$work/python.tar"
quietly "$work/podman" import -c 'CMD ["python3"]' -c "ENV PIP_CERT=$authorities" "$work/python.tar" \
    "docker.io/library/$base"
rm "$work/python.tar"

# The images have the names of docker-compose.yml.
for name in prometheus alertmanager compose; do
    image=$(sed -n "s|^ *image: .*:-\(prom/$name:.*\)}|\1|p" docker-compose.yml)
    say "making the stand-in for ${image:-$name}"
    quietly "$work/podman" build --pull=never --network host --format docker --build-arg "BASE=$base" --target "$name" \
        --tag "docker.io/${image:-gpumem-stack/$name}" --file tests/stack/Containerfile tests/stack
done
mounted=$("$work/podman" image mount docker.io/gpumem-stack/compose)
cp -L "$mounted/usr/bin/docker-compose" "$work/docker-compose"
"$work/podman" image umount docker.io/gpumem-stack/compose >/dev/null

say "docker compose --profile demo build: the project's own Dockerfile, on that stand-in"
"$work/podman" system service --time 0 "$DOCKER_HOST" >"$work/service.log" 2>&1 &
service=$!
for _ in 1 2 3 4 5 6 7 8 9 10; do [ -S "$work/podman.sock" ] || sleep 0.5; done
quietly "$work/docker-compose" --profile demo build
kill "$service" 2>/dev/null || true
wait "$service" || true
service=

# A separate network namespace, with free ports and without the machine's firewall.
export CONTAINERS_CONF="$work/run.conf"
unshare --net --mount --propagation private python3 tests/stack/checks.py "$work"
