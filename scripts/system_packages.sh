#!/bin/sh
# Makes sure that the operating system has what pip cannot bring: venv support and the shared libpython.
# Usage: system_packages.sh PYTHON. Installs as root on Debian and Ubuntu; else prints the one command to run.
python=$1
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || exit 1
missing=""
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing="python$version-venv"
"$python" - <<'END' || missing="$missing libpython$version"
import pathlib, sys, sysconfig
name = "libpython%d.%d.so.1.0" % sys.version_info[:2]
folders = [sysconfig.get_config_var("LIBDIR") or "", "/usr/lib", "/usr/local/lib"]
folders.append("/usr/lib/" + (sysconfig.get_config_var("MULTIARCH") or ""))
sys.exit(not any(folder and (pathlib.Path(folder) / name).exists() for folder in folders))
END
[ -z "$missing" ] && exit 0
install="apt-get install -y --no-install-recommends $missing"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing$([ "${missing# }" = "$missing" ] && echo ' ')$missing"
    DEBIAN_FRONTEND=noninteractive sh -c "$install || (apt-get update && $install)" && exit 0
fi
echo "Missing system packages. Run: sudo $install" >&2
exit 1
