"""python -m benchmarks.on_policy FOLDER [--texts=500] [--svg=docs/on_policy.svg] [--json=…]

What a student of a tenth of its teacher's size gains per token: by on-policy distillation, and by
fine-tuning on texts that the teacher has written. A prompt has opening brackets, such as `([<=`,
and the answer closes them, `>])`. The teacher learns from right answers and writes TEXTS. For each
seed, a new student first learns from these texts, and then goes on in both ways from the same
checkpoint, with the same prompts, learning rates and batches of as many answers. Each point is the
share of right greedy answers to 300 other prompts.
"""

import argparse
import datetime
import json
import pathlib
import random

import jax
import numpy as np

import paxlite
from benchmarks.convergence import svg
from paxlite.experiments.datasets import SftFiles
from paxlite.experiments.llama import LLaMA
from paxlite.finetuning.distillation.on_policy import OnPolicyDistillation

PAIRS = {'(': ')', '[': ']', '{': '}', '<': '>'}
ROWS, WARM_STEPS, STEPS, EVERY = 32, 300, 200, 20
HELD_OUT = 300
MOST, NEW = 10, 12  # brackets of a prompt, and tokens of an answer


class Brackets(LLaMA):
  """The teacher: 1.2 million parameters."""

  NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, MODEL_DIMS, HIDDEN_DIMS = 6, 4, 4, 128, 384
  VOCAB_SIZE, START_ID, MAX_SEQ_LEN = 16, 1, 24
  FPROP_DTYPE, USE_REPEATED_LAYER, PACKED_INPUT = 'float32', False, False
  ICI_MESH_SHAPE, DCN_MESH_SHAPE, PERCORE_BATCH_SIZE = [1, 1, 1], [1, 1, 1], ROWS
  LEARNING_RATE, LR_SCHEDULE, SUMMARY_INTERVAL_STEPS = 1e-3, 'constant', 1
  EVAL_TASKS_IN_TRAINING, EVAL_INTERVAL_STEPS, CHECKPOINT_EVERY_N_STEPS = True, EVERY, 10_000


class Taught(SftFiles, Brackets):
  """Learns from prompts with answers."""


class SmallTaught(Taught):
  """The student: 0.11 million parameters."""

  NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS = 2, 64, 192


class SmallOnPolicy(OnPolicyDistillation, Brackets):
  """The student that is taught on its own answers."""

  NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, MAX_NEW_TOKENS = 2, 64, 192, NEW


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--seeds', type=int, default=3)
  parser.add_argument('--texts', type=int, default=500, help='prompts that the teacher answers')
  parser.add_argument('--rates', nargs='*', type=float, default=[3e-4, 1e-3])
  parser.add_argument('--svg', type=pathlib.Path)
  parser.add_argument('--json', type=pathlib.Path)
  args = parser.parse_args()
  folder, records = args.folder, []
  write_data(folder)
  shared = dict(VOCAB_PATH=str(folder), EVAL_TASKS=[str(folder / 'asked.json')])
  right = dict(TRAIN_FILES=[str(folder / 'right.jsonl')], MAX_STEPS=600, EVAL_INTERVAL_STEPS=600)
  teacher = paxlite.train(Taught(**shared, **right), folder / 'teacher')
  records.append(dict(run='teacher', parameters=size(teacher), exact_match=points(teacher)[-1][1]))
  texts = folder / 'texts.jsonl'
  if not texts.exists():
    write_texts(teacher, folder / 'right.jsonl', texts, args.texts)
  answers = [json.loads(line)['completion'] for line in texts.read_text().splitlines()]
  length = 1 + sum(map(len, answers)) / len(answers)  # with the token that ends it
  for seed in range(args.seeds):
    values = shared | dict(TRAIN_FILES=[str(texts)], SEED=seed)
    warm = SmallTaught(**values, MAX_STEPS=WARM_STEPS, EVAL_INTERVAL_STEPS=WARM_STEPS)
    student = paxlite.train(warm, folder / f'warm{seed}')
    first = points(student)[-1][1]
    for rate in args.rates:
      more = dict(MAX_STEPS=STEPS, LEARNING_RATE=rate, LR_SCHEDULE='linear', SEED=100 + seed)
      more |= dict(CHECKPOINT_RESTORE_PATH=str(folder / f'warm{seed}'))
      for name, e in (
        ('texts', SmallTaught(**values | more)),
        ('answers', SmallOnPolicy(**values | more, TEACHER=str(folder / 'teacher'))),
      ):
        run = paxlite.train(e, folder / f'{name}{seed}_{rate:g}')
        tokens = run.metrics.get('answer_tokens', np.full(STEPS, length))
        at = [0, *np.cumsum(ROWS * tokens).round().astype(int).tolist()]
        curve = [(0, first), *((at[step], x) for step, x in points(run))]
        records.append(dict(run=name, seed=seed, rate=rate, parameters=size(run), curve=curve))
        print(json.dumps(records[-1]), flush=True)
  about = dict(date=datetime.date.today().isoformat(), jax=jax.__version__)
  lines = [json.dumps({**record, **about}) for record in records]
  if args.json:
    args.json.write_text('\n'.join(lines) + '\n')
  if args.svg:
    args.svg.write_text(svg(means(records[1:], args.rates[0]), legend=300))


def means(records: list[dict], rate: float) -> dict[str, list[tuple[int, float]]]:
  """Returns the mean curve over the seeds of each way; their tokens differ by little."""
  found = {}
  names = {'answers': 'its own answers', 'texts': "the teacher's texts"}
  for name, label in names.items():
    curves = [r['curve'] for r in records if r['run'] == name and r['rate'] == rate]
    each = zip(*curves, strict=True)
    middle = lambda at: [sum(values) / len(values) for values in zip(*at, strict=True)]
    found[label] = [(round(x), y) for x, y in map(middle, each)]
  return found


def points(run: paxlite.TrainedModel) -> list[tuple[int, float]]:
  """Returns steps, each with the share of right answers."""
  lines = (run.folder / 'eval_metrics.jsonl').read_text().splitlines()
  return [(r['step'], r['exact_match']) for r in map(json.loads, lines) if 'exact_match' in r]


def size(run: paxlite.TrainedModel) -> int:
  return sum(x.size for x in jax.tree.leaves(run.params))


def write_texts(
  teacher: paxlite.TrainedModel, prompts: pathlib.Path, file: pathlib.Path, count: int
) -> None:
  """Writes what the teacher answers at temperature 1."""
  lines = [json.loads(line)['prompt'] for line in prompts.read_text().splitlines()[:count]]
  inference = teacher.inference
  engine = inference.engine(paxlite.Sampling(temperature=1.0), most_rows=128)
  asked = [inference.encode(prompt) for prompt in lines]
  texts = [inference.tokenizer.decode(ids) for ids in engine.continuations(asked, NEW)]
  pairs = zip(lines, texts, strict=True)
  file.write_text(''.join(json.dumps(dict(prompt=p, completion=a)) + '\n' for p, a in pairs if a))


def write_data(folder: pathlib.Path) -> None:
  """Writes prompts with right answers, and a tokenizer that has a token for each character."""
  folder.mkdir(parents=True, exist_ok=True)
  tokens = ['<pad>', '<s>', '</s>', '=', *PAIRS, *PAIRS.values()]
  plain = dict(special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)
  tokenizer = {
    'version': '1.0',
    'added_tokens': [dict(id=i, content=t, **plain) for i, t in enumerate(tokens[:3])],
    'pre_tokenizer': {
      'type': 'Split', 'pattern': {'String': ''}, 'behavior': 'Isolated', 'invert': False
    },
    'decoder': {'type': 'Fuse'},
    'model': {
      'type': 'WordLevel', 'vocab': {t: i for i, t in enumerate(tokens)}, 'unk_token': '<pad>'
    },
  }  # fmt: skip
  (folder / 'tokenizer.json').write_text(json.dumps(tokenizer))
  (folder / 'tokenizer_config.json').write_text(json.dumps({'eos_token': '</s>'}))
  draw = random.Random(0)
  for name, count in (('right', 20_000), ('held_out', HELD_OUT)):
    lines = []
    for _ in range(count):
      opened = draw.choices([*PAIRS], k=draw.randint(4, MOST))
      answer = ''.join(PAIRS[c] for c in reversed(opened))
      lines.append(json.dumps(dict(prompt=''.join(opened) + '=', completion=answer)) + '\n')
    (folder / f'{name}.jsonl').write_text(''.join(lines))
  asked = dict(
    kind='generate', files='held_out.jsonl', doc_to_text='{{prompt}}',
    doc_to_target='{{completion}}', max_new_tokens=NEW,
  )  # fmt: skip
  (folder / 'asked.json').write_text(json.dumps(asked))


if __name__ == '__main__':
  main()
