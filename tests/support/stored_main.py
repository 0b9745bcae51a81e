"""Runs paxlite.main with a lease and copies that are quick enough for tests.

KILL_AT=upload:N kills the process when it copies its Nth file to the store, KILL_AT=manifest:N
before it writes the checksums of its Nth checkpoint there, and KILL_AT=copied:N after that.
LEASE_EXPIRES=N is the number of seconds after which a lease is abandoned.
LATE_FOLDERS=1 lets the first of several processes make its folders of a checkpoint late.
"""

import itertools
import os
import signal
import sys
import time

from paxlite import main
from paxlite.stores import lease, object_store, stored_run

TIMES = lease.Times(
  renew=0.3, expires=float(os.environ.get('LEASE_EXPIRES', '3')), sure=2.0, look=0.1
)
lease.Lease.__init__.__defaults__ = (TIMES,)
lease.LeaseView.__init__.__defaults__ = (TIMES,)
stored_run._MIRROR_SECONDS = 0.3
stored_run._LOOK_SECONDS = 0.1
stored_run._PAUSE_SECONDS = 0.3
stored_run._PATIENCE = 2.0
stored_run._FINAL_SECONDS = float(os.environ.get('FINAL_SECONDS', '60'))


def kill() -> None:
  os.kill(os.getpid(), signal.SIGKILL)


moment, _, number = os.environ.get('KILL_AT', '').partition(':')
if moment == 'upload':
  upload, uploads = object_store.ObjectStore.upload, itertools.count(1)

  def upload_or_die(self, *args):
    if next(uploads) == int(number):
      kill()
    upload(self, *args)

  object_store.ObjectStore.upload = upload_or_die
elif moment in ('manifest', 'copied'):
  create, manifests = object_store.ObjectStore.create, itertools.count(1)

  def create_or_die(self, key, content):
    is_it = key.endswith('checksums.json') and next(manifests) == int(number)
    if is_it and moment == 'manifest':
      kill()
    tag = create(self, key, content)
    if is_it:
      kill()
    return tag

  object_store.ObjectStore.create = create_or_die

if os.environ.get('LATE_FOLDERS') and '--host_idx=0' in sys.argv:
  mkdir = os.mkdir

  def mkdir_late(path, *args, **kwargs):
    if 'orbax-checkpoint-tmp' in str(path):
      time.sleep(1)
    mkdir(path, *args, **kwargs)

  os.mkdir = mkdir_late

if __name__ == '__main__':
  sys.exit(main.main(sys.argv))
