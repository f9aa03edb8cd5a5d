"""A built-in graph: some sixty short builds in the shape of a small distribution.

It has what real graphs have: downloads that everything waits for, a bootstrap that is a chain,
a wide middle of diamonds, a build that needs a feature, and one root that needs it all. The
builder is the shell; each build checks that its inputs are there, sleeps and writes one line,
so that the graph takes about fifteen seconds on six slots whatever the machine.
"""

from __future__ import annotations

from actors.graph.storepath import short_hash
from transport.messages import SubmittedJob

BIG_FEATURE = "big-parallel"
_BIG = frozenset({"llvm-17.0.6", "linux-6.6.30"})
_STORE = "/nix/store"
_SCRIPT = """\
echo "building $name"
if test -n "$history"; then echo "$name" >> "$history"; fi
for input in $inputs; do
  test -e "$input" || { echo "input $input is missing" >&2; exit 1; }
done
sleep $seconds
echo "$name" > "$out"
"""

# name, seconds, names of the inputs
_BUILDS: tuple[tuple[str, float, str], ...] = (
    ("bootstrap-tools", 0.4, ""),
    ("binutils-2.41.tar.bz2", 0.3, ""),
    ("gcc-13.2.0.tar.xz", 0.5, ""),
    ("glibc-2.38.tar.xz", 0.3, ""),
    ("linux-6.6.30.tar.xz", 0.6, ""),
    ("llvm-17.0.6.src.tar.xz", 0.5, ""),
    ("Python-3.11.9.tar.xz", 0.3, ""),
    ("perl-5.38.2.tar.gz", 0.3, ""),
    ("openssl-3.0.13.tar.gz", 0.2, ""),
    ("zlib-1.3.1.tar.gz", 0.2, ""),
    ("curl-8.7.1.tar.xz", 0.2, ""),
    ("sqlite-3.45.2.tar.gz", 0.2, ""),
    ("nginx-1.24.0.tar.gz", 0.2, ""),
    ("postgresql-15.7.tar.bz2", 0.3, ""),
    ("git-2.44.1.tar.xz", 0.2, ""),
    ("bootstrap-stage1-stdenv", 0.3, "bootstrap-tools"),
    ("binutils-2.41", 0.7, "bootstrap-stage1-stdenv binutils-2.41.tar.bz2"),
    ("glibc-2.38", 0.9, "bootstrap-stage1-stdenv glibc-2.38.tar.xz"),
    ("gcc-13.2.0", 1.4, "binutils-2.41 glibc-2.38 gcc-13.2.0.tar.xz"),
    ("stdenv-linux", 0.2, "gcc-13.2.0 binutils-2.41 glibc-2.38"),
    ("hello-2.12.1", 0.4, "stdenv-linux"),
    ("pkg-config-0.29.2", 0.5, "stdenv-linux"),
    ("perl-5.38.2", 1.3, "stdenv-linux perl-5.38.2.tar.gz"),
    ("zlib-1.3.1", 0.5, "stdenv-linux zlib-1.3.1.tar.gz"),
    ("bzip2-1.0.8", 0.4, "stdenv-linux"),
    ("xz-5.4.6", 0.6, "stdenv-linux"),
    ("ncurses-6.4", 0.8, "stdenv-linux pkg-config-0.29.2"),
    ("readline-8.2", 0.6, "stdenv-linux ncurses-6.4"),
    ("libffi-3.4.6", 0.5, "stdenv-linux"),
    ("expat-2.6.2", 0.5, "stdenv-linux"),
    ("gmp-6.3.0", 0.9, "stdenv-linux"),
    ("pcre2-10.43", 0.7, "stdenv-linux"),
    ("openssl-3.0.13", 1.4, "stdenv-linux perl-5.38.2 openssl-3.0.13.tar.gz"),
    ("sqlite-3.45.2", 0.9, "stdenv-linux zlib-1.3.1 readline-8.2 sqlite-3.45.2.tar.gz"),
    ("libxml2-2.12.6", 0.8, "stdenv-linux zlib-1.3.1 xz-5.4.6"),
    ("nghttp2-1.61.0", 0.6, "stdenv-linux pkg-config-0.29.2"),
    ("libssh2-1.11.0", 0.6, "stdenv-linux openssl-3.0.13 zlib-1.3.1"),
    ("curl-8.7.1", 1.0, "openssl-3.0.13 nghttp2-1.61.0 libssh2-1.11.0 curl-8.7.1.tar.xz"),
    ("python3-3.11.9", 1.6, "openssl-3.0.13 sqlite-3.45.2 libffi-3.4.6 Python-3.11.9.tar.xz"),
    ("python3.11-setuptools-69.5.1", 0.4, "python3-3.11.9"),
    ("meson-1.3.2", 0.4, "python3.11-setuptools-69.5.1"),
    ("ninja-1.11.1", 0.7, "stdenv-linux python3-3.11.9"),
    ("cmake-3.29.2", 1.5, "stdenv-linux curl-8.7.1 expat-2.6.2 xz-5.4.6"),
    ("llvm-17.0.6", 2.2, "cmake-3.29.2 ninja-1.11.1 libxml2-2.12.6 llvm-17.0.6.src.tar.xz"),
    ("linux-6.6.30", 2.4, "stdenv-linux perl-5.38.2 openssl-3.0.13 gmp-6.3.0 linux-6.6.30.tar.xz"),
    ("util-linux-2.39.4", 1.0, "stdenv-linux ncurses-6.4 pkg-config-0.29.2"),
    ("coreutils-9.5", 0.9, "stdenv-linux gmp-6.3.0"),
    ("bash-5.2", 0.8, "stdenv-linux readline-8.2"),
    ("git-2.44.1", 1.1, "curl-8.7.1 openssl-3.0.13 pcre2-10.43 expat-2.6.2 git-2.44.1.tar.xz"),
    ("nginx-1.24.0", 0.8, "openssl-3.0.13 pcre2-10.43 zlib-1.3.1 nginx-1.24.0.tar.gz"),
    ("postgresql-15.7", 1.5, "openssl-3.0.13 readline-8.2 libxml2-2.12.6 postgresql-15.7.tar.bz2"),
    ("glib-2.80.0", 1.1, "meson-1.3.2 ninja-1.11.1 libffi-3.4.6 pcre2-10.43 util-linux-2.39.4"),
    ("dbus-1.14.10", 0.7, "expat-2.6.2 pkg-config-0.29.2 stdenv-linux"),
    ("systemd-255.4", 1.6, "meson-1.3.2 ninja-1.11.1 util-linux-2.39.4 dbus-1.14.10"),
    ("nix-2.18.2", 1.2, "curl-8.7.1 sqlite-3.45.2 openssl-3.0.13 bzip2-1.0.8"),
    ("unit-nginx.service", 0.1, "nginx-1.24.0"),
    ("unit-postgresql.service", 0.1, "postgresql-15.7"),
    ("initrd-linux-6.6.30", 0.5, "linux-6.6.30 bash-5.2 systemd-255.4"),
    ("system-path", 0.3, "git-2.44.1 nix-2.18.2 hello-2.12.1 glib-2.80.0 llvm-17.0.6"),
    ("etc", 0.2, "coreutils-9.5 unit-nginx.service unit-postgresql.service"),
    ("nixos-system-demo-23.11", 0.2, "etc initrd-linux-6.6.30 system-path"),
)  # fmt: skip


def sample_graph(system: str, history: str = "") -> list[SubmittedJob]:
    """The builds, inputs first; archives are for system `builtin`, all others for `system`.

    Each run of a build appends its name as a line to the file `history`, if one is given.
    """
    return [
        _job(name, seconds, inputs.split(), system, history) for name, seconds, inputs in _BUILDS
    ]


def _job(name: str, seconds: float, inputs: list[str], system: str, history: str) -> SubmittedJob:
    is_archive = ".tar." in name
    out = _output(name)
    return SubmittedJob(
        drv_path=_drv(name),
        name=name,
        system="builtin" if is_archive else system,
        required_features=[BIG_FEATURE] if name in _BIG else [],
        outputs={"out": out},
        input_drvs=[_drv(i) for i in inputs],
        input_srcs=[],
        is_fixed_output=is_archive or None,
        builder="/bin/sh",
        args=["-c", _SCRIPT],
        env={
            "name": name,
            "out": out,
            "inputs": " ".join(_output(i) for i in inputs),
            "seconds": str(seconds),
            "history": history,
            "PATH": "/usr/bin:/bin:/run/current-system/sw/bin",
        },
    )


def _drv(name: str) -> str:
    return f"{_STORE}/{short_hash(f'headrace-sample:drv:{name}')}-{name}.drv"


def _output(name: str) -> str:
    return f"{_STORE}/{short_hash(f'headrace-sample:out:{name}')}-{name}"
