"""What the last word of a command line may become."""

from paxlite.config.attributes import attribute_types
from paxlite.experiments.registry import find
from paxlite.tools.completion import words


def test_attributes_are_those_of_the_experiment():
  found = words(['train', 'TinyGPT', ''])
  assert [w for w in found if w.endswith('=')] == [
    f'{name}=' for name in sorted(attribute_types(find('TinyGPT')))
  ]
  assert words(['train', 'TinyGPT', 'NUM_EXP']) == []
  assert words(['train', 'GLaM126M64E', 'NUM_EXPERTS']) == [
    'NUM_EXPERTS=',
    'NUM_EXPERTS_PER_TOKEN=',
  ]
  assert words(['train', 'mine.MyGPT', 'NUM_EXPERTS']) == [
    'NUM_EXPERTS=',
    'NUM_EXPERTS_PER_TOKEN=',
  ], 'those of all experiments: the module of the user is not imported'
  assert words(['train', 'TinyGPT', '--fdl.NUM_LAY']) == ['--fdl.NUM_LAYERS=']
  assert words(['finetune', 'SmolLM1']) == ['SmolLM135M']
  assert words(['finetune', 'SmolLM135M', 'TRAIN_F']) == ['TRAIN_FILES=']
  assert words(['finetune', 'w', '--method=documents', 'TRAIN_S']) == ['TRAIN_SOURCES=']


def test_classes_of_a_module_of_the_user_without_importing_it(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'lab').mkdir()
  code = 'raise SystemExit\nclass MyGPT(GPT): pass\nclass Plain: pass\n'
  (tmp_path / 'research.py').write_text(code)
  (tmp_path / 'lab' / 'more.py').write_text(code)
  (tmp_path / 'bad.py').write_text('class (')
  assert words(['train', 'research.']) == ['research.MyGPT']
  assert words(['show', 'lab.more.My']) == ['lab.more.MyGPT']
  assert words(['train', 'bad.']) == words(['train', 'none.']) == words(['train', '/etc/x.']) == []
