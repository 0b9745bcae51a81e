"""A run with modules that predict further tokens, continued, and its text with their drafts."""

import pytest

from tests.support import runs

TEXT = dict(config='tests.support.experiments.TinyText')
MODULES = '--fdl.NUM_PREDICTION_MODULES=1'


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_and_its_text(tmp_path):
  """The last evaluation has the metrics of the module; no text depends on drafts, drawn or not."""
  folder = tmp_path / 'run'
  runs.run(folder, MODULES, '--fdl.MAX_STEPS=4', '--fdl.EVAL_INTERVAL_STEPS=4', **TEXT)
  assert all('fraction_of_correct_mtp_1' in record for record in runs.records(folder))
  (evaluated,) = runs.records(folder, 'eval_metrics.jsonl')
  assert evaluated['total_loss'] == pytest.approx(
    evaluated['avg_xent'] + 0.3 * evaluated['mtp_1_xent']
  )
  generate = lambda *flags, **kwargs: runs.module(
    'paxlite', 'generate', str(folder), 'And it came', '--max_new_tokens=8',
    '--import=tests.support.experiments', *flags, **kwargs,
  )  # fmt: skip
  plain, drafted = generate(), generate('--drafts')
  assert drafted.stdout.split() == plain.stdout.split() != []
  assert '8 tokens in ' in drafted.stderr
  drawn = [generate('--temperature=1', '--seed=3', *flags).stdout for flags in ((), ('--drafts',))]
  assert drawn[0] == drawn[1] != plain.stdout
  # a run cannot be continued with another number of modules
  other = runs.run(folder, '--fdl.NUM_PREDICTION_MODULES=2', code=2, **TEXT)
  assert 'NUM_PREDICTION_MODULES' in other.stderr
