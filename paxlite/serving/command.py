"""paxlite serve CHECKPOINT [--port=8000] [--host=127.0.0.1] [NAME=VALUE …]

Serves OpenAI's API (/v1/chat/completions, /v1/completions, /v1/models) and a chat page at /.
CHECKPOINT is a run folder or imported weights. The server listens on this machine alone unless
--host is set. On SIGTERM or Ctrl-C it refuses new requests, finishes the others and ends. Needs the
extra serve. With --train, the clients of the package tinker train adapters of their own instead,
which --folder keeps; needs the extra tinker.

Examples:
  paxlite serve weights/smollm --port=8000
  paxlite serve weights/smollm --train --folder=adapters
"""

import argparse
import concurrent.futures
import contextlib
import ipaddress
import os
import pathlib
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from paxlite import extensions
from paxlite.cli.parser import Parser, local, stored
from paxlite.cli.terminal import say, warn
from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.files.text_files import read_text
from paxlite.generation.checkpoint_options import add_weights

if TYPE_CHECKING:
  from paxlite.serving.application import Served

_KEY = 'PAXLITE_API_KEY'

PARSER = Parser(__doc__)
PARSER.word('checkpoint', 'CHECKPOINT', 'run folder, or imported weights', stored)
PARSER.option('--host', 'address to listen on (127.0.0.1)', default='127.0.0.1')
PARSER.option('--port', '0: a free one (8000)', int, default=8000)
PARSER.option('--name', 'model name in requests (the last part of CHECKPOINT)')
PARSER.option('--api_key', argparse.SUPPRESS)
PARSER.option('--api_key_file', f'file with the key of clients (variable {_KEY})', local)
PARSER.option('--allowed_hosts', 'further server names, NAME,NAME', default='',
              metavar='NAMES')  # fmt: skip
PARSER.option('--allow_special_tokens', 'in messages, not as ordinary text', bool)
PARSER.option('--page', 'chat page at /', bool, default=True)
PARSER.option('--train', 'an API for training clients, instead of the others', bool)
PARSER.option('--folder', 'saved adapters of training clients', local)
PARSER.option('--most_rows', 'answers at a time (DECODE_BATCH_SIZE)', int)
PARSER.option('--most_waiting', 'queued requests (256)', int, default=256)
PARSER.option('--max_tokens', 'maximum new tokens per answer (as many as fit)', int)
PARSER.option('--timeout', 'seconds per request (600)', float,
              default=600.0)  # fmt: skip
PARSER.option('--drafts', 'speculative decoding', bool)
PARSER.option('--grace', 'seconds to finish answers after SIGTERM (30)', float, default=30.0)
add_weights(PARSER)


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)
  for name, least in (('most_waiting', 0), ('max_tokens', 1), ('timeout', 0), ('grace', 0)):
    if getattr(args, name) is not None and getattr(args, name) < least:
      raise UserError(f'--{name}={getattr(args, name):g} must be at least {least}')
  if args.most_rows is not None and args.most_rows < 1:
    raise UserError(f'--most_rows={args.most_rows} must be at least 1')
  if args.train and (args.folder is None or args.drafts or args.allow_special_tokens):
    raise UserError(
      '--train needs --folder=FOLDER, where clients save adapters, and has neither --drafts nor '
      '--allow_special_tokens'
    )
  if args.folder is not None and not args.train:
    raise UserError('--folder keeps the adapters of training clients: it needs --train')
  key = _key(args)
  try:
    import starlette  # noqa: F401
    import uvicorn
  except ImportError as e:
    raise UserError(f'a server needs more packages ({e}): {shell.install("serve")}') from None
  if args.dtype is not None:
    args.attributes['FPROP_DTYPE'] = args.dtype
  from paxlite.serving.gate import LOOPBACK, allowed_host

  more = [allowed_host(host.strip()) for host in args.allowed_hosts.split(',') if host.strip()]
  with _bound(args.host, args.port) as place:  # before the weights are read
    from paxlite.compilation import cache
    from paxlite.serving.connections import protocol
    from paxlite.serving.freed_memory import return_regularly

    is_local = ipaddress.ip_address(place.getsockname()[0]).is_loopback
    hosts = [*LOOPBACK, args.host, *more] if is_local or more else []
    if not key and not is_local:
      warn(f'{args.host} is open to other machines, but no key is set: set {_KEY}')
    cache.enable()
    name = args.name or pathlib.PurePosixPath(args.checkpoint.rstrip('/')).name
    with _ending_in_order():
      make = extensions.hook('serve --train') if args.train else _answering
      served = make(args, name, key, hosts)
    host, port = place.getsockname()[:2]
    with _own_port(args.host, args.port):
      place.listen(2048)  # until now connections are refused: no client waits for the programs
    served.start()
    return_regularly()
    say(f'{name} answers at http://{host}:{port}{served.address}')
    if args.page and not args.train:
      say(f'A chat with it is at http://{host}:{port}/')
    config = uvicorn.Config(
      served.application, log_level='warning', lifespan='off', access_log=False,
      timeout_graceful_shutdown=args.grace, http=protocol(),
    )  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, lambda *_: None)  # uvicorn sends what it was sent once more at its end
    signal.set_wakeup_fd(-1)  # --grace says how long the last answers may take
    uvicorn.Server(config).run(sockets=[place])
    served.stop()


def _answering(args: argparse.Namespace, name: str, key: str, hosts: Sequence[str]) -> 'Served':
  """Returns OpenAI's API."""
  from paxlite.generation.inference import load_checkpoint
  from paxlite.generation.warm_up import warm_up
  from paxlite.serving.api import Api
  from paxlite.serving.application import Served
  from paxlite.serving.bodies import Bodies, RequestLimits
  from paxlite.serving.worker import Worker

  given = args.tokenizer, args.attributes, args.base_weights
  inference = load_checkpoint(args.checkpoint, *given)
  engine = inference.engine(most_rows=args.most_rows, steady=True, drafts=args.drafts)
  started = time.perf_counter()
  warn('Compiling the programs for requests, which takes a minute or more the first time')
  # in a thread, because signals are not handled while a program is compiled
  concurrent.futures.ThreadPoolExecutor(1).submit(warm_up, engine).result()
  warn(f'Compiled the programs for requests in {time.perf_counter() - started:.1f} s')
  worker = Worker(engine, args.most_waiting)
  most = min(args.max_tokens or inference.max_length, inference.max_length - 1)
  bodies = Bodies(inference, RequestLimits(most), special=args.allow_special_tokens)
  api = Api(worker, bodies, inference.tokenizer, name, args.timeout, key, hosts, args.page)
  return Served(api.application, worker.start, worker.stop, '/v1')


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
  """A context in which SIGTERM and Ctrl-C end the process with code 0, as they do later."""
  try:
    yield
  except (KeyboardInterrupt, SystemExit):
    warn('Told to stop before the first request: nothing was lost')
    os._exit(0)  # a program may still be compiled


def _key(args: argparse.Namespace) -> str:
  """Returns the API key that clients must send; '' if there is none."""
  if args.api_key is not None:
    raise UserError(
      f'--api_key would show the key in the process list: set {_KEY}, or --api_key_file=FILE'
    )
  if args.api_key_file is None:
    return os.environ.get(_KEY, '')
  key = read_text(args.api_key_file).strip()
  if not key:
    raise UserError(f'--api_key_file={args.api_key_file} is empty')
  return key


def _bound(host: str, port: int) -> socket.socket:
  """Returns a socket that has the port and does not listen yet; raises UserError if it is taken."""
  with _own_port(host, port):
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    place = socket.socket(family, socket.SOCK_STREAM)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind((host, port))
  return place


@contextlib.contextmanager
def _own_port(host: str, port: int) -> Iterator[None]:
  try:
    yield
  except (OSError, OverflowError) as e:
    raise UserError(
      f'--host={host} --port={port}: cannot listen there ({e}). --port=0 takes a free port'
    ) from None
