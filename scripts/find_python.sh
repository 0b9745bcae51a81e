#!/bin/sh
# find_python.sh [PYTHON]: prints the path of a Python that paxlite can be installed with, which is
# CPython 3.12 or newer with venv and pip. Without an argument it looks for the commands python3.12,
# python3.13, python3.14 and python3, and then among what pyenv and uv have installed. Each one is
# run, because `python3.12` may be a shim of pyenv that fails. Where there is none, one line says
# what to install, and the exit code is 1. The Makefile calls it.

check='import ensurepip, sys, sysconfig, venv
sys.exit(not (
  sys.implementation.name == "cpython"
  and sys.version_info >= (3, 12)
  and not sysconfig.get_config_var("Py_GIL_DISABLED")  # paxlite needs packages without such wheels
))'

works() {
  if "$1" -c "$check" >/dev/null 2>&1; then command -v "$1"; else return 1; fi
}

if [ -n "${1:-}" ]; then
  if works "$1"; then exit 0; fi
  echo "PYTHON=$1 is not a Python that works, is 3.12 or newer, and has venv: give the path of" \
    "one, or leave PYTHON out" >&2
  exit 1
fi
pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
uv=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}
for python in python3.12 python3.13 python3.14 python3 \
  "$pyenv"/3.1[2-9].*/bin/python3 "$uv"/cpython-3.1[2-9].*/bin/python3; do
  if works "$python"; then exit 0; fi
done
echo "paxlite needs Python 3.12 or newer, and none was found. Install one (Debian 13," \
  "Ubuntu 24.04: apt-get install python3 python3-venv; anywhere: uv python install 3.12), or" \
  "give the path of yours: make PYTHON=/path/to/python3" >&2
exit 1
