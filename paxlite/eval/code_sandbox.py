"""Runs programs that a model wrote, away from the network and the files of the user.

A program may do whatever the user could. Here it runs in namespaces of Linux, which the program
unshare of util-linux makes without rights of an administrator: without a network, with processes of
its own, with all files read-only and an empty /tmp. Its memory, its processor time, its number of
processes and the size of its files are limited. It can read the user's files, and tell nobody. This
keeps off accidents and most malice, but not a fault in the kernel.
"""

import concurrent.futures
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from paxlite.core.errors import UserError

_MEMORY = 2 << 30  # bytes
_FILE = 16 << 20  # bytes
_PROCESSES = 64
_OUTPUT = 2000  # last bytes of what a program says that are read
# A mount that cannot be made read-only, as one that its owner has locked, is covered. The program
# is root in its namespace, and loses what that allows, so that it cannot undo this.
_SETUP = """
set -e
mount --rbind / /mnt
mount -t tmpfs none /mnt/sys
mount -t tmpfs none /mnt/tmp
mount -o remount,bind,ro /mnt
cut -d ' ' -f 5 /proc/self/mountinfo | while read -r place; do
  case $place in
    /mnt/tmp|/mnt/sys/*) ;;
    /mnt/*) if [ -e "$place" ]; then
      mount -o remount,bind,ro "$place" 2>/dev/null || mount -t tmpfs none "$place"
    fi ;;
  esac
done
cd /
exec chroot /mnt setpriv --no-new-privs --bounding-set=-all --inh-caps=-all \\
  prlimit "$@"
"""


class CodeSandbox:
  """Runs programs of Python.

  Args:
    seconds: The most seconds of a program.

  Raises:
    UserError: The system has no such namespaces.
  """

  def __init__(self, seconds: float):
    self._seconds = seconds
    reason = self.failure('')
    if reason is not None:
      raise UserError(
        'the programs of a model run in namespaces of Linux, without network and with read-only '
        f'files, and they cannot be made here: {reason}. Use a machine where `unshare --user '
        '--map-root-user --mount --net true` works, or write the answers with --output and test '
        'them where nothing can be harmed'
      )

  def failures(self, programs: Sequence[str]) -> list[str | None]:
    """Returns for each program what `failure` does; as many run at a time as there are CPUs."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as threads:
      return list(threads.map(self.failure, programs))

  def failure(self, program: str) -> str | None:
    """Returns why a program failed, its last line of output; None: it ended with status 0."""
    unshare = shutil.which('unshare')
    if unshare is None:
      return 'there is no program unshare'
    spaces = ['--user', '--map-root-user', '--mount', '--net', '--pid', '--ipc', '--uts']
    command = [unshare, *spaces, '--fork', '--kill-child', '--mount-proc', 'sh', '-c', _SETUP, 'sh']
    limits = [
      f'--as={_MEMORY}',
      f'--fsize={_FILE}',
      f'--nproc={_PROCESSES}',
      f'--cpu={int(self._seconds) + 1}',
      '--core=0',
    ]
    with tempfile.TemporaryFile() as said:
      process = subprocess.Popen(
        [*command, *limits, sys.executable, '-I', '-c', program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=said,
        cwd='/',
        env={'PATH': os.environ.get('PATH', ''), 'HOME': '/tmp'},
        start_new_session=True,
      )
      try:
        status = process.wait(self._seconds)
      except subprocess.TimeoutExpired:
        return f'it was not done after {self._seconds:g} seconds'
      finally:
        with contextlib.suppress(ProcessLookupError):
          os.killpg(process.pid, signal.SIGKILL)
        process.wait()
      said.seek(max(0, said.seek(0, os.SEEK_END) - _OUTPUT))
      lines = said.read().decode(errors='replace').strip().splitlines()
    return None if status == 0 else (lines or [f'it ended with the status {status}'])[-1]
