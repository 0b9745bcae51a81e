"""Copies on this machine of checkpoints in object stores, to restore weights or runs from."""

import contextlib
import pathlib

from paxlite.checkpointing.checksums import CHECKSUMS, folder_name, step_of
from paxlite.checkpointing.step_copies import StepCopies
from paxlite.core.errors import AbsentError, UserError
from paxlite.stores.addresses import Address, is_address
from paxlite.stores.object_copies import SMALL, address_of, copy_of, place_of, reading
from paxlite.stores.object_store import ObjectStore

_METADATA = 'data/metadata'
_EXPERIMENT = 'experiment.json'


def checkpoint_folders(address: Address) -> list[pathlib.Path]:
  """Returns where the checkpoints at an address are copied to, the newest first.

  Only the files that describe them are copied; `complete` copies the others.

  Raises:
    UserError: There is none, or the store cannot be used.
  """
  with reading(address):
    store = ObjectStore.opened(address)
    store.check()
    folders, _ = store.names(address.key)
    if 'checkpoints' in folders or any(step_of(name) is not None for name in folders):
      base = address / 'checkpoints' if 'checkpoints' in folders else address
      steps = StepCopies(store, base, place_of(base)).steps()
      found = [base / folder_name(step) for step in reversed(steps)]
    else:
      found = [address] if 'state' in folders else []
  if not found:
    raise UserError(
      f'{address} holds no weights: neither checkpoints/ of a run nor state/ of imported ones'
    )
  for each in found:
    for name in (CHECKSUMS, _METADATA):
      with contextlib.suppress(AbsentError):  # Imported weights have no metadata.
        copy_of(each / name)
  parts = found[0].key.split('/')
  is_of_run = len(parts) > 1 and parts[-2] == 'checkpoints'
  beside = Address(address.scheme, address.bucket, '/'.join(parts[:-2])) if is_of_run else found[0]
  with contextlib.suppress(AbsentError):
    copy_of(beside, largest=SMALL, deep=False)
  return [place_of(each) for each in found]


def complete(folder: pathlib.Path) -> None:
  """Copies the files of a checkpoint that are not there yet, if `folder` is a copy.

  Raises:
    UserError: The store cannot be used, or the copies need too much space.
  """
  address = address_of(folder)
  if address is not None:
    copy_of(address)


def folder_of(run: str) -> pathlib.Path:
  """Returns the folder of a run; what is in a store is copied, without checkpoints and events.

  Raises:
    UserError: There is no run at the address, or the store cannot be used.
  """
  if not is_address(run):
    return pathlib.Path(run).expanduser().absolute()
  address = Address.parsed(run)
  copy_of(address, deep=False)
  with contextlib.suppress(AbsentError):
    copy_of(address / 'goodput')
  return place_of(address)
