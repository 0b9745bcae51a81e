"""Writes a split of flat tokens (see flat_tokens), so that a killed writer can resume.

Tokens are appended to files in a separate folder, <path>/.<split>.unfinished. A note in it says how
many of them are valid, and holds the position at which the caller resumes. `close` checks the files
on disk and then renames the folder to <split> or converts it, so that a split that exists is
complete.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Sequence

import google_crc32c
import numpy as np

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject
from paxlite.data import checked_files
from paxlite.data.flat_tokens import META, TOKENS, Format, open_flat_tokens
from paxlite.data.rows import TokenArray
from paxlite.files.json_files import read_object

_CHUNK = 1 << 20  # tokens in a zarr chunk, and in each step of a check
_NOTE = 'progress.json'
HELD_OUT = 'held_out_every', 'held_out'  # the settings that say which documents a split has


class FlatTokensWriter:
  """Writes one split of a dataset.

  Args:
    path: The dataset's folder.
    split: Name of the split.
    vocab_size: Size of the vocabulary, which decides between uint16 and uint32.
    format: Format of the finished split.
    settings: Settings of the caller. An unfinished split is resumed only if it was begun with the
      same ones.

  Attributes:
    token_count: Number of tokens so far, including those of the unfinished document.
    sequences: Number of documents so far.
    position: The position that `note` was last given; None if the split is new.

  Raises:
    UserError: The split exists, another process writes it, it was begun with other settings, or
      its folder cannot be made.
  """

  def __init__(
    self,
    path: str,
    split: str,
    vocab_size: int,
    format: Format = 'memmap',
    settings: JsonObject | None = None,
  ):
    if not re.fullmatch('[A-Za-z0-9._-]+', split) or not split.strip('.'):
      raise UserError(f'{split!r} cannot be the name of a split: use letters, digits, ., _ and -')
    self._path, self._split, self._format = path, split, format
    self._final = pathlib.Path(path) / split
    self._folder = pathlib.Path(path) / f'.{split}.unfinished'
    self._done = pathlib.Path(path) / f'.{split}.done'  # to be removed
    shutil.rmtree(self._done, ignore_errors=True)
    # If both exist, a conversion to seqax was interrupted, and it is done again.
    if self._final.exists() and not (self._folder / META).exists():
      raise UserError(f'{self._final} exists: choose another --output or remove it')
    above = [self._folder.parent, *self._folder.parent.parents]
    self._made = [folder for folder in above if not folder.exists()]  # the innermost first
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
      self._tokens = (self._folder / TOKENS).open('ab')
      self._starts = (self._folder / 'seq_starts.bin').open('ab')
    except OSError as e:
      raise UserError(f'{self._folder} cannot be written: {e.strerror}') from None
    try:
      fcntl.flock(self._tokens, fcntl.LOCK_EX | fcntl.LOCK_NB)
      current = os.stat(self._tokens.name)
    except OSError:
      raise UserError(f'{self._folder}: another process is writing it') from None
    if not os.path.samestat(os.fstat(self._tokens.fileno()), current):
      raise UserError(f'{self._folder}: another process has just finished with it')
    self.dtype = np.dtype('<u2' if vocab_size <= 1 << 16 else '<u4')
    self._settings = dict(settings or {}) | {'dtype': self.dtype.str, 'format': format}
    self.sequences = self._max = self._crc = self.token_count = 0
    self.position: Json = None
    if (self._folder / _NOTE).is_file():
      self._go_on(read_object(self._folder / _NOTE))
    else:
      self._cut(0, 0)
      self._append_starts(np.zeros(1, np.int64))

  def write(self, tokens: np.ndarray, ends: Sequence[int] | np.ndarray) -> None:
    """Appends ids [n]; documents end before the indices `ends`, and the last one may be unfinished.

    A document without tokens is left out.
    """
    ends = self.token_count + np.asarray(ends, np.int64)
    ends = ends[np.diff(ends, prepend=self._ended) > 0]
    if len(tokens):
      data = tokens.astype(self.dtype, copy=False).tobytes()
      self._max = max(self._max, int(tokens.max()))
      self._crc = google_crc32c.extend(self._crc, data)
      self._tokens.write(data)
      self.token_count += len(tokens)
    if len(ends):
      self._append_starts(ends)
      self.sequences += len(ends)

  def note(self, position: Json) -> None:
    """Saves what is written so far, with the position at which the caller resumes.

    No document may be unfinished.
    """
    assert self._ended == self.token_count
    self.position = position
    for file in (self._tokens, self._starts):
      file.flush()
      os.fsync(file.fileno())
    note = {
      'settings': self._settings,
      'position': position,
      'token_count': self.token_count,
      'sequences': self.sequences,
      'max_token_id': self._max,
      'crc32c': self._crc,
    }
    unfinished = self._folder / (_NOTE + '.tmp')
    unfinished.write_text(json.dumps(note) + '\n')
    os.replace(unfinished, self._folder / _NOTE)

  def close(self, about: JsonObject | None = None) -> None:
    """Completes the split.

    Args:
      about: Further facts that are stored with it, as the fingerprint of the tokenizer.

    Raises:
      UserError: The files on disk are not what was written.
    """
    self._tokens.close()
    self._starts.close()
    meta = {
      'format': 'paxlite flat tokens 1',
      'dtype': self.dtype.str,
      'token_count': self.token_count,
      'sequences': self.sequences,
      'max_token_id': self._max,
      'crc32c': self._crc,
      **{name: self._settings.get(name) for name in HELD_OUT},
    } | (about or {})
    (self._folder / META).write_text(json.dumps(meta, indent=2) + '\n')
    self._check(self._path, self._folder.name)
    if self._format == 'memmap':
      os.rename(self._folder, self._final)
      (self._final / _NOTE).unlink(missing_ok=True)
      checked_files.remember(self._final / TOKENS, self._crc)
      return
    self._convert(about or {})
    self._check(self._path, self._split)
    os.rename(self._folder, self._done)
    shutil.rmtree(self._done)

  def abort(self) -> None:
    """Closes the files; removes the folder if it has no note from which the split can resume."""
    for file in (self._tokens, self._starts):
      with contextlib.suppress(OSError):  # if the disk is full
        file.close()
    if not (self._folder / _NOTE).is_file():
      shutil.rmtree(self._folder)
      with contextlib.suppress(OSError):  # if another split is being written there
        for folder in self._made:
          folder.rmdir()

  def _go_on(self, note: JsonObject) -> None:
    try:
      theirs, self.position = note['settings'], note['position']
      self.token_count, self.sequences = note['token_count'], note['sequences']
      self._max, self._crc = note['max_token_id'], note['crc32c']
    except KeyError as e:
      raise UserError(
        f'{self._folder / _NOTE} is damaged: it lacks {e}. Remove the folder'
      ) from None
    for name in self._settings.keys() | theirs.keys():
      if self._settings.get(name) != theirs.get(name):
        raise UserError(
          f'{self._folder} was started with {name}={theirs.get(name)}, not '
          f'{self._settings.get(name)}: continue with the same command, or remove the folder'
        )
    for file, size in (
      (self._tokens, self.token_count * self.dtype.itemsize),
      (self._starts, (self.sequences + 1) * 8),
    ):
      if os.fstat(file.fileno()).st_size < size:
        raise UserError(
          f'{file.name} has lost bytes since it was written: remove {self._folder}, and '
          'tokenize again'
        )
    self._cut(self.token_count, self.sequences + 1)
    self._ended = self.token_count

  def _cut(self, tokens: int, starts: int) -> None:
    self._tokens.truncate(tokens * self.dtype.itemsize)
    self._starts.truncate(starts * 8)

  def _append_starts(self, starts: np.ndarray) -> None:
    self._starts.write(starts.astype('<u8').tobytes())
    self._ended = int(starts[-1])

  def _check(self, path: str, split: str) -> None:
    """Reads the split and compares it with what was written; raises UserError if they differ."""
    tokens, starts, largest = open_flat_tokens(path, split)
    crc = found = 0
    for part in _parts(tokens, self.dtype):
      crc = google_crc32c.extend(crc, part.tobytes())
      found = max(found, int(part.max()))
    ordered = all((np.diff(starts[i : i + _CHUNK + 1].astype(np.int64)) > 0).all()
                  for i in range(0, len(starts), _CHUNK))  # fmt: skip
    if (crc, found, largest, int(starts[-1]), len(starts) - 1, ordered) != (
      self._crc, self._max, self._max, self.token_count, self.sequences, True,
    ):  # fmt: skip
      raise UserError(
        f'{pathlib.Path(path) / split}: the disk does not hold what was written: the disk or '
        'memory is faulty, or another process changed it. Remove it and tokenize again'
      )

  def _convert(self, about: JsonObject) -> None:
    """Writes the split in seqax's format.

    The attribute max_token_id is written last and marks the split as complete.
    """
    import numcodecs
    import zarr

    tokens, starts, _ = open_flat_tokens(self._path, self._folder.name)
    compressor = numcodecs.Blosc(cname='lz4', clevel=5, shuffle=numcodecs.Blosc.BITSHUFFLE)
    root = zarr.open_group(self._path, mode='a', zarr_format=2)
    with contextlib.suppress(KeyError):
      del root[self._split]  # left by a conversion that was killed
    group = root.create_group(self._split)
    array = group.create_array(
      'encoded_tokens',
      shape=(len(tokens),),
      dtype='<u4',
      chunks=(_CHUNK,),
      compressors=compressor,
      config={'write_empty_chunks': True},  # because a missing chunk is an error
    )
    written = 0
    for part in _parts(tokens, np.dtype('<u4')):
      encoded = part * 2
      first, last = starts.searchsorted(np.array([written, written + len(part)], starts.dtype))
      encoded[(starts[first:last] - np.uint64(written)).astype(np.int64)] += 1
      array[written : written + len(part)] = encoded
      written += len(part)
    group.create_array(
      'seq_starts',
      data=np.asarray(starts[:], '<u8'),
      chunks=(max(1, min(len(starts), _CHUNK)),),
      filters=[numcodecs.Delta(dtype='<u8')],
      compressors=compressor,
    )
    group.attrs.update(about)
    group.attrs['max_token_id'] = self._max


def is_complete(path: pathlib.Path, split: str) -> bool:
  """Returns whether a split is written, and not only begun."""
  return (path / split).exists() and not (path / f'.{split}.unfinished').exists()


def _parts(tokens: TokenArray, dtype: np.dtype) -> Iterator[np.ndarray]:
  for start in range(0, len(tokens), _CHUNK):
    yield np.asarray(tokens[start : start + _CHUNK], dtype)
