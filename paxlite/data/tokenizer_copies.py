"""Copies of a tokenizer: next to weights, and in the folder of a run that was trained with it."""

import contextlib
import json
import logging
import os
import pathlib
import shutil
import tempfile
from collections.abc import Sequence

from paxlite.core.errors import AbsentError, UserError
from paxlite.core.json_text import Json, JsonObject
from paxlite.core.run_files import check_place
from paxlite.data.tokenizer import open_tokenizer, tokenizer_file, vocabulary_fingerprint
from paxlite.data.tokenizer_files import (
  CHAT_TEMPLATE,
  CONFIGURATION,
  FILES,
  JSON,
  MODEL,
  PLAIN,
  TOKENIZERS,
  TOOL_TEMPLATE,
  configuration,
  published,
)
from paxlite.files import schemes
from paxlite.files.set_aside import move_aside
from paxlite.files.text_files import check_file

log = logging.getLogger('paxlite')

KEPT = 'tokenizer'  # the folder of a run's own copy, in that of the run


def keep(path: str, run: pathlib.Path) -> None:
  """Copies a tokenizer into the folder of a run, unless the same is there.

  What is there is moved to tokenizer.before: it may be the user's, and checkpoints were trained
  with it. A process that is killed leaves a whole copy, or none.

  Raises:
    UserError: See tokenizer_files.
    OSError: The copy cannot be written.
  """
  file, target = tokenizer_file(path), run / KEPT
  with contextlib.suppress(OSError):
    if file.parent.samefile(target):  # the run continues with its own copy
      return
  beside = [file.parent / name for name in TOKENIZERS if (file.parent / name).is_file()]
  source = file.parent if file in beside[:1] else file  # not one beside it that would be read first
  with tempfile.TemporaryDirectory() as made:
    fresh = pathlib.Path(made, KEPT)
    fresh.mkdir()  # with the usual permissions, unlike a temporary folder
    copy_tokenizer(source, fresh)
    if file.suffix != '.json' and file.name != MODEL:  # only this name is read as transformers does
      (fresh / MODEL).rename(fresh / file.name)
    if _contents(fresh) == _contents(target):
      return
    check_place(run)
    for left in run.glob(f'.{KEPT}-*'):  # of a process that was killed
      shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=run, prefix=f'.{KEPT}-') as unfinished:
      whole = shutil.copytree(fresh, pathlib.Path(unfinished, KEPT))
      if os.path.lexists(target):
        log.warning('%s holds other files: moved to %s', target, move_aside(target, 'before').name)
      whole.rename(target)


def kept(run: pathlib.Path) -> pathlib.Path | None:
  """Returns the copy that `keep` has made: a file, or a folder that has two; None if there is none.

  Args:
    run: The folder of the run, or of copies of a run in an object store.
  """
  folder = run / KEPT
  with contextlib.suppress(AbsentError):
    schemes.complete(folder)
  found = [path for name in TOKENIZERS if (path := folder / name).is_file()]
  found = found or sorted(folder.glob('*.model'))
  return folder if len(found) > 1 else found[0] if found else None


def differences(path: str, other: str) -> list[str]:
  """Names what differs between two tokenizers: their tokens, the chat templates beside them."""
  files = [tokenizer_file(p) for p in (path, other)]
  tokens = [open_tokenizer(str(file)).fingerprint for file in files]
  templates = [_templates(file) for file in files]
  found = [f'the tokenizer {files[0]}'] if tokens[0] != tokens[1] else []
  return found + ([f'the chat template of {files[0]}'] if templates[0] != templates[1] else [])


def has_other_tokens(path: str, other: str) -> bool:
  """Returns whether an id is another token in one of two tokenizers than in the other."""
  opened = [open_tokenizer(p) for p in (path, other)]
  if opened[0].fingerprint == opened[1].fingerprint:
    return False
  return vocabulary_fingerprint(opened[0]) != vocabulary_fingerprint(opened[1])


def _templates(file: pathlib.Path) -> Sequence[Json | bytes]:
  beside = [file.parent / name for name in (CHAT_TEMPLATE, TOOL_TEMPLATE)]
  texts = [path.read_bytes() if path.is_file() else None for path in beside]
  return texts if texts[0] is not None else [configuration(str(file)).get('chat_template')]


def _contents(folder: pathlib.Path) -> dict[str, bytes]:
  files = [path for path in folder.rglob('*') if path.is_file()]
  return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def copy_tokenizer(source: pathlib.Path | None, folder: pathlib.Path) -> None:
  """Copies a tokenizer, with the files next to it for chats and special tokens.

  Its class, which may follow from the config.json next to it, is written into
  tokenizer_config.json, because a copy without config.json must encode texts in the same way. A
  config.json next to the copy gives one without a class a plain one, which puts BOS before a text
  only if tokenizer_config.json says so.

  Args:
    source: A tokenizer's file, or a folder that may hold a tokenizer; None copies nothing.
    folder: The folder that receives the tokenizer under its usual name.

  Raises:
    UserError: See tokenizer_files.
  """
  for name, path in tokenizer_files(source).items():
    (folder / name).parent.mkdir(exist_ok=True)
    shutil.copyfile(path, folder / name)
  if source is None:
    return
  beside = source if source.is_dir() else source.parent
  found, copied = (published(str(place / JSON)).tokenizer_class for place in (beside, folder))
  said: JsonObject = {}
  if (wanted := found or (PLAIN if copied else '')) != copied:
    said['tokenizer_class'] = wanted
  if not found and copied and (folder / MODEL).is_file() and not (folder / JSON).is_file():
    said['add_bos_token'] = open_tokenizer(str(source)).bos_id is not None
  if said:
    contents = configuration(str(beside / JSON)) | said
    (folder / CONFIGURATION).write_text(json.dumps(contents, indent=2) + '\n')


def tokenizer_files(source: pathlib.Path | None) -> dict[str, pathlib.Path]:
  """Returns the files of a tokenizer, by the names that a copy gives them.

  Raises:
    UserError: One of them is a FIFO or another special file, or a link out of its folder, by which
      someone else's model could have any file of the user copied. Links of Hugging Face's cache
      stay within it.
  """
  if source is None:
    return {}
  is_file = not source.is_dir()
  found = {f'tokenizer{source.suffix}': source} if is_file else {}
  beside = source.parent if is_file else source
  for name in FILES:
    path = beside / name
    if not os.path.lexists(path) or (is_file and name in TOKENIZERS):
      continue
    check_file(path)
    if target := link_out_of(beside, path):
      raise UserError(
        f'{path} is a link out of its folder, to {target}: put a copy there, or name the tokenizer '
        'with --tokenizer'
      )
    found[name] = path
  for path in found.values():
    check_file(path)
  return found


def link_out_of(folder: pathlib.Path, path: pathlib.Path) -> pathlib.Path | None:
  """Returns what a file is a link to, if not within its folder or Hugging Face's cache."""
  root, target = folder.resolve(), path.resolve()
  roots = [root, root.parent.parent / 'blobs'] if root.parent.name == 'snapshots' else [root]
  return None if any(target.is_relative_to(r) for r in roots) else target
