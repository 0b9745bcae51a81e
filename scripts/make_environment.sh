#!/bin/sh
# make_environment.sh FOLDER [PYTHON]: makes an environment in a folder, of this Python, or of the
# first that find_python.sh finds. One that is there is kept if it is of this Python, or, without
# PYTHON, of any that paxlite can be installed with; otherwise it is made anew. A folder that holds
# something else is refused. The Makefile calls it.

folder=$1
here=${0%/*}
own=$folder/bin/python
version='import sys; print(sys.version)'

if [ -e "$folder" ] && [ ! -f "$folder/pyvenv.cfg" ] && [ -n "$(ls -A "$folder")" ]; then
  echo "VENV=$folder is no environment of Python and not empty: give another folder" >&2
  exit 1
fi
if [ -z "${2:-}" ] && sh "$here/find_python.sh" "$own" >/dev/null 2>&1 &&
  "$own" -c 'import pip' 2>/dev/null; then
  exit 0
fi
python=$(sh "$here/find_python.sh" "${2:-}") || exit 1
if [ "$("$own" -c "import pip; $version" 2>/dev/null)" = "$("$python" -c "$version")" ]; then
  exit 0
fi
exec "$python" -m venv --clear "$folder"
