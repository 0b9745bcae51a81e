"""Runs programs that a model wrote, away from the network and the files of the user.

A program may do whatever the user could. Here it runs in namespaces of Linux, which the program
unshare of util-linux makes without rights of an administrator: without a network, with processes of
its own, and with no files but those of the system and of Python, read-only, and an empty /tmp. Its
memory, its processor time, its number of processes and the size of its files are limited. This
keeps off accidents and most malice, but not a fault in the kernel.
"""

import concurrent.futures
import contextlib
import functools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from paxlite.core.errors import UserError

_MEMORY = 2 << 30  # bytes of a process
_FILE = 16 << 20  # bytes
_PROCESSES = 64
_OUTPUT = 2000  # last bytes of what a program says that are read
_TRIAL_SECONDS = 60.0
# $1 to $4 are the folders of Python. A mount in one of them that cannot be made read-only is
# covered. The program is root in its namespace, and loses what that allows, so that it cannot undo
# this. This shell stays the first process there, with which all others end.
_SETUP = r"""
set -e
mount -t tmpfs -o size=1m,nr_inodes=4k none /mnt
for place in /usr /bin /sbin /lib /lib32 /lib64 /libx32 /etc "$1" "$2" "$3" "$4"; do
  if [ -e "$place" ] && [ ! -e "/mnt$place" ]; then
    mkdir -p "/mnt$(dirname "$place")"
    if [ -L "$place" ]; then
      cp -P "$place" "/mnt$place"
    else
      mkdir -p "/mnt$place"
      mount --rbind "$place" "/mnt$place"
    fi
  fi
done
mkdir -p /mnt/tmp /mnt/proc /mnt/dev
mount --rbind /proc /mnt/proc
for device in null zero random urandom; do
  touch "/mnt/dev/$device"
  mount --bind "/dev/$device" "/mnt/dev/$device"
done
mount -t tmpfs -o size=64m,nr_inodes=4k none /mnt/tmp
cut -d ' ' -f 5 /proc/self/mountinfo | while read -r escaped; do
  case $escaped in *\\134*) exit 1 ;; esac
  place=$(printf '%b' "$escaped")
  case $place in
    /mnt/tmp|/mnt/dev/*) ;;
    /mnt|/mnt/*) if mountpoint -q "$place"; then
      mount -o remount,bind,ro "$place" 2>/dev/null || mount -t tmpfs -o ro none "$place"
    fi ;;
  esac
done
shift 4
cd /
set +e
chroot /mnt setpriv --no-new-privs --bounding-set=-all --inh-caps=-all prlimit "$@"
exit $?
"""
# An exit in the program is no success: what is told comes after its last line.
_RUNNER = """
import os, sys
source, told = sys.stdin.buffer.read(), os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
exec(compile(source, 'program', 'exec'), {'__name__': '__main__'})
os.write(told, b'done')
"""


@functools.cache
def check() -> None:
  """Raises UserError if programs cannot be run here."""
  reason = CodeSandbox(_TRIAL_SECONDS).failure('')
  if reason is not None:
    raise UserError(
      'the programs of a model run in namespaces of Linux, without network and with read-only '
      f'files, and that is not possible here: {reason}. Use a machine where `unshare --user '
      '--map-root-user --mount --net true` works, or write the answers with --output and test '
      'them where nothing can be harmed'
    )


class CodeSandbox:
  """Runs programs of Python.

  Args:
    seconds: The most seconds of a program.
  """

  def __init__(self, seconds: float):
    self._seconds = seconds

  def failures(self, programs: Sequence[str]) -> list[str | None]:
    """Returns for each program what `failure` does; as many run at a time as there are CPUs."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as threads:
      return list(threads.map(self.failure, programs))

  def failure(self, program: str) -> str | None:
    """Returns why a program failed, its last line of output; None: it ran to its last line."""
    unshare = shutil.which('unshare')
    if unshare is None:
      return 'there is no program unshare'
    limits = [
      f'--as={_MEMORY}', f'--fsize={_FILE}', f'--nproc={_PROCESSES}', '--core=0',
      f'--cpu={int(self._seconds) + 1}',
    ]  # fmt: skip
    spaces = ['--user', '--map-root-user', '--mount', '--net', '--pid', '--ipc', '--uts']
    found = pathlib.Path(sys.executable).resolve().parents[1]
    folders = [sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix), str(found)]
    with (
      tempfile.TemporaryFile() as source,
      tempfile.TemporaryFile() as told,
      tempfile.TemporaryFile() as said,
    ):
      source.write(program.encode(errors='replace'))
      source.seek(0)
      process = subprocess.Popen(
        [unshare, *spaces, '--fork', '--kill-child', '--mount-proc', 'sh', '-c', _SETUP, 'sh',
         *folders, *limits, sys.executable, '-I', '-c', _RUNNER],
        stdin=source, stdout=told, stderr=said, cwd='/',
        env={'PATH': f'{os.environ.get("PATH", "")}:/usr/sbin:/sbin', 'HOME': '/tmp'},
        start_new_session=True,
      )  # fmt: skip
      try:
        status = process.wait(self._seconds)
      except subprocess.TimeoutExpired:
        return f'it was not done after {self._seconds:g} seconds'
      finally:
        with contextlib.suppress(ProcessLookupError):
          os.killpg(process.pid, signal.SIGKILL)
        process.wait()
      told.seek(0)
      if status == 0:
        return None if told.read() == b'done' else 'it ended before its last line'
      said.seek(max(0, said.seek(0, os.SEEK_END) - _OUTPUT))
      lines = said.read().decode(errors='replace').strip().splitlines()
    return (lines or [f'it ended with the status {status}'])[-1]
