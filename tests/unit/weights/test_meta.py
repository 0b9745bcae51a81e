"""Odd contents of Meta's folders: each is refused with one line, before anything is written."""

import json
import os

import pytest

from paxlite.core.errors import UserError
from paxlite.weights.folder import check_tensors
from paxlite.weights.meta import IGNORED, read_folder

torch = pytest.importorskip('torch')

PARAMS = dict(dim=8, n_layers=1, n_heads=2, norm_eps=1e-5, vocab_size=-1)
SHAPES = {
  'tok_embeddings': (16, 8), 'output': (16, 8), 'norm': (8,), 'layers.0.attention_norm': (8,),
  'layers.0.ffn_norm': (8,), 'layers.0.feed_forward.w1': (12, 8),
  'layers.0.feed_forward.w3': (12, 8), 'layers.0.feed_forward.w2': (8, 12),
} | {f'layers.0.attention.w{x}': (8, 8) for x in 'qkvo'}  # fmt: skip


def tensors():
  return {f'{name}.weight': torch.zeros(shape) for name, shape in SHAPES.items()}


def read(folder, contents, params=PARAMS):
  (folder / 'params.json').write_text(json.dumps(params))
  for i, content in enumerate(contents):
    torch.save(content, folder / f'consolidated.{i:02d}.pth')
  _, entries, found = read_folder(folder)
  check_tensors(entries, found.shapes, IGNORED)


def test_a_good_folder_is_accepted(tmp_path):
  read(tmp_path, [tensors()], PARAMS | dict(head_dim=4, hidden_dim=12, multiple_of=4))


@pytest.mark.parametrize(
  ('change', 'match'),
  [
    ({3: torch.zeros(2)}, '3 is not a name'),
    ({'norm.weight': 1.0}, 'norm.weight is float'),
    ({'norm.weight': torch.zeros(())}, r'norm.weight is \[\] and the model has \[8\]'),
    ({'layers.0.attention.wq.weight': torch.zeros(8)}, 'wq.weight is'),
    ({'layers.0.attention.wo.weight': torch.zeros(8)}, 'which is not a matrix'),
    ({'tok_embeddings.weight': torch.zeros(8)}, 'is missing or not a matrix|is not a matrix'),
    ({'tok_embeddings.weight': torch.zeros(())}, 'is missing or not a matrix|is not a matrix'),
    ({'output.weight': torch.zeros(16, 8).to_sparse()}, 'output.weight holds no values'),
    ({'output.weight': torch.zeros(1, 1).expand(16, 8)}, 'more elements than are stored'),
    ({'norm.weight': torch.zeros(8, device='meta')}, 'norm.weight'),
  ],
)
def test_odd_tensors_are_refused_in_one_line(tmp_path, change, match):
  with pytest.raises(UserError, match=match):
    read(tmp_path, [tensors() | change])


@pytest.mark.parametrize('content', [[1], 'text', None, torch.zeros(2)])
def test_files_without_named_tensors(tmp_path, content):
  with pytest.raises(UserError, match='holds no tensors by name'):
    read(tmp_path, [content])


def test_shards_that_do_not_belong_together(tmp_path):
  with pytest.raises(UserError, match=r'norm.weight is not split, and differs'):
    read(tmp_path, [tensors(), tensors() | {'norm.weight': torch.ones(8)}])
  with pytest.raises(UserError, match=r'01.pth has more, and .*00.pth does not'):
    read(tmp_path, [tensors(), tensors() | {'more': torch.ones(8)}])
  with pytest.raises(UserError, match='does not fit to those of the files before'):
    read(tmp_path, [tensors(), tensors() | {'output.weight': torch.ones(16, 9)}])
  (tmp_path / 'consolidated.01.pth').rename(tmp_path / 'consolidated.99999999999.pth')
  with pytest.raises(UserError, match=r'01.pth is missing: there is consolidated.99999999999.pth'):
    read(tmp_path, [tensors()])


def test_a_fifo_is_refused_at_once(tmp_path):
  (tmp_path / 'params.json').write_text(json.dumps(PARAMS))
  os.mkfifo(tmp_path / 'consolidated.00.pth')
  with pytest.raises(UserError, match='it is a FIFO'):
    read_folder(tmp_path)


@pytest.mark.parametrize(
  ('change', 'match'),
  [
    (dict(moe={}), r'moe=\{\} is not supported: it may change'),
    (dict(sliding_window=4096), 'sliding_window=4096 is not supported'),
    (dict(n_layers=4_000_000_000), 'n_layers=4000000000 must be from 0 to 2,000'),
    (dict(n_heads=2.0), 'n_heads=2.0 must be an integer'),
    (dict(head_dim=3), 'head_dim=3 is not dim / n_heads'),
    (dict(hidden_dim=13), 'hidden_dim=13, and the tensors have 12'),
    (dict(vocab_size=17), 'vocab_size=17, and the tensors have 16'),
    (dict(norm_eps='x'), 'impossible value'),
  ],
)
def test_params_that_are_refused(tmp_path, change, match):
  with pytest.raises(UserError, match=match):
    read(tmp_path, [tensors()], PARAMS | change)
