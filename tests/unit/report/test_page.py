"""The page about runs: what it shows, what it escapes, and how it looks in a browser."""

import html.parser
import json
import random
import re
import shutil
import subprocess
import xml.etree.ElementTree

import fiddle as fdl
import pytest

from paxlite.core.errors import UserError
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.identity import write_configuration
from paxlite.losses.metric_names import larger_is_better
from paxlite.report import curves, episodes, page, spike_texts, tables
from paxlite.report.commands import report
from paxlite.report.records import RunRecords, read_runs, thinned
from paxlite.run_data.spikes import spikes

EVIL = '</script><img src=x onerror=alert(1)>'


def write_run(folder, steps, rate=1e-3, **files):
  """Writes what a run with one record per step would leave."""
  folder.mkdir(parents=True)
  records = [
    dict(step=s, loss=10 / s, lr=rate, grad_norm=1.0, tokens_per_second=1000.0, step_seconds=0.5,
         model_tflops=1.0, mfu=None)
    for s in range(1, steps + 1)
  ]  # fmt: skip
  lines = [json.dumps(r) for r in records]
  (folder / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
  evaluations = [
    dict(step=s, input='held_out', avg_xent=11 / s + (s == steps), acc=0.5, acc_stderr=0.01)
    for s in range(10, steps + 1, 10)
  ]
  (folder / 'eval_metrics.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in evaluations))
  values = {'experiment': 'my.Experiment', 'values': {'LEARNING_RATE': rate, 'NUM_LAYERS': 2}}
  (folder / 'experiment.json').write_text(json.dumps(values))
  for name, text in files.items():
    (folder / name.replace('_json', '.json')).write_text(text)
  return folder


@pytest.fixture
def runs(tmp_path):
  return read_runs([
    str(write_run(tmp_path / 'a' / 'run', 40)),
    str(write_run(tmp_path / 'b' / 'run', 20, rate=2e-3)),
  ])  # fmt: skip


def test_the_tables(runs):
  assert [run.name for run in runs] == ['a/run', 'b/run']
  header, rows = tables.summary(runs)
  row = dict(zip(header, rows[0], strict=True))
  assert row['loss'] == '0.2500'
  assert row['tokens'] == '20k'  # 40 steps of 500 tokens
  assert row['hours'] == '0.00556'
  _, rows = tables.evaluations(runs)
  assert rows == [
    ['held_out', 'avg_xent', '1.275 (best 0.3667 at step 30)', '1.55 (best 1.1 at step 10)'],
    ['held_out', 'acc', '0.5 ± 0.01', '0.5 ± 0.01'],
  ]
  _, rows = tables.differences(runs)
  assert rows == [['LEARNING_RATE', '0.001', '0.002']]
  text = tables.markdown(runs)
  assert '| LEARNING_RATE | 0.001 | 0.002 |' in text


@pytest.mark.parametrize(
  ('metric', 'losses', 'larger'),
  [
    ('teacher_agreement', None, True),
    ('rewards/margins', None, True),
    ('rewards/rejected', None, False),
    ('pass@1', None, True),
    ('avg_xent', None, False),
    ('my_score', None, False),  # of a run that states nothing of it
    ('my_score', {'mine': ['my_score']}, True),
    ('accuracy', {'accuracy': []}, False),  # is a loss here
    ('acc', {'mine': []}, True),
    ('acc', 'damaged', True),
  ],
)
def test_the_best_value_is_the_one_that_the_loss_calls_better(tmp_path, metric, losses, larger):
  folder = write_run(tmp_path / 'run', 3)
  values = [0.25, 0.5, 0.125, 0.375]
  records = [{'step': s, 'input': 'a', metric: x} for s, x in enumerate(values, 1)]
  (folder / 'eval_metrics.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in records))
  stated = {'experiment': 'my.Experiment', 'values': {}}
  stated |= {} if losses is None else {'losses': losses}
  (folder / 'experiment.json').write_text(json.dumps(stated))
  _, rows = tables.evaluations(read_runs([str(folder)]))
  best = '0.5 at step 2' if larger else '0.125 at step 3'
  assert rows == [['a', metric, f'0.375 (best {best})']]


def test_the_folder_of_a_run_says_which_metrics_are_better_if_larger(tmp_path):
  e = TinyGPT()
  write_configuration(e, tmp_path)
  assert 'avg_xent' in json.loads((tmp_path / 'experiment.json').read_text())['losses']
  task = fdl.build(e.build_task())
  run = RunRecords(tmp_path, 'run')
  for metric in ('avg_xent', 'total_loss', 'fraction_of_correct_next_step_preds'):
    assert larger_is_better(metric, run.losses) == task.larger_is_better(metric)


def test_curves_over_steps_tokens_and_hours(runs):
  assert runs[0].series('loss', 'step')[:2] == [(1, 10), (2, 5)]
  assert runs[0].series('loss', 'tokens')[:2] == [(500, 10), (1000, 5)]
  assert runs[0].series('mfu', 'step') == []
  assert runs[0].evaluated('held_out', 'avg_xent', 'tokens')[0] == (5000, 1.1)


def test_an_evaluation_between_two_records_has_the_tokens_of_the_last_one(tmp_path):
  folder = write_run(tmp_path / 'run', 1)
  records = [dict(step=s, tokens_per_second=100.0, step_seconds=1.0) for s in (10, 20)]
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in records))
  found = [dict(step=s, input='held_out', avg_xent=float(s)) for s in (5, 10, 15, 25)]
  (folder / 'eval_metrics.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in found))
  (run,) = read_runs([str(folder)])
  curve = run.evaluated('held_out', 'avg_xent', 'tokens')
  assert curve == [(1000.0, 10.0), (1000.0, 15.0), (2000.0, 25.0)]
  assert [x for x, _ in run.evaluated('held_out', 'avg_xent', 'step')] == [5.0, 10.0, 15.0, 25.0]


def test_thinning_keeps_the_extremes():
  points = [(float(x), 1000.0 if x == 777 else -5.0 if x == 1234 else x % 7) for x in range(10_000)]
  kept = thinned(points, 100)
  assert len(kept) <= 100
  assert {(777, 1000), (1234, -5)} <= set(kept)
  assert kept == sorted(kept)
  assert thinned(points, 10_000) == points


@pytest.mark.slow
def test_the_size_of_a_page_about_long_runs(tmp_path):
  names = [str(write_run(tmp_path / f'run{i}', 10_000)) for i in range(10)]
  text = page.page(read_runs(names), 'Ten runs')
  assert 100_000 < len(text.encode()) <= 1_000_000
  shown = re.search(r'The curves show ([\d,]+) of ([\d,]+) points', text)
  assert shown[2] == '420,000'  # 4 curves of 10,000 steps and 2 of 1,000 evaluations for each run


def test_what_is_missing_is_said(tmp_path):
  folder = write_run(tmp_path / 'run', 3, versions_json='{')
  with open(folder / 'metrics.jsonl', 'a') as f:
    f.write('{"step": 4, "loss": null}\n{"st')
  (run,) = read_runs([str(folder)])
  assert run.warnings == [
    '1 of 5 lines of metrics.jsonl cannot be read and are left out.',
    'versions.json is missing or cannot be read.',
    '1 recorded steps have no finite loss and are left out of the curves.',
  ]
  (tmp_path / 'empty' / 'goodput').mkdir(parents=True)
  (run,) = read_runs([str(tmp_path / 'empty')])
  assert 'metrics.jsonl is missing.' in page.page([run], 'x')


def test_what_was_skipped_is_said_with_the_reason(tmp_path):
  folder = write_run(tmp_path / 'run', 3)
  counts = {10: 0, 20: 2, 30: 2, 40: 3}
  records = (json.dumps(dict(step=s, loss=1.0, skipped_steps=n)) + '\n' for s, n in counts.items())
  (folder / 'metrics.jsonl').write_text(''.join(records))
  (run,) = read_runs([str(folder)])
  assert run.warnings[-1] == (
    '3 steps skipped because of a non-finite gradient or loss: 2 in steps 11 to 20, '
    '1 in steps 31 to 40. Skipped steps change nothing.'
  )


class Tags(html.parser.HTMLParser):
  """Collects the tags and the text outside of scripts."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.text = [], ''
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)

  def handle_data(self, data):
    self.text += data


def test_nothing_of_a_run_becomes_markup(tmp_path):
  folder = write_run(tmp_path / EVIL.replace('/', '_'), 20)
  (folder / 'samples.jsonl').write_text(json.dumps({'step': 3, 'prompt': EVIL, 'text': EVIL * 2}))
  (folder / 'experiment.json').write_text(
    json.dumps({'experiment': EVIL, 'values': {'NAME': EVIL}})
  )
  records = [dict(step=5, input=EVIL, avg_xent=1.0)]
  (folder / 'eval_metrics.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in records))
  found = read_runs([str(folder)])
  parsed = Tags(page.page(found, EVIL))
  assert 'img' not in parsed.tags
  assert parsed.tags.count('script') == 1
  assert EVIL in parsed.text
  xml.etree.ElementTree.fromstring(curves.svg(EVIL, EVIL, {EVIL: [(0, 1), (1, 2)]}))


MARKERS = '/*data*/ <!--body--> <!--title--> \u2028 ]]> --!> \\u003c'


def test_a_text_that_looks_like_a_marker_of_the_page_is_text(tmp_path):
  folder = write_run(tmp_path / 'run', 20)
  (folder / 'samples.jsonl').write_text(json.dumps({'step': 3, 'prompt': MARKERS, 'text': MARKERS}))
  (folder / 'experiment.json').write_text(
    json.dumps({'experiment': MARKERS, 'values': {'NAME': MARKERS}})
  )
  plain = page.page(read_runs([str(write_run(tmp_path / 'plain', 20))]), 'x')
  text = page.page(read_runs([str(folder)]), MARKERS)
  assert Tags(text).text.count('/*data*/ <!--body--> <!--title-->') >= 4
  assert text.count('const DATA = {"runs":') == text.count('"curves":') == 1
  assert len(text) < len(plain) + 3_000


def test_the_page_stays_small_whatever_a_run_has_recorded(tmp_path):
  folder = write_run(tmp_path / 'run', 20)
  (folder / 'samples.jsonl').write_text(
    json.dumps({'step': 3, 'prompt': 'p' * 1_000_000, 'text': 't' * 1_000_000})
  )
  values = {'experiment': 'e', 'values': {f'V{i}': 'v' * 500_000 for i in range(4)}}
  (folder / 'experiment.json').write_text(json.dumps(values))
  records = [dict(step=5, input=f'input{i}', avg_xent=1.0, acc='text') for i in range(3_000)]
  (folder / 'eval_metrics.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in records))
  text = page.page(read_runs([str(folder)]), 'x')
  assert len(text) < 300_000
  assert '995,000 more characters' in text
  assert '… and 2,000 more rows' in text


def test_numbers_that_are_texts_are_left_out(tmp_path):
  folder = write_run(tmp_path / 'run', 3)
  with open(folder / 'metrics.jsonl', 'a') as f:
    f.write('{"step": 4, "loss": "x", "step_seconds": "1", "tokens_per_second": [2]}\n')
  (folder / 'eval_metrics.jsonl').write_text(
    '{"step": 1, "input": "a", "acc": 0.5}\n{"step": 2, "input": "a", "acc": "x\\ny|z"}\n'
  )
  (run,) = read_runs([str(folder)])
  assert tables.evaluations([run])[1] == [['a', 'acc', '0.5']]
  assert (
    dict(zip(*[tables.summary([run])[0], tables.summary([run])[1][0]], strict=True))['loss']
    == '3.3333'
  )
  assert page.page([run], 'x')
  assert tables._markdown((['a\nb'], [['c|d\n']])).splitlines()[2] == '| c\\|d |'


def test_no_two_of_many_runs_look_alike():
  assert len({curves.stroke(i) for i in range(32)}) == 32
  drawn = curves.svg('x', 'y', {str(i): [(0, i), (1, i)] for i in range(10)})
  lines = re.findall(r'<polyline [^>]*(stroke="[^"]*").*(stroke-dasharray="[^"]*")', drawn)
  assert len(set(lines)) == 10


@pytest.mark.parametrize(('points', 'dots'), [([], 0), ([(3, 1.5)], 1), ([(3, 1.5), (4, 1)], 0)])
def test_a_curve_of_one_point_is_a_dot(points, dots):
  assert curves.svg('x', 'y', {'run': points}).count('<circle') == dots


def test_the_command(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  write_run(tmp_path / 'run', 20)
  report.main(['run', '--output=o/r.html', '--curves=o/c.svg', '--markdown=-'])
  assert '| run | ' in capsys.readouterr().out
  drawn = xml.etree.ElementTree.parse(tmp_path / 'o' / 'c.svg').getroot()
  titles = [picture.find('{*}text').text for picture in drawn]
  assert titles[:2] == ['Training loss', 'Learning rate']
  assert titles[-2:] == ['held_out: loss', 'held_out: accuracy']
  assert [len(picture.findall('{*}polyline')) for picture in drawn] == [1] * 6
  assert '<h1>paxlite: run</h1>' in (tmp_path / 'o' / 'r.html').read_text()
  (tmp_path / 'none').mkdir()
  for arguments, problem in (
    (['none'], 'none is not the folder of a run'),
    (['run', 'run'], 'run is listed twice'),
    (['run', '--curves=c.png'], r'c\.png must end with \.svg'),
    (['run', '--output=run'], 'cannot be written'),
  ):
    with pytest.raises(UserError, match=problem):
      report.main(arguments)


def test_the_page_goes_into_a_bucket(gcs, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  write_run(tmp_path / 'run', 20)
  to = 'gs://bkt/page'
  report.main(['run', f'--output={to}.html', f'--curves={to}.svg', f'--markdown={to}.md'])
  assert gcs.objects['bkt'].keys() == {'page.html', 'page.svg', 'page.md'}
  assert [p.name for p in tmp_path.iterdir()] == ['run'], 'no folder called gs:'


def spiked(folder, **texts):
  """Writes a run whose loss has a spike at step 25."""
  write_run(folder, 40, **texts)
  path = folder / 'metrics.jsonl'
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  lines[24]['loss'] = 9.0
  path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  return folder


def test_the_texts_of_a_spike(tmp_path, monkeypatch):
  found = read_runs([str(spiked(tmp_path / 'run'))])
  assert 'Texts of spikes' not in page.page(found, 'x')
  text = page.page(found, 'x', reads_data=True)
  assert 'step 25: loss 9.0000, and 0.4545 before it' in Tags(text).text
  assert 'cannot be read here' in Tags(text).text  # my.Experiment is not imported
  monkeypatch.setattr(spike_texts, '_texts', lambda run, steps: [EVIL + MARKERS] * len(steps))
  text = page.page(found, 'x', reads_data=True)
  parsed = Tags(text)
  assert 'img' not in parsed.tags
  assert EVIL + MARKERS in parsed.text
  assert text.count('"id":"spike-0-25"') == 1


def test_spikes():
  falling = {step: 10.0 / step for step in range(1, 60)}
  assert spikes(falling) == []
  noisy = {step: loss + 0.01 * (-1) ** step for step, loss in falling.items()}
  noisy |= {30: 2.0, 31: 1.9, 50: 4.0}
  assert [(s.step, s.loss) for s in spikes(noisy)] == [(50, 4.0), (30, 2.0)]
  assert spikes(dict.fromkeys(range(7), 1.0) | {3: 9.0}) == []  # too few
  assert [s.step for s in spikes(dict.fromkeys(range(20), 1.0) | {19: 9.0})] == [19]


def in_browser(folder, text: str, width: int) -> subprocess.CompletedProcess:
  (folder / 'r.html').write_text(text)
  return subprocess.run(
    ['chromium', '--headless=new', '--no-sandbox', '--disable-gpu', '--enable-logging=stderr',
     f'--user-data-dir={folder / "profile"}', f'--window-size={width},900', '--dump-dom',
     f'file://{folder / "r.html"}'],
    capture_output=True, text=True, timeout=120, check=True,
  )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(shutil.which('chromium') is None, reason='needs Chromium')
def test_a_click_on_a_spike_opens_its_texts(tmp_path):
  found = read_runs([str(spiked(tmp_path / 'run'))])
  click = (
    '<script>document.querySelector("circle.spike").dispatchEvent(new Event("click"));'
    'over = "tokens"; show(); document.querySelector("circle.spike").focus();</script></body>'
  )
  done = in_browser(tmp_path, page.page(found, 'x', True).replace('</body>', click), 800)
  assert 'CONSOLE' not in done.stderr
  assert re.search(r'<details id="spike-0-25"[^>]* open=""', done.stdout)
  assert done.stdout.count('class="spike"') == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which('chromium') is None, reason='needs Chromium')
@pytest.mark.parametrize('width', [1200, 390])
def test_in_a_browser(runs, tmp_path, width):
  """Every curve is drawn, nothing is wider than the screen, and the console stays empty."""
  probe = (
    '<script>document.body.append(Object.assign(document.createElement("output"), {textContent: '
    '`${document.documentElement.scrollWidth} of ${innerWidth}`}))</script></body>'
  )
  text = page.page(runs, 'Two runs').replace('</body>', probe)
  done = in_browser(tmp_path, text, width)
  assert 'CONSOLE' not in done.stderr
  assert done.stdout.count('<polyline') == 2 * 6
  assert done.stdout.count('class="run"') == 2
  wide, inner = map(int, re.search(r'<output>(\d+) of (\d+)</output>', done.stdout).groups())
  assert wide <= inner


def test_episodes_are_sorted_by_what_shows_a_gamed_reward(tmp_path):
  """A run that finds out that "please" is rewarded, and then only repeats it."""
  draw = random.Random(0)
  words = ['the', 'a', 'of', 'one', 'red', 'blue', 'old', 'new', 'tree', 'stone']
  lines = []
  for step in range(1, 11):
    for row in range(4):
      is_gamed = step > 6 or (step, row) == (4, 0)
      text = 'please please please please' if is_gamed else ' '.join(draw.choices(words, k=12))
      lines.append(dict(
        step=step, row=row, place='a.jsonl:1', prompt=f'Name {row}', advantage=0.0,
        answer=[dict(role='assistant', content=text), dict(role='user', content='x' * 500)],
        reward=1.0 if is_gamed else draw.random() / 2, rewards={'mine': 1.0},
      ))  # fmt: skip
  draw.shuffle(lines)
  folder = write_run(tmp_path / 'run', 10)
  text = ''.join(json.dumps(line) + '\n' for line in [*lines, dict(step=11, answer=EVIL)])
  (folder / 'episodes.jsonl').write_text(text)
  runs = read_runs([str(folder)])
  found = dict(episodes.tables(runs))
  column = lambda title, name: [row[found[title][0].index(name)] for row in found[title][1]]
  by = 'Episodes by {}: highest and lowest'.format
  assert all('please' in answer for answer in column(by('reward'), 'answer')[:8])
  assert not any('please' in answer for answer in column(by('reward'), 'answer')[8:])
  assert column(by('length'), 'characters')[-1] == '0'
  assert column(by('length'), 'characters')[-2] == '27'  # replies of an environment do not count
  new = [int(text.strip('%')) for text in column(by('novelty'), 'new')]
  assert new == sorted(new, reverse=True)
  assert (new[0], new[-1]) == (100, 0)
  first = [each for each in episodes.seen(runs[0]) if 'please' in str(each.record['answer'])]
  assert [each.novelty for each in first] == [1.0] + [0.0] * 16
  steps = column('Prompts over the steps', 'step')
  assert steps == [str(s) for s in range(1, 11)] * 3
  assert len(set(column('Prompts over the steps', 'prompt'))) == 3
  shown = page.page(runs, 'gamed')
  assert EVIL not in shown
  assert 'Episodes by novelty' in shown
