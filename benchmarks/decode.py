"""python benchmarks/decode.py [--rounds=3]

SmolLM2-135M's shape with random weights, float32: prefill and decode against transformers' generate
on torch, in turn, prompts of 128 tokens and 128 new ones, batch 1 and 8. Prints medians and ratios.
"""

import argparse
import statistics
import tempfile
import time

import fiddle as fdl
import jax
import numpy as np

PROMPT, NEW = 128, 128


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--layers', type=int, default=30)
  parser.add_argument('--new', type=int, default=NEW)
  args = parser.parse_args()

  import torch
  import transformers

  from paxlite.decoding import Generator
  from paxlite.inference import experiment_of
  from paxlite.optimizers import path_name
  from paxlite.restoring import Plan, Restore, find_source
  from paxlite.tools import import_weights

  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=args.layers,
    num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True, rms_norm_eps=1e-5,
    rope_theta=1e5, max_position_embeddings=2048, eos_token_id=None, pad_token_id=0,
  )  # fmt: skip
  theirs = transformers.LlamaForCausalLM(config).eval()
  with tempfile.TemporaryDirectory() as folder:
    theirs.save_pretrained(f'{folder}/hf')
    import_weights.main(['--from=hf', f'--path={folder}/hf', f'--to={folder}/w'])
    e = experiment_of(find_source(f'{folder}/w'))
    e = type(e)(**(e.values() | {'USE_REPEATED_LAYER': False, 'FPROP_DTYPE': 'float32'}))
    model = fdl.build(e.task()).model
    from flax.linen import meta

    shapes = meta.unbox(jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32)))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device)
    abstract = {'params': jax.tree.map(like, shapes['params'])}
    plan = Plan(Restore(f'{folder}/w'), abstract)
    load = lambda path, x: plan.load(path_name(path), x)
    params = jax.tree_util.tree_map_with_path(load, abstract)['params']
  generator = Generator(model, params, e.MAX_SEQ_LEN)

  def ours(prompts):
    start = time.perf_counter()
    state = jax.block_until_ready(generator.prefill(prompts, args.new))
    middle = time.perf_counter()
    jax.block_until_ready(generator.extend(state, args.new - 1))
    return middle - start, time.perf_counter() - middle

  def their_generate(prompts):
    ids = torch.tensor(prompts)
    seconds = []
    for new in (1, args.new):
      start = time.perf_counter()
      with torch.no_grad():
        theirs.generate(
          ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False
        )
      seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1] - seconds[0]

  for batch in (1, 8):
    prompts = np.random.default_rng(0).integers(3, 49152, (batch, PROMPT)).tolist()
    found = {ours: [], their_generate: []}
    for run in found:
      run(prompts)
    for _ in range(args.rounds):
      for run, times in found.items():
        times.append(run(prompts))
    for i, (what, tokens) in enumerate(
      (('prefill', batch * PROMPT), ('decode', batch * (args.new - 1)))
    ):
      mine, other = (statistics.median(t[i] for t in times) for times in found.values())
      print(
        f'batch {batch} {what:8}paxlite {tokens / mine:8,.1f} tokens/s   transformers '
        f'{tokens / other:8,.1f} tokens/s   ratio {other / mine:.2f}',
        flush=True,
      )


if __name__ == '__main__':
  main()
