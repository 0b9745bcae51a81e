"""The files of a model or dataset at one commit, and their copies in the shared cache."""

import dataclasses
import functools
import hashlib
import os
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from paxlite.cli.terminal import warn
from paxlite.core.errors import UserError, located
from paxlite.core.run_files import write_file
from paxlite.core.wording import amount
from paxlite.files import schemes
from paxlite.hub.answers import UnreachableError, asking, package, patiently
from paxlite.hub.names import COMMIT, HubName, cache

README = 'README.md'
_SHA256 = re.compile(r'[0-9a-f]{64}')
_SUM = re.compile(r'[0-9a-f]{40}|[0-9a-f]{64}')


@dataclasses.dataclass(frozen=True)
class Listing:
  """The state of a revision at the time of the request."""

  name: HubName  # the model or dataset
  commit: str
  sizes: Mapping[str, int]  # the bytes of each file, by its name
  sums: Mapping[str, str]  # the SHA-256 of large files, and the git checksum of the others
  configs: Sequence[Any]  # the configurations that the README of a dataset states
  problem: str = ''  # why the Hub cannot be asked, so that these are the copies; '' if it could

  @property
  def folder(self) -> pathlib.Path:
    """The copies of its files."""
    return self.name.copies / 'snapshots' / self.commit

  def download(self, names: Sequence[str], beside: pathlib.Path | None = None) -> pathlib.Path:
    """Copies missing files into the cache and returns their folder.

    Raises UserError if there is no room, the Hub cannot be reached, or sent something else.

    Args:
      names: The files.
      beside: Where as many bytes are to be written after this; None: nowhere.
    """
    missing = [name for name in names if not (self.folder / name).exists()]
    if missing and self.problem:
      raise UserError(f'{self.problem}. The copy in {self.folder} lacks {missing[0]}')
    size = sum(self.sizes[name] for name in missing)
    whole = sum(self.sizes[name] for name in names)
    _check_room({cache(): size} | ({beside: whole} if beside else {}))
    started = time.monotonic()
    if size > 1 << 20:
      warn(f'{self.name}: {amount(len(missing), "file")}, {size / 1e9:.2f} GB, into {cache()}')
    for name in missing:
      with asking(self.name):
        self._fetch(name)
      self._check(name)  # before anything else can fail, so that no wrong copy stays
    for name in names:
      self._check(name)
    if size > 1 << 20:
      warn(f'{self.name}: downloaded in {time.monotonic() - started:.0f} s')
    if not self.problem and not COMMIT.fullmatch(self.name.revision):
      ref = self.name.copies / 'refs' / self.name.revision
      ref.parent.mkdir(parents=True, exist_ok=True)
      write_file(ref, self.commit.encode())
    return self.folder

  def _fetch(self, name: str) -> None:
    hub = package()
    has_bar = sys.stderr.isatty() and self.sizes[name] > 1 << 20
    if has_bar and not hub.constants.HF_HUB_DISABLE_PROGRESS_BARS:
      hub.utils.enable_progress_bars()
    else:
      hub.utils.disable_progress_bars()
    if _SHA256.fullmatch(self.sums.get(name, '')):
      self._finish(name)
    hub.hf_hub_download(
      self.name.repo, name, repo_type=self.name.kind, revision=self.commit, cache_dir=cache()
    )

  def _finish(self, name: str) -> None:
    """Downloads the rest of a file of which a killed process has left a part in the cache.

    The package would begin again, and leave the part there.
    """
    from huggingface_hub.file_download import hf_hub_url, http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    blob = self.name.copies / 'blobs' / self.sums[name]
    if not [*blob.parent.glob(f'{blob.name}*.incomplete')]:
      return
    lock = cache() / '.locks' / self.name.copies.name / f'{blob.name}.lock'
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):  # without which another process may be at work on it
      parts = sorted(blob.parent.glob(f'{blob.name}*.incomplete'), key=os.path.getsize)
      if blob.exists() or not parts:
        return
      *others, part = parts
      for other in others:
        other.unlink()
      if part.stat().st_size <= self.sizes[name]:
        address = hf_hub_url(self.name.repo, name, repo_type=self.name.kind, revision=self.commit)
        with part.open('ab') as f:
          http_get(
            address, f, resume_size=f.tell(), headers=build_hf_headers(),
            expected_size=self.sizes[name],
          )  # fmt: skip
      if _sum_of(part, self.sums[name]) == self.sums[name]:
        part.rename(blob)
      else:
        part.unlink()

  def _check(self, name: str) -> None:
    """Compares a copy with what the Hub states of it, once; a wrong one is removed.

    The package compares sizes alone.
    """
    file = self.folder / name
    blob, stated = file.resolve(), self.sums.get(name, '')
    if not stated and _SHA256.fullmatch(blob.name):
      stated = blob.name
    about = blob.stat()
    seen = schemes.cache().with_name('hub') / 'checked' / (stated or 'none')
    now = f'{about.st_size} {about.st_mtime_ns}'
    if not stated or (seen.is_file() and seen.read_text() == now):
      return
    found = _sum_of(blob, stated)
    if about.st_size != self.sizes[name] or found != stated:
      if blob.is_relative_to(cache().resolve()):  # what a user has linked there stays
        blob.unlink()
      file.unlink(missing_ok=True)
      raise UserError(
        f'{self.name}: {name} has {about.st_size:,} bytes and the checksum {found[:12]}, but the '
        f'Hub states {self.sizes[name]:,} and {stated[:12]}: paxlite removed it; run the command '
        'again'
      )
    if about.st_size > 1 << 20:  # others are checked fast
      seen.parent.mkdir(parents=True, exist_ok=True)
      write_file(seen, now.encode())


def _sum_of(path: pathlib.Path, stated: str) -> str:
  """Returns the checksum of a file, of the kind of the stated one: SHA-256, or git's of a blob."""
  with path.open('rb') as f:
    if _SHA256.fullmatch(stated):
      return hashlib.file_digest(f, 'sha256').hexdigest()
    content = f.read()
  return hashlib.sha1(b'blob %d\0' % len(content) + content, usedforsecurity=False).hexdigest()


def _check_room(written: Mapping[pathlib.Path, int]) -> None:
  """Raises UserError unless each folder has room for its bytes."""
  needed: dict[int, int] = {}
  for folder, size in written.items():
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    device = there.stat().st_dev
    needed[device] = needed.get(device, 0) + size
    free = shutil.disk_usage(there).free
    if needed[device] > free:
      raise UserError(
        f'{folder} has room for {free / 1e9:.1f} GB, but {needed[device] / 1e9:.1f} GB are '
        'needed: make room, or name another disk with HF_HOME'
      )


@functools.cache
def listing_of(name: HubName) -> Listing:
  """Lists the files of a model or dataset on the Hub, or in its copies if the Hub is unreachable.

  Raises UserError if there is none of that name, it may not be read, or there are no copies.
  """
  with located(f'{name}: this path does not exist'):
    api = package().HfApi(library_name='paxlite')
  try:
    info = patiently(
      name,
      lambda: api.repo_info(
        name.repo, repo_type=name.kind, revision=name.revision, files_metadata=True,
        timeout=package().constants.HF_HUB_ETAG_TIMEOUT,
      ),
    )  # fmt: skip
  except UnreachableError as e:
    return _copies(name, e)
  files = {f.rfilename: f for f in info.siblings or ()}
  for file in files:
    if file.startswith('/') or {'..', ''} & set(file.split('/')):  # would lead out of the cache
      raise UserError(f'{name}: it has no file {file!r}: {name.page}')
  stated = {n: f.lfs['sha256'] if f.lfs else f.blob_id or '' for n, f in files.items()}
  sums = {n: found for n, found in stated.items() if _SUM.fullmatch(found)}  # names of files too
  sizes = {n: f.size or 0 for n, f in files.items()}
  if not COMMIT.fullmatch(info.sha or ''):
    raise UserError(f'{name}: {name.page} has no files yet')
  return Listing(name, info.sha, sizes, sums, _configs(info.card_data))


def _copies(name: HubName, problem: UnreachableError) -> Listing:
  ref = name.copies / 'refs' / name.revision
  commit = ref.read_text().strip() if ref.is_file() else name.revision
  folder = name.copies / 'snapshots' / commit
  if not COMMIT.fullmatch(commit) or not folder.is_dir():
    raise UserError(f'{problem}. Neither a copy nor this path exists here') from None
  warn(f'{problem}. Reading the copy of commit {commit[:12]}')
  files = {p.relative_to(folder).as_posix(): p for p in folder.rglob('*') if p.is_file()}
  sizes = {n: p.stat().st_size for n, p in files.items()}
  readme = folder / README
  card = package().DatasetCard.load(readme).data if readme.is_file() else None
  return Listing(name, commit, sizes, {}, _configs(card), str(problem))


def _configs(card: Any) -> Sequence[Any]:
  return getattr(card, 'configs', None) or ()
