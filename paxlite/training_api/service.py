"""Starts the training API of `paxlite serve --train`."""

import argparse
import pathlib
from collections.abc import Collection

from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.serving.application import Served


def service(args: argparse.Namespace, name: str, key: str, hosts: Collection[str]) -> Served:
  """Returns the API.

  Args:
    args: The arguments of `paxlite serve`.
    name: What clients call the base model.
    key: What clients must send; '': nothing.
    hosts: See serving.gate.RequestGate.

  Raises:
    UserError: A package is missing, the key or the folder is unusable, or the model is.
  """
  try:
    import google.protobuf  # noqa: F401
  except ImportError as e:
    raise UserError(f'--train needs more packages ({e}): {shell.install("tinker")}') from None
  if key and not key.startswith('tml-'):
    raise UserError("with --train the key must begin with tml-: tinker's client sends no other one")
  folder = pathlib.Path(args.folder).absolute()
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise UserError(f'--folder={args.folder} cannot be made: {e.strerror or e}') from None
  from paxlite.training_api.adapted_model import load_base
  from paxlite.training_api.api import TrainingApi
  from paxlite.training_api.device import Device
  from paxlite.training_api.sessions import Sessions

  base = load_base(args.checkpoint, args.tokenizer, args.attributes, args.base_weights)
  device = Device(base, folder, args.most_rows)
  sessions = Sessions(device, args.most_waiting, args.timeout)
  most = min(args.max_tokens or base.max_length, base.max_length - 1)
  api = TrainingApi(sessions, name, most, key, hosts)
  return Served(api.application, lambda: None, device.stop, '')
