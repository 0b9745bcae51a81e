"""Which machine to rent: the file of prices, and the table of what a run costs on each machine."""

import importlib.util
import json

import pytest

from paxlite.aot import targets
from paxlite.aot.commands import plan as tool
from paxlite.aot.planning import prices
from paxlite.core.errors import UserError
from tests.support import runs


@pytest.mark.cases(fast=10)
@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('{"h100-8": 21}', 'h100-8 is no target. Did you mean h100x8'),
    ('{"v5e16": 21}', 'v5e16 is no target. Did you mean v5e-16'),
    ('{"h100x12": 21}', r'h100x12 is no target. .*\bh100x128\b'),
    ('{"my machine": 21}', 'my machine is no target. write v5e-256'),
    ('{"here": 21}', 'here is no machine to rent'),
    ('{"h100x8": -1}', 'h100x8=-1 must be at least 0'),
    ('{"h100x8": "21"}', "h100x8='21' must be a number, the price of the machine for an hour"),
    ('{"h100x8": NaN}', 'h100x8=nan must be a number'),
    ('{"h100x8": true}', 'h100x8=True must be a number'),
    ('{}', 'has no prices: write'),
  ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, text, message):
  path = tmp_path / 'prices.json'
  path.write_text(text)
  with pytest.raises(UserError, match=f'--prices={path}.*{message}') as found:
    tool.main(['TinyGPT', f'--prices={path}'])
  assert '\n' not in str(found.value)


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize('flags', [[], ['--target=v5e-8', '--prices=prices.json']])
def test_one_machine_or_a_file_of_prices_is_named(flags):
  with pytest.raises(UserError, match='name a machine with --target, or several with --prices'):
    tool.main(['TinyGPT', *flags])


def test_measured_speeds_are_of_the_machines_with_their_chip(tmp_path):
  path = tmp_path / 'speeds.json'
  path.write_text('{"chip": "h100"}')
  names = ['v5e-8', 'h100x8', 'h100x16']
  assert prices.calibrated(names, str(path)) == ['h100x8', 'h100x16']
  assert prices.calibrated(names, None) == []
  with pytest.raises(UserError, match='is of h100, and no machine in --prices has it'):
    prices.calibrated(['v5e-8'], str(path))


def best(seconds: float, rows: int = 512) -> dict[str, object]:
  """A plan's JSON with one candidate that fits."""
  one = dict(mesh='data 8', seconds=seconds, rows=rows, command=f'paxlite train X STEP={seconds}')
  return dict(best=[one], seq_len=1000)


def test_what_a_run_costs():
  """A step of 512,000 tokens in 2 s is 256,000 tokens/s, and 10⁹ tokens take 1.085 hours."""
  offer = prices.offer('h100x8', 36.0, best(2.0), 1800)
  assert offer['tokens_per_second'] == 256_000
  assert offer['cost_per_billion_tokens'] == pytest.approx(36 * 1e9 / 256_000 / 3600)
  assert offer['hours'] == 1.0


def test_the_table_begins_with_the_cheapest_machine(tmp_path, monkeypatch, capsys):
  """v5e-8 is slower than h100x8 and cheaper; those that do not fit say why, after them."""
  path, out = tmp_path / 'prices.json', tmp_path / 'out.json'
  path.write_text('{"h100x8": 36, "v5e-1": 1, "v6e-8": 20, "v5e-8": 9, "a100x8": 10}')

  def planned(args, overrides):
    assert overrides == {'MAX_STEPS': '1800'}
    found = dict(json={'best': []}, page='', fits=False, interrupted=False)
    if args.target == 'v5e-1':
      page = 'TinyGPT does not fit 1 × v5e: it needs 96.37 GiB. What would fit: LoRA'
      return {**found, 'page': page}
    if args.target == 'v6e-8':
      raise UserError('--target=v6e-8 needs the compiler of TPUs')
    seconds = {'h100x8': 2.0, 'v5e-8': 4.0, 'a100x8': 4.0}[args.target]
    return {**found, 'json': best(seconds), 'fits': True, 'interrupted': args.target == 'v5e-8'}

  monkeypatch.setattr(tool, 'planned', planned)
  monkeypatch.setattr(targets, 'prepare_environment', lambda: None)
  argv = ['TinyGPT', f'--prices={path}', '--global_batch=512', 'MAX_STEPS=1800', f'--json={out}']
  with pytest.raises(SystemExit) as ended:
    tool.main(argv)
  assert ended.value.code == 130
  said = capsys.readouterr().out
  table = said[said.index('TinyGPT, the cheapest machine first') :].splitlines()
  assert table[0].endswith('1,800 steps of 512 rows of 1,000 tokens, 0.922 · 10⁹ tokens in all')
  assert [line.split()[0] for line in table[3:5]] == ['v5e-8', 'h100x8']
  assert table[3].split()[-5:] == ['128,000', '9.00', '19.53', '2', '18.00']
  assert table[4].split()[-5:] == ['256,000', '36.00', '39.06', '1', '36.00']
  assert table[5:8] == [
    '  v5e-1: TinyGPT does not fit 1 × v5e: it needs 96.37 GiB',
    '  v6e-8: needs the compiler of TPUs',
    '  a100x8: not judged before the interrupt',
  ]
  assert 'paxlite train X STEP=4.0' in said
  assert table[-1] == 'Interrupted: the same command continues from here'
  found = json.loads(out.read_text())['targets']
  assert [(o['target'], o['fits']) for o in found[:2]] == [('v5e-8', True), ('h100x8', True)]
  assert found[0]['cost'] == 18
  assert found[2]['reason'].startswith('TinyGPT does not fit')


def test_without_a_batch_the_runs_are_not_the_same():
  """Each machine has the batch with the fastest rows, so that only the cost of tokens compares."""
  offers = [prices.offer('v5e-8', 9.0, best(4.0, rows=64), None)]
  found = prices.as_json(offers, 'TinyGPT', 1800, None)
  page = prices.page(found)
  assert 'hours' not in page.splitlines()[2]
  assert page.splitlines()[3].split()[-1] == '64'
  assert 'Each machine has a batch of its own' in page
  assert found['targets'][0]['cost'] is None


def test_no_machine_fits():
  refused = prices.refused('v5e-8', 9.0, '--target=v5e-8: no')
  page = prices.page(prices.as_json([refused], 'TinyGPT', 10, 8))
  assert page == 'TinyGPT fits none of these machines\n  v5e-8: no'


@pytest.mark.slow
def test_the_compiler_is_asked_about_each_machine(tmp_path):
  """With the extra of the machines, there is a plan for each; without it, a reason."""
  path, out = tmp_path / 'prices.json', tmp_path / 'out.json'
  path.write_text('{"v5e-1": 1.2, "v5e-4": 4.8}')
  flags = ['--global_batch=8', '--most=1', f'--json={out}', f'--verdicts={tmp_path / "verdicts"}']
  code = 0 if importlib.util.find_spec('libtpu') else 1
  runs.module('paxlite', 'plan', 'TinyGPT', f'--prices={path}', *flags, code=code)
  for offer in json.loads(out.read_text())['targets']:
    assert offer['fits'] or 'needs the compiler of' in offer['reason']
