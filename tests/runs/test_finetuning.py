"""SFT inputs, and a tiny LLaMA that learns a task with SFT and with LoRA."""

import json
import re

import fiddle as fdl
import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.data.tokenizer import open_tokenizer
from paxlite.eval.decoding import decode
from paxlite.experiments.datasets import SftFiles
from paxlite.experiments.llama import LLaMA
from paxlite.finetuning.chats.sft import SftRows, held_out, pack
from paxlite.generation.samples import sampler_of
from paxlite.programs.evaluation import evaluate
from paxlite.programs.run import Run
from paxlite.programs.training import train as program
from paxlite.training.sharded_task import ShardedTask
from tests.support import runs
from tests.support.imported import flat

TEMPLATE = (
  '{% for m in messages %}[{{ m.role }}]\n{{ m.content }}{{ eos_token }}{% endfor %}'
  '{% if add_generation_prompt %}[assistant]\n{% endif %}'
)
CHAT = {'messages': [
  {'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': 'y'},
]}  # fmt: skip


def write(path, records) -> str:
  path.write_text(''.join(json.dumps(r) + '\n' for r in records))
  return str(path)


def rows(path, seq_len=32, **kwargs) -> SftRows:
  return SftRows([path], packaged.VOCAB, seq_len, 8192, **kwargs)


def test_prompts_and_answers_pack_with_the_loss_on_answers(tmp_path):
  records = [dict(inputs=f'number {i} is', targets=f' {i * i}.') for i in range(20)]
  source = rows(write(tmp_path / 'a.jsonl', records))
  tokenizer = open_tokenizer(packaged.VOCAB)
  batch = source.read(np.arange(len(source)))
  found = []
  for r in range(len(source)):
    for segment in range(1, batch['segment_ids'][r].max() + 1):
      here = batch['segment_ids'][r] == segment
      ids, labels = batch['ids'][r][here], batch['labels'][r][here]
      assert ids[0] == tokenizer.bos_id
      np.testing.assert_array_equal(ids[1:], labels[:-1])
      np.testing.assert_array_equal(batch['segment_pos'][r][here], np.arange(len(ids)))
      learned = labels[batch['weights'][r][here] > 0]
      assert learned[-1] == tokenizer.eos_id
      text = tokenizer.decode(ids[1:].tolist() + learned[-1:].tolist())
      found.append((text, tokenizer.decode(learned[:-1].tolist())))
  expected = [(r['inputs'] + r['targets'], r['targets']) for r in records]
  assert sorted(t.strip() for t, _ in found) == sorted(t for t, _ in expected)
  assert sorted(a for _, a in found) == sorted(a for _, a in expected)
  assert not batch['weights'][batch['segment_ids'] == 0].any()
  assert len(source) < 20  # rows are packed


def test_a_chat_learns_every_answer_of_the_assistant(tmp_path):
  messages = [
    dict(role='user', content='hello'), dict(role='assistant', content='good day'),
    dict(role='user', content='and now'), dict(role='assistant', content='farewell'),
  ]  # fmt: skip
  path = write(tmp_path / 'a.jsonl', [dict(messages=messages)])
  source = rows(path, 64, chat_template=TEMPLATE)
  tokenizer = open_tokenizer(packaged.VOCAB)
  batch = source.read(np.array([0]))
  learned = tokenizer.decode_marked(batch['labels'][0][batch['weights'][0] > 0].tolist())
  assert learned == 'good day</s>farewell</s>'


QUESTION, ANSWER = dict(role='user', content='hello'), dict(role='assistant', content='good day')


@pytest.mark.parametrize(
  ('record', 'same'),
  [
    (dict(prompt='hello', completion=' you'), dict(inputs='hello', targets=' you')),
    (
      dict(
        conversations=[{'from': 'human', 'value': 'hello'}, {'from': 'gpt', 'value': 'good day'}]
      ),
      dict(messages=[QUESTION, ANSWER]),
    ),
    (dict(conversations=[QUESTION, ANSWER]), dict(messages=[QUESTION, ANSWER])),
    (dict(instruction='hello', input='', output='good day'), dict(messages=[QUESTION, ANSWER])),
    (
      dict(instruction='say', input='hello', output='good day', system='be short'),
      dict(messages=[dict(role='system', content='be short'),
                     dict(role='user', content='say\n\nhello'), ANSWER]),
    ),
    (dict(prompt='hello', messages=[QUESTION, ANSWER]), dict(messages=[QUESTION, ANSWER])),
  ],
)  # fmt: skip
def test_rows_of_other_formats(record, same, tmp_path):
  read = lambda name, record: rows(
    write(tmp_path / name, [record]), 64, chat_template=TEMPLATE
  ).read(np.array([0]))
  mine, other = read('a.jsonl', record), read('b.jsonl', same)
  for key, value in mine.items():
    np.testing.assert_array_equal(value, other[key], err_msg=key)


def test_a_conversation_without_a_template_says_how_to_give_one(tmp_path):
  path = write(tmp_path / 'a.jsonl', [dict(instruction='hello', output='good day')])
  with pytest.raises(UserError, match=r'no chat template.*CHAT_TEMPLATE=FILE gives one'):
    rows(path)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
  path = tmp_path / 'a.jsonl'
  line = json.dumps(dict(inputs='a', targets='b'))
  path.write_bytes(f'\ufeff{line}\r\n{line}\r\n'.encode())
  assert rows(str(path)).num_examples == 2


def test_rows_fit_and_hold_each_example_once():
  rng = np.random.default_rng(0)
  lengths = rng.integers(1, 100, 500).tolist()
  packed = pack(lengths, 100)
  assert sorted(i for row in packed for i in row) == list(range(500))
  assert max(sum(lengths[i] for i in row) for row in packed) <= 100
  assert len(packed) < 1.1 * sum(lengths) / 100 + 1


@pytest.mark.parametrize(
  ('record', 'match'),
  [
    (dict(text='a'), r'a.jsonl:2: the keys of this record \(text\) match no format'),
    (dict(inputs='a', targets=3), "a.jsonl:2: 'targets' must be a string"),
    (dict(inputs='a', targets=''), 'a.jsonl:2 has no answer'),
    (dict(messages=[]), 'a.jsonl:2: "messages" must be a list'),
    (dict(messages='a'), "a.jsonl:2: 'messages' is not valid JSON"),
    (dict(messages=[dict(role='user', content='a')]), 'a.jsonl:2 has no answer'),
    (dict(messages=[dict(role='bot', content='a')]), "a.jsonl:2: a message has the role 'bot'"),
    (
      dict(conversations=[{'from': 'bot', 'value': 'a'}]),
      "a.jsonl:2: a message has the role 'bot'",
    ),
    (dict(conversations='a'), "a.jsonl:2: 'conversations' is not valid JSON"),
    (dict(conversations=[3]), 'a.jsonl:2: "conversations" must be a list'),
    (dict(instruction='a', output=3), "a.jsonl:2: 'output' must be a string"),
    (dict(instruction='a', input=3, output='b'), "a.jsonl:2: 'input' must be a string"),
    (dict(instruction='a', output=''), 'a.jsonl:2 has no answer'),
    (dict(prompt='a', completion=''), 'a.jsonl:2 has no answer'),
    (
      dict(prompt='a', response='b'),
      r'a.jsonl:2: .* \(prompt, response\) .* no format .*: rename them to messages .*Alpaca',
    ),
    (
      dict(messages=[dict(role='assistant', content=None, tool_calls=[dict(name='f')])]),
      r'a.jsonl:2: the chat template leaves out the call of f \(message 1\)',
    ),
    (
      dict(messages=[dict(role='assistant', content='a')], tools=[dict(name='f')]),
      'a.jsonl:2: the chat template leaves out the tool f',
    ),
    (
      dict(inputs='word ' * 200, targets='a'),
      r'a.jsonl:2 has .* tokens; a sequence holds MAX_SEQ_LEN \+ 1 = 33 tokens',
    ),
  ],
)
def test_a_bad_line_is_named(record, match, tmp_path):
  path = write(tmp_path / 'a.jsonl', [dict(inputs='a', targets='b'), record])
  with pytest.raises(UserError, match=match):
    rows(path, chat_template=TEMPLATE)


def test_a_tokenizer_of_another_model(tmp_path):
  path = write(tmp_path / 'a.jsonl', [dict(inputs='a', targets='b')])
  with pytest.raises(UserError, match="it is another model's tokenizer"):
    SftRows([path], packaged.VOCAB, 32, 49152)


def test_long_examples_are_left_out_or_cut(tmp_path, caplog):
  records = [dict(inputs='a', targets='b'), dict(inputs='a', targets='word ' * 200)]
  path = write(tmp_path / 'a.jsonl', records)
  skipped, cut = rows(path, too_long='skip'), rows(path, too_long='truncate')
  assert (skipped.num_examples, skipped.num_skipped) == (1, 1)
  assert '1 example of more than MAX_SEQ_LEN + 1 = 33 tokens is left out, 1 stays' in caplog.text
  assert (cut.num_examples, cut.num_skipped) == (2, 0)
  assert cut.read(np.arange(len(cut)))['weights'].sum() > 30


def examples(source) -> set[bytes]:
  return {source.example(i).ids.tobytes() for i in range(source.num_examples)}


def test_what_is_left_out_of_both_parts_is_said_once(tmp_path, caplog):
  records = [dict(inputs=f'number {i} is', targets=f' {i * i}.') for i in range(96)]
  records += [dict(inputs='a', targets='word ' * 200)] * 2 + [dict(inputs='a')] * 2
  path = write(tmp_path / 'a.jsonl', records)
  split = lambda name: rows(
    path, split=name, held_out_share=0.1, too_long='skip', skip_unreadable=True
  )
  parts = split('train'), split('held_out')
  assert sum(part.num_examples for part in parts) == 96
  said = [record.getMessage() for record in caplog.records]
  assert [line for line in said if 'left out' in line] == said
  assert len(said) == 2
  assert '2 of 100 records cannot be read, and are left out' in said[0]
  assert '2 examples of more than MAX_SEQ_LEN + 1 = 33 tokens are left out, 96 stay' in said[1]


def test_a_share_is_held_out_and_stays_so(tmp_path):
  records = [dict(inputs=f'number {i} is', targets=f' {i * i}.') for i in range(100)]
  path = write(tmp_path / 'a.jsonl', records)
  split = lambda split, path=path: rows(path, split=split, held_out_share=0.1)
  train, apart = split('train'), split('held_out')
  assert (train.num_examples, apart.num_examples) == (90, 10)
  assert not examples(train) & examples(apart)
  assert examples(train) | examples(apart) == examples(rows(path))
  mixed = write(tmp_path / 'b.jsonl', [*records[50:], *records[:50]])
  assert examples(split('held_out', mixed)) == examples(apart)
  more = write(
    tmp_path / 'c.jsonl', [*records, *[dict(inputs='x', targets=str(i)) for i in range(9)]]
  )
  assert len(examples(split('held_out', more)) & examples(apart)) >= 8
  twice = write(tmp_path / 'd.jsonl', records * 2)
  assert examples(split('held_out', twice)) == examples(apart)
  assert split('held_out', twice).num_examples == 20
  assert split('train').fingerprint == train.fingerprint


def test_of_few_examples_one_is_held_out(tmp_path):
  same = write(tmp_path / 'a.jsonl', [dict(inputs='a', targets='b')] * 9)
  with pytest.raises(UserError, match=r'9 examples are too few, or too similar, .*EVAL_FILES'):
    rows(same, split='train', held_out_share=0.1)
  assert held_out([0, 1, 2], 0.01).sum() == 1


def test_a_held_out_share_is_an_attribute(tmp_path):
  path = write(tmp_path / 'a.jsonl', [dict(inputs=f'{i} is', targets='b') for i in range(40)])
  e = Squares(TRAIN_FILES=[path], EVAL_FRACTION=0.05)
  e.validate()
  assert fdl.build(e.train_input()).source.num_examples == 38
  assert fdl.build(e.eval_inputs()['held_out']).source.num_examples == 2
  for values, match in [
    (dict(EVAL_FILES=['b.jsonl'], EVAL_FRACTION=0.1), 'but EVAL_FILES is also set: leave one out'),
    (dict(EVAL_FRACTION=0.9), 'EVAL_FRACTION=0.9 must be 0, or'),
  ]:
    with pytest.raises(UserError, match=match):
      Squares(TRAIN_FILES=[path], **values).validate()


@pytest.mark.parametrize(
  ('record', 'stated', 'prompt', 'verb'),
  [
    (CHAT, None, '[user]\na[assistant]\n', 'answering'),
    (CHAT, False, 'a', 'continuing'),
    (dict(inputs='x', targets='y'), None, 'a', 'continuing'),
    (dict(inputs='x', targets='y'), True, '[user]\na[assistant]\n', 'answering'),
  ],
)
def test_the_prompt_of_a_sample_is_a_message_where_chats_are_learned(
  record, stated, prompt, verb, tmp_path
):
  path = write(tmp_path / 'a.jsonl', [record])
  e = Squares(
    TRAIN_FILES=[path], CHAT_TEMPLATE=TEMPLATE, SAMPLE_PROMPTS=['a'], SAMPLE_CHAT=stated,
    PERCORE_BATCH_SIZE=1,
  )  # fmt: skip
  data = fdl.build(e.train_input())
  task = ShardedTask(fdl.build(e.build_task()), e.mesh(), e.rules, e.SEED)
  sampler = sampler_of(e, task, data)
  assert sampler.tokenizer.decode(sampler.ids('a')) == prompt
  assert sampler.verb == verb
  assert len(sampler.description) == (verb == 'answering')


def test_a_prompt_that_is_too_long_is_refused_before_training(tmp_path):
  path = write(tmp_path / 'a.jsonl', [CHAT])
  e = Squares(TRAIN_FILES=[path], CHAT_TEMPLATE=TEMPLATE, SAMPLE_PROMPTS=['word ' * 40])
  task = ShardedTask(fdl.build(e.build_task()), e.mesh(), e.rules, e.SEED)
  with pytest.raises(UserError, match=r'of a sample: it has .* tokens; the limit is 31'):
    sampler_of(e, task, fdl.build(e.train_input()))


def test_a_folder_of_weights_is_no_run(tmp_path):
  (tmp_path / 'state').mkdir()
  for mode, match in (
    (evaluate, r'holds weights, not a run: paxlite zero-shot /\S+ --tasks=task\.json'),
    (decode, 'holds weights, not a run: paxlite generate /'),
  ):
    with pytest.raises(UserError, match=match):
      mode(Run(Squares(), tmp_path))
  assert [p.name for p in tmp_path.iterdir()] == ['state']


def test_before_needs_weights_and_a_checkpoint(tmp_path):
  with pytest.raises(UserError, match='began without weights'):
    evaluate(Run(Squares(), tmp_path), before=True)


class Squares(SftFiles, LLaMA):
  """The answer to 'x' is the next letter of the alphabet, which a model can memorize."""

  NUM_LAYERS = 2
  NUM_HEADS = 4
  NUM_KV_HEADS = 2
  MODEL_DIMS = 64
  HIDDEN_DIMS = 128
  VOCAB_SIZE = 8192
  VOCAB_PATH = packaged.VOCAB
  MAX_SEQ_LEN = 32
  FPROP_DTYPE = 'float32'
  PERCORE_BATCH_SIZE = 4
  LEARNING_RATE = 3e-3
  WEIGHT_DECAY = 0.0
  LR_COS_WARMUP = 10
  LR_COS_DECAY_END = 150
  MAX_STEPS = 150
  SUMMARY_INTERVAL_STEPS = 10
  EVAL_INTERVAL_STEPS = 1000


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_tiny_llama_learns_by_sft_and_lora_leaves_it_as_it_is(tmp_path, capsys):
  words = ['alpha', 'beta', 'gamma', 'delta', 'epsilon', 'zeta', 'eta', 'theta', 'iota', 'kappa']
  pairs = lambda shift: [
    dict(inputs=f'{w} goes before', targets=f' {words[(i + shift) % 10]}')
    for i, w in enumerate(words)
  ]
  first, second = write(tmp_path / 'a.jsonl', pairs(1)), write(tmp_path / 'b.jsonl', pairs(3))

  def train(folder, **changes):
    experiment = Squares(**changes)
    experiment.validate()
    program(Run(experiment, folder))
    return runs.losses(folder)

  def answers(folder, prompts: str, **changes) -> list[str]:
    flags = [f'--fdl.{k}={v}' for k, v in changes.items()]
    runs.run(
      folder, '--mode=decode', f"--fdl.DECODE_FILES=['{prompts}']", '--fdl.MAX_DECODE_STEPS=8',
      *flags, config='tests.runs.test_finetuning.Squares',
    )  # fmt: skip
    (out,) = folder.glob('decoded_*.jsonl')
    records = runs.records(folder, out.name)
    assert [r['inputs'] for r in records] == [r['inputs'] for r in pairs(0)]
    return [r['prediction'] for r in records]

  sft = tmp_path / 'sft'
  losses = train(sft, TRAIN_FILES=[first])
  assert losses[150] < 0.05 < 5 < losses[10]
  assert answers(sft, first, TRAIN_FILES=f"['{first}']") == [r['targets'] for r in pairs(1)]

  changes = dict(
    TRAIN_FILES=[second], USE_LORA=True, LORA_RANK=16, CHECKPOINT_RESTORE_PATH=str(sft),
    LEARNING_RATE=1e-2, MAX_STEPS=60, LR_SCHEDULE='constant', SUMMARY_INTERVAL_STEPS=1,
  )  # fmt: skip
  lora = tmp_path / 'lora'
  losses = train(lora, **changes)
  assert losses[60] < 0.05 < 1 < losses[1]
  assert answers(lora, second, **changes) == [r['targets'] for r in pairs(3)]

  generate = lambda folder, code: runs.module(
    'paxlite', 'generate', str(folder), 'alpha goes before', '--before', '--max_new_tokens=8',
    '--import=tests.runs.test_finetuning', code=code,
  )  # fmt: skip
  before, after = generate(lora, 0).stdout.split('After, ')
  assert before.startswith(f'Before, {sft}')
  assert [shown.split(':\n')[1].strip() for shown in (before, after)] == ['beta', 'delta']
  assert 'started without weights, so it has no initial weights' in generate(sft, 2).stderr

  capsys.readouterr()
  evaluate(Run(Squares(**changes, EVAL_FILES=[second]), lora), before=True)
  lines = capsys.readouterr().out
  found = re.findall(r'^eval eval at step (\d+): loss ([\d.]+)', lines, re.MULTILINE)
  assert [step for step, _ in found] == ['0', '60']
  assert float(found[1][1]) < 0.05 < 1 < float(found[0][1])

  base = flat(Run(Squares(TRAIN_FILES=[first]), sft).trainer().store.initial()[0].params)
  tuned = flat(Run(Squares(**changes), lora).trainer().store.initial()[0].params)
  for name, value in base.items():
    np.testing.assert_array_equal(value, tuned[name])
