"""Adapters of peft, which continue here, and ours, which peft loads: the logits are the same."""

import json
import random
import re

import fiddle as fdl
import jax
import numpy as np
import pytest
from flax.linen import meta

from paxlite.adapters.factors import LowRankFactors
from paxlite.checkpointing.restore import Restore, RestorePlan
from paxlite.checkpointing.source import find_source
from paxlite.checkpointing.variables import Variable
from paxlite.core.errors import UserError
from paxlite.core.variable_names import path_name
from paxlite.experiments.llama import LLaMA
from paxlite.programs.launch import build_experiment
from paxlite.programs.run import Run
from paxlite.programs.training import train
from paxlite.weights import huggingface
from paxlite.weights.adapter_reader import read_adapter
from paxlite.weights.commands import export_weights, import_weights
from paxlite.weights.lora import on_hub, write_adapter
from tests.support.families import theirs
from tests.support.frozen_forms import decoded, sharded
from tests.support.imported import flat, loaded, nested

# peft's names in a family, of projections and of experts
EXPERTS = ['mlp.experts.gate_up_proj', 'mlp.experts.down_proj']
ATTENTION = ['q_proj', 'k_proj', 'v_proj', 'o_proj']
DENSE = [*ATTENTION, 'gate_proj', 'up_proj', 'down_proj']
FAMILIES: dict[str, tuple[list[str], list[str]]] = {
  'llama yarn': (DENSE, []),
  'qwen3_moe': (ATTENTION, EXPERTS),
  'qwen3_next': ([*ATTENTION, 'in_proj_qkvz', 'in_proj_ba', 'out_proj'], EXPERTS),
  'qwen3_5_text': (
    [*DENSE, 'in_proj_qkv', 'in_proj_z', 'in_proj_b', 'in_proj_a', 'out_proj'], [],
  ),
  'phi3': (['qkv_proj', 'o_proj', 'gate_up_proj', 'down_proj'], []),
  'gpt_neox': (['query_key_value', 'dense_h_to_4h'], []),
  'gpt_oss': (ATTENTION, EXPERTS),
  'mixtral': (ATTENTION, EXPERTS),
  'gemma2': (DENSE, []),
}  # fmt: skip


def drawn(family: str, seed: int) -> dict:
  """Returns random values of a LoraConfig for a family."""
  rng = random.Random(f'{family} {seed}')
  linear, experts = FAMILIES[family]
  targets = rng.sample(linear, rng.randint(1, len(linear)))
  config = dict(
    r=rng.choice([2, 3, 4]), lora_alpha=rng.choice([1, 4, 6.5]), use_rslora=rng.random() < 0.5,
    lora_dropout=rng.choice([0, 0.3]), target_modules=targets,
  )  # fmt: skip
  if experts and rng.random() < 0.7:
    config |= dict(lora_dropout=0, target_parameters=rng.sample(experts, rng.randint(1, 2)))
  elif rng.random() < 0.4:
    config['use_dora'] = True
  if rng.random() < 0.4:
    config['layers_to_transform'] = [1]
  if rng.random() < 0.6:
    config['rank_pattern'] = {targets[0]: 5}
  if rng.random() < 0.6:
    config['alpha_pattern'] = {targets[-1]: 2}
  if rng.random() < 0.4:
    config['modules_to_save'] = ['lm_head'] if family == 'qwen3_moe' else []
  return config


def with_noise(model):
  """Gives what peft trains random values."""
  import torch

  torch.manual_seed(1)
  for name, parameter in model.named_parameters():
    if any(word in name for word in ('lora_', 'modules_to_save', 'trainable_tokens')):
      parameter.data += torch.randn_like(parameter) * 0.1
  return model.eval()


def logits_of(model, ids) -> np.ndarray:
  import torch

  with torch.no_grad():
    return model(torch.tensor(ids)).logits.numpy()


def ours(folder, ids) -> np.ndarray:
  _, model, params = loaded(folder)
  with jax.default_matmul_precision('highest'):
    return np.asarray(jax.jit(model.apply)({'params': params}, ids))


def both_ways(base, config: dict, tmp_path) -> tuple[float, float, float, float]:
  """Takes an adapter of peft from there to here, and back.

  Returns the largest difference of our logits, of those of peft with our adapter, and of the merged
  model, and the effect of the adapter: all relative to the largest logit.
  """
  peft = pytest.importorskip('peft')
  from transformers import AutoModelForCausalLM

  base.save_pretrained(tmp_path / 'hf')
  adapted = with_noise(peft.get_peft_model(base, peft.LoraConfig(**config)))
  adapted.save_pretrained(tmp_path / 'theirs')
  ids = np.random.default_rng(0).integers(3, 90, (2, 20))
  wanted = logits_of(adapted, ids)
  with adapted.disable_adapter():
    plain = logits_of(adapted, ids)
  import_weights.main([str(tmp_path / 'hf'), f'--to={tmp_path / "base"}'])
  import_weights.main(
    [str(tmp_path / 'theirs'), f'--to={tmp_path / "ours"}', f'--base_weights={tmp_path / "base"}']
  )
  for to in ('peft', 'hf'):
    export_weights.main([str(tmp_path / 'ours'), f'--to={to}', f'--path={tmp_path / to}_back'])
  fresh = lambda name: AutoModelForCausalLM.from_pretrained(
    tmp_path / name, attn_implementation='eager'
  ).eval()
  again = peft.PeftModel.from_pretrained(fresh('hf'), tmp_path / 'peft_back').eval()
  found = [ours(tmp_path / 'ours', ids), logits_of(again, ids), logits_of(fresh('hf_back'), ids)]
  largest = np.abs(wanted).max()
  return tuple(float(np.abs(x - wanted).max() / largest) for x in (*found, plain))


@pytest.mark.cases(fast=1, slow=5)
@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('family', FAMILIES)
def test_an_adapter_of_peft_computes_the_same_here_and_ours_there(family, seed, tmp_path):
  pytest.importorskip('transformers')
  config = drawn(family, seed)
  here, there, merged, effect = both_ways(theirs(family), config, tmp_path)
  assert max(here, merged) < 1e-5, config
  assert there < 1e-6, config
  assert effect > 1e-2, config


@pytest.mark.parametrize('targets', [EXPERTS, []])
def test_experts_are_read_without_the_dropout_that_they_were_trained_with(
  targets, tmp_path, caplog
):
  pytest.importorskip('transformers')
  peft = pytest.importorskip('peft')
  base = theirs('qwen3_moe')
  base.save_pretrained(tmp_path / 'hf')
  import_weights.main([str(tmp_path / 'hf'), f'--to={tmp_path / "base"}'])
  config = peft.LoraConfig(r=2, target_modules=['q_proj'], target_parameters=targets)
  with_noise(peft.get_peft_model(base, config)).save_pretrained(tmp_path / 'adapter')
  file = tmp_path / 'adapter' / 'adapter_config.json'
  read = lambda: read_adapter(tmp_path / 'adapter', find_source(tmp_path / 'base'))
  _, wanted = read()
  file.write_text(json.dumps(json.loads(file.read_text()) | dict(lora_dropout=0.25)))
  caplog.clear()
  e, found = read()
  assert (0 if targets else 0.25) == e.LORA_DROPOUT
  assert ('lora_dropout=0.25 is read as 0' in caplog.text) == bool(targets)
  jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize('family', ['gemma2', 'qwen3_moe'])
def test_an_embedding_that_is_trained_whole_is_also_the_head_where_they_are_one(family, tmp_path):
  pytest.importorskip('transformers')
  base = theirs(family, tie_word_embeddings=True)
  config = dict(
    r=2, target_modules=['q_proj'], modules_to_save=['embed_tokens'], ensure_weight_tying=True
  )
  here, there, merged, effect = both_ways(base, config, tmp_path)
  assert max(here, there, merged) < 1e-5 < 1e-2 < effect


BAD = {
  "LORA_TARGETS: 'q_porj' is not a weight of LLaMA.* Did you mean q_proj": dict(
    LORA_TARGETS=['q_porj']
  ),
  "LORA_TARGETS: 'embed_tokens' is not a matrix of a layer.* LORA_MODULES_TO_SAVE": dict(
    LORA_TARGETS=['embed_tokens']
  ),
  'LORA_MODULES_TO_SAVE: .*q_proj is a matrix of a layer': dict(LORA_MODULES_TO_SAVE=['q_proj']),
  'LORA_LAYERS=.7.: layer 7 has none': dict(LORA_LAYERS=[7]),
  'a repeated stack has one array for all layers: USE_REPEATED_LAYER=False': dict(LORA_LAYERS=[1]),
  'LORA_MODULES_TO_SAVE names model.layers.1.input_layernorm alone.*=False': dict(
    LORA_MODULES_TO_SAVE=['model.norm', 'layers.1.input_layernorm']
  ),
  "LORA_RANK_PATTERN: 'q_proj' must be NAME=NUMBER": dict(LORA_RANK_PATTERN=['q_proj']),
  "LORA_RANK_PATTERN: 'q_proj=1.5' must be": dict(LORA_RANK_PATTERN=['q_proj=1.5']),
  "LORA_ALPHA_PATTERN: 'o_proj' matches no weight with factors": dict(
    LORA_TARGETS=['q_proj'], LORA_ALPHA_PATTERN=['o_proj=2']
  ),
  'give these weights one alpha': dict(
    LORA_ALPHA_PATTERN=['layers.0.*q_proj=2'], USE_REPEATED_LAYER=False
  ),
}


@pytest.mark.parametrize('message', BAD)
def test_what_has_no_factors_is_refused_in_one_line(message):
  e = LLaMA(**(SIZES | BAD[message]), USE_LORA=True)
  with pytest.raises(UserError, match=message) as found:
    e.validate()
  assert '\n' not in str(found.value)


SIZES = dict(
  NUM_LAYERS=2, NUM_HEADS=2, NUM_KV_HEADS=2, MODEL_DIMS=16, HIDDEN_DIMS=20, VOCAB_SIZE=32,
  MAX_SEQ_LEN=8, USE_REPEATED_LAYER=True,
)  # fmt: skip


def shapes(e) -> dict[str, tuple[int, ...]]:
  model = fdl.build(e.build_task()).model
  made = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32))
  leaves = jax.tree_util.tree_leaves_with_path(meta.unbox(made)['params'])
  return {path_name(path): x.shape for path, x in leaves}


def test_only_what_is_named_has_factors_in_a_repeated_stack_too():
  e = LLaMA(**SIZES, USE_LORA=True, LORA_TARGETS=['v_proj', 'ffn_layer2'], LORA_RANK=3)
  found = {n.rpartition('/')[0].removeprefix('transformer/') for n in shapes(e) if 'lora_' in n}
  assert found == {'repeat/self_attention/qkv/combined', 'repeat/ff_layer/ffn_layer2'}


@pytest.mark.parametrize('seed', range(6))
def test_the_weights_of_the_layers_that_are_named_are_trained_whole_and_no_others(seed):
  rng = random.Random(seed)
  layers = rng.sample(range(3), rng.randint(1, 3))
  names = [f'layers.{i}.input_layernorm' for i in layers]
  sizes = SIZES | dict(NUM_LAYERS=3, USE_REPEATED_LAYER=False)
  e = LLaMA(**sizes, USE_LORA=True, LORA_MODULES_TO_SAVE=[*names, 'post_attention_layernorm'])
  whole = LowRankFactors(e).whole_variables
  of = lambda i, norm: f'transformer/x_layers_{i}/{norm}/scale'
  every = [of(i, norm) for i in range(3) for norm in ('layer_norm', 'ff_layer_norm')]
  found = {n for n in every if any(re.fullmatch(p, n) for p in whole)}
  assert found == {*every} - {of(i, 'layer_norm') for i in {*range(3)} - {*layers}}
  if len(layers) == 3:
    assert LowRankFactors(e.replaced(USE_REPEATED_LAYER=True)).whole_variables == whole


def test_an_end_of_a_name_names_all_weights_with_it_as_in_peft():
  e = LLaMA(**SIZES, USE_LORA=True, LORA_MODULES_TO_SAVE=['norm'])
  whole = LowRankFactors(e).whole_variables
  of_layers = [f'transformer/repeat/{norm}/scale' for norm in ('layer_norm', 'ff_layer_norm')]
  norms = ['final_ln/scale', *of_layers]
  assert all(any(re.fullmatch(p, n) for p in whole) for n in norms)
  assert len(whole) == len(norms)


@pytest.mark.slow
def test_the_part_of_a_combined_weight_without_factors_stays_as_it_is():
  """The columns beyond the rank of a part change nothing, and have no gradient."""
  e = LLaMA(
    **SIZES, USE_LORA=True, LORA_TARGETS=['q_proj', 'v_proj'], LORA_RANK_PATTERN=['v_proj=4'],
    LORA_RANK=2, LORA_ALPHA=3.0,
  )  # fmt: skip
  model, ids = fdl.build(e.build_task()).model, np.arange(8)[None] % 32
  params = meta.unbox(jax.jit(model.init)(jax.random.key(0), ids))['params']
  params = jax.tree.map(lambda x: x + 0.1, params)
  grads = jax.jit(jax.grad(lambda p: model.apply({'params': p}, ids).var()))(params)
  qkv = grads['transformer']['repeat']['self_attention']['qkv']['combined']
  a, b = np.abs(qkv['lora_a']).max((0, 2)), np.abs(qkv['lora_b']).max((0, 2))  # [3, rank]
  assert (a > 0).tolist() == (b > 0).tolist() == [[1, 1, 0, 0], [0] * 4, [1] * 4]


def test_an_adapter_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
  pytest.importorskip('transformers')
  peft = pytest.importorskip('peft')
  base = theirs('llama yarn')
  base.save_pretrained(tmp_path / 'hf')
  import_weights.main([str(tmp_path / 'hf'), f'--to={tmp_path / "base"}'])
  adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=['q_proj']))
  adapted.save_pretrained(tmp_path / 'adapter')
  to = ['--to=' + str(tmp_path / 'new'), f'--base_weights={tmp_path / "base"}']
  with pytest.raises(UserError, match='set --base_weights=FOLDER to its base weights'):
    import_weights.main([str(tmp_path / 'adapter'), to[0]])
  file = tmp_path / 'adapter' / 'adapter_config.json'
  stated = json.loads(file.read_text())
  for changes, message in [
    (dict(peft_type='LOHA'), "peft_type 'LOHA' is not supported"),
    (dict(lora_bias=True), 'lora_bias=True is not supported: merge the adapter'),
    (dict(r=0), 'r=0 and lora_alpha=8 must be above 0'),
  ]:
    file.write_text(json.dumps(stated | changes))
    with pytest.raises(UserError, match=message):
      import_weights.main([str(tmp_path / 'adapter'), *to])
  assert not (tmp_path / 'new').exists()


PLAIN = None, True, False, 'gaussian', 'eva', 'orthogonal'


@pytest.mark.parametrize(
  'begun', ['pissa', 'pissa_niter_4', 'olora', 'corda', 'loftq', 'lora_ga', 'unknown', 1.5]
)
def test_beginnings_that_change_the_weights_are_refused_and_others_are_not(begun, tmp_path):
  kept = [{}, *({'init_lora_weights': x} for x in PLAIN)]
  for state in (*kept, {'init_lora_weights': begun}):
    stated = dict(peft_type='LORA', r=2, lora_alpha=4) | state
    (tmp_path / 'adapter_config.json').write_text(json.dumps(stated))
    of_beginning = state.get('init_lora_weights') == begun
    message = 'path_initial_model_for_weight_conversion' if of_beginning else 'is missing'
    with pytest.raises(UserError, match=message) as found:
      read_adapter(tmp_path, None)
    assert '\n' not in str(found.value)


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('family', ['llama yarn', 'gemma2', 'qwen3_moe'])
def test_rows_of_some_tokens_are_those_of_peft(family, tmp_path):
  pytest.importorskip('transformers')
  base = theirs(family)
  ids = [5, 17, 80]
  tables = ids if base.config.tie_word_embeddings else {'embed_tokens': ids, 'lm_head': ids}
  config = dict(r=2, target_modules=['o_proj'], trainable_token_indices=tables)
  here, there, merged, effect = both_ways(base, config, tmp_path)
  assert max(here, there, merged) < 1e-5 < 1e-2 < effect


def tokenizer_in(folder) -> None:
  """Writes a tokenizer.json of words, with ids from 0 to 90."""
  from tokenizers import Tokenizer, models, pre_tokenizers

  vocab = {'<unk>': 0, **{f'w{i}': i for i in range(1, 91)}}
  made = Tokenizer(models.WordLevel(vocab, unk_token='<unk>'))
  made.pre_tokenizer = pre_tokenizers.Whitespace()
  made.save(str(folder / 'tokenizer.json'))


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize('names', ['<a>,<b>', ','.join(f'<t{i}>' for i in range(9))])
def test_new_tokens_have_the_mean_of_all_rows(names, tmp_path, capsys):
  """A model of 96 ids, of which a tokenizer has 91: some rows were there, and others are new."""
  pytest.importorskip('transformers')
  base = theirs('llama yarn')
  base.save_pretrained(tmp_path / 'hf')
  tokenizer_in(tmp_path / 'hf')
  run = [str(tmp_path / 'hf'), f'--to={tmp_path / "grown"}']
  with pytest.raises(UserError, match='w7 is in the tokenizer already'):
    import_weights.main([*run, '--add_tokens=<a>,w7'])
  assert not (tmp_path / 'grown').exists()
  import_weights.main([*run, f'--add_tokens={names}'])
  count = names.count(',') + 1
  ids = [*range(91, 91 + count)]
  assert f'LORA_TOKENS=[{",".join(map(str, ids))}]' in capsys.readouterr().out
  e, _, params = loaded(tmp_path / 'grown')
  assert max(96, 91 + count) == e.VOCAB_SIZE
  tables = {'embedding': params['embedding']['emb_var'], 'softmax': params['softmax']['w']}
  theirs_ = base.get_input_embeddings().weight, base.get_output_embeddings().weight
  for table, stored in zip(tables.values(), theirs_, strict=True):
    before = stored.detach().numpy()[:91]
    np.testing.assert_array_equal(table[:91], before)
    np.testing.assert_allclose(
      np.asarray(table)[ids], np.tile(before.mean(0), (count, 1)), atol=1e-6
    )
  from paxlite.data.tokenizer import open_tokenizer

  tokenizer = open_tokenizer(str(tmp_path / 'grown'))
  assert tokenizer.encode(f'w3 {names.split(",")[-1]} w4') == [3, ids[-1], 4]


def test_a_revision_is_apart_from_the_name_and_a_path_stays_whole(tmp_path):
  (there := tmp_path / 'weights@home').mkdir()
  assert on_hub('org/base@v1.0') == ('org/base', 'v1.0')
  for name in 'org/base', str(there), '/gone/me@home/base', '':
    assert on_hub(name) == (name, None)


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('scheme', ['nf4', 'int8', 'int4'])
def test_the_adapter_of_a_quantized_base_is_that_of_the_decoded_weights(scheme, tmp_path):
  """peft gets the weights that QLoRA computes with, decoded."""
  pytest.importorskip('transformers')
  peft = pytest.importorskip('peft')
  from transformers import AutoModelForCausalLM

  base = theirs('llama yarn', hidden_size=64, intermediate_size=128)
  base.save_pretrained(tmp_path / 'hf')
  config = dict(r=3, lora_alpha=5, target_modules=['q_proj', 'down_proj'])
  with_noise(peft.get_peft_model(base, peft.LoraConfig(**config))).save_pretrained(tmp_path / 'a')
  import_weights.main([str(tmp_path / 'hf'), f'--to={tmp_path / "base"}'])
  import_weights.main(
    [str(tmp_path / 'a'), f'--to={tmp_path / "ours"}', f'--base_weights={tmp_path / "base"}']
  )
  e = loaded(tmp_path / 'ours')[0].replaced(FROZEN_DTYPE=scheme, USE_REPEATED_LAYER=False)
  task = sharded(e)
  abstract = {'params': task.abstract.params}
  plan = RestorePlan(Restore(str(tmp_path / 'ours')), abstract, quantizations=task.quantizations)
  load = lambda path, x: plan.load(path_name(path), x)
  params = jax.tree_util.tree_map_with_path(load, abstract)['params']
  read = lambda x: Variable(x.shape, x.dtype, lambda index: x[index])
  whole = {n: read(x) for n, x in flat(decoded(params, task)).items() if 'lora_' not in n}
  plain = e.replaced(USE_LORA=False, FROZEN_DTYPE='float32', TRAINABLE_VARIABLES=['.*'])
  huggingface.write_folder(tmp_path / 'plain', plain, whole, None, None, lambda *_: None)
  export_weights.main([str(tmp_path / 'ours'), '--to=peft', f'--path={tmp_path / "out"}'])
  written = json.loads((tmp_path / 'out' / 'adapter_config.json').read_text())
  assert written['base_model_name_or_path'] == str(tmp_path / 'hf')
  named = [str(tmp_path / 'ours'), '--to=peft', '--base=org/base@refs/pr/3']
  export_weights.main([*named, f'--path={tmp_path / "named"}'])
  read = peft.PeftConfig.from_pretrained(tmp_path / 'named')
  assert (read.base_model_name_or_path, read.revision) == ('org/base', 'refs/pr/3')
  fresh = lambda name: AutoModelForCausalLM.from_pretrained(
    tmp_path / name, attn_implementation='eager'
  ).eval()
  ids = np.random.default_rng(0).integers(3, 90, (2, 20))
  wanted, of_base = (
    logits_of(peft.PeftModel.from_pretrained(fresh(name), tmp_path / 'out').eval(), ids)
    for name in ('plain', 'hf')
  )
  with jax.default_matmul_precision('highest'):
    found = np.asarray(jax.jit(task.task.model.apply)({'params': params}, ids))
  largest = np.abs(wanted).max()
  np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * largest)
  assert np.abs(of_base - wanted).max() > 1e-3 * largest


@pytest.mark.slow
def test_training_continues_an_adapter_of_peft_and_leaves_the_rest_as_it_is(tmp_path):
  """Experts, a whole head, and dropout: the first loss is that of the adapter."""
  pytest.importorskip('transformers')
  peft = pytest.importorskip('peft')
  import paxlite

  base = theirs('qwen3_moe')
  base.save_pretrained(tmp_path / 'hf')
  config = dict(r=3, lora_alpha=5, target_modules=['q_proj'], target_parameters=EXPERTS)
  with_noise(peft.get_peft_model(base, peft.LoraConfig(**config))).save_pretrained(tmp_path / 'a')
  import_weights.main([str(tmp_path / 'hf'), f'--to={tmp_path / "base"}'])
  import_weights.main(
    [str(tmp_path / 'a'), f'--to={tmp_path / "ours"}', f'--base_weights={tmp_path / "base"}']
  )
  (tmp_path / 'chats.jsonl').write_text('{"inputs": "w3 w4 ", "targets": "w5 w6"}\n' * 8)
  tokenizer_in(tmp_path)
  overrides = dict(
    CHECKPOINT_RESTORE_PATH=str(tmp_path / 'ours'), TRAIN_FILES=str(tmp_path / 'chats.jsonl'),
    VOCAB_PATH=str(tmp_path / 'tokenizer.json'), MAX_SEQ_LEN='16', PERCORE_BATCH_SIZE='1',
    ICI_MESH_SHAPE='[1,1,1]', MAX_STEPS='2', LEARNING_RATE='0.01', CHECKPOINT_EVERY_N_STEPS='2',
    FPROP_DTYPE='float32',
  )  # fmt: skip
  e = build_experiment('HuggingFaceLoRA', [], overrides)
  assert (e.LORA_ALPHA, e.LORA_RANK, e.LORA_TARGETS[0]) == (5, 3, 'gate_up_proj')
  train(Run(e, tmp_path / 'run'))
  before, after = (
    {n: x.whole() for n, x in find_source(tmp_path / name).unrolled_params().items()}
    for name in ('ours', 'run')
  )
  assert before.keys() == after.keys()
  changed = {n for n in before if not np.array_equal(before[n], after[n])}
  assert changed == {n for n in before if '/lora_' in n}
  found = paxlite.load(tmp_path / 'run').logits([1, 5, 7])
  export_weights.main([str(tmp_path / 'run'), '--to=hf', f'--path={tmp_path / "out"}'])
  import_weights.main([str(tmp_path / 'out'), f'--to={tmp_path / "merged"}'])
  np.testing.assert_allclose(found, paxlite.load(tmp_path / 'merged').logits([1, 5, 7]), atol=1e-4)


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('use_dora', [False, True])
@pytest.mark.parametrize(
  'family', ['phi3', 'gpt_neox', 'qwen3_next', 'qwen3_5_text', 'falcon_h1', 'granitemoehybrid']
)
def test_peft_computes_the_same_with_factors_that_began_here(family, use_dora, tmp_path):
  """Weights that are one tensor there have an A each here, whose columns are all written."""
  pytest.importorskip('transformers')
  peft = pytest.importorskip('peft')
  base = theirs(family)
  base.save_pretrained(tmp_path / 'hf')
  import_weights.main([str(tmp_path / 'hf'), f'--to={tmp_path / "base"}'])
  e = loaded(tmp_path / 'base')[0]
  refused = {  # by peft: what it takes for experts, and a projection of Mamba
    'qwen3_next': ['gate_proj', 'up_proj', 'down_proj', 'shared_expert_gate'],
    'falcon_h1': ['out_proj'],
  }
  linear = (
    n.theirs.rpartition('.')[2] for n in LowRankFactors(e).named_weights() if n.kind == 'linear'
  )
  targets = {*linear} - {*refused.get(family, [])}
  e = e.replaced(
    USE_LORA=True, USE_DORA=use_dora, LORA_RANK=2, LORA_ALPHA=3.0, LORA_RS=True,
    LORA_TARGETS=sorted(targets), USE_REPEATED_LAYER=False,
  )  # fmt: skip
  e.validate()
  model, rng = fdl.build(e.build_task()).model, np.random.default_rng(0)
  stored = {n: x.whole() for n, x in find_source(tmp_path / 'base').unrolled_params().items()}
  values = {
    n: stored[n] if n in stored else rng.normal(size=shape).astype(np.float32) * 0.1
    for n, shape in shapes(e).items()
  }
  assert any('/lora_' in n for n in values)
  read = lambda x: Variable(x.shape, x.dtype, lambda index: x[index])
  e = e.replaced(TRAINABLE_VARIABLES=e.factor_variables)
  write_adapter(tmp_path / 'out', e, {n: read(x) for n, x in values.items()}, '', 'float32')
  adapted = peft.PeftModel.from_pretrained(base, tmp_path / 'out').eval()
  ids = rng.integers(3, 90, (2, 20))
  wanted = logits_of(adapted, ids)
  with adapted.disable_adapter():
    plain = logits_of(adapted, ids)
  with jax.default_matmul_precision('highest'):
    found = np.asarray(jax.jit(model.apply)({'params': nested(values)}, ids))
  largest = np.abs(wanted).max()
  np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * largest)
  assert np.abs(wanted - plain).max() > 1e-2 * largest
