"""Foreign weights: import, bit-for-bit export, and the same logits as transformers."""

import json

import jax
import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.experiments.base import Experiment, full_name
from paxlite.experiments.gpt import GPT2
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.registry import class_of, experiments
from paxlite.programs.launch import build_experiment
from paxlite.tools.experiments import num_parameters
from paxlite.weights.commands import export_weights
from paxlite.weights.families import config_json, family_of
from paxlite.weights.families import experiment_of as from_config
from tests.support.families import register_mistral4, theirs
from tests.support.family_draws import BUFFERS
from tests.support.imported import loaded, run_import

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

SIZES = dict(vocab_size=96, bos_token_id=1, eos_token_id=2)
BLOCK = SIZES | dict(
  hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
  max_position_embeddings=64,
)  # fmt: skip
ROPE = dict(
  rope_type='llama3', rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
  original_max_position_embeddings=16,
)  # fmt: skip
FAMILIES = {
  'llama_mha': (transformers.LlamaConfig, BLOCK),
  'llama_gqa_tied': (
    transformers.LlamaConfig,
    BLOCK | dict(num_key_value_heads=2, tie_word_embeddings=True),
  ),
  'llama3_scaled': (
    transformers.LlamaConfig, BLOCK | dict(num_key_value_heads=2, rope_parameters=ROPE)
  ),
  'mistral_window': (
    transformers.MistralConfig, BLOCK | dict(num_key_value_heads=2, sliding_window=5)
  ),
  'gemma': (transformers.GemmaConfig, BLOCK | dict(num_key_value_heads=1, head_dim=16)),
  'llama_relu': (transformers.LlamaConfig, BLOCK | dict(hidden_act='relu')),
  'gemma_untied': (
    transformers.GemmaConfig,
    BLOCK | dict(num_key_value_heads=1, head_dim=16, tie_word_embeddings=False),
  ),
  'gpt2': (transformers.GPT2Config, SIZES | dict(n_embd=32, n_head=4, n_layer=2, n_positions=64)),
}  # fmt: skip


def their_model(family: str):
  torch.manual_seed(0)
  cls, sizes = FAMILIES[family]
  model = transformers.AutoModelForCausalLM.from_config(cls(**sizes)).eval()
  with torch.no_grad():
    for parameter in model.parameters():  # so that an error in norms or biases changes the logits
      parameter.add_(torch.randn_like(parameter) * 0.1)
  return model


QUICK = {'llama_gqa_tied', 'llama3_scaled', 'mistral_window', 'gemma'}


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.usefixtures('platform')
@pytest.mark.parametrize(
  'platform', ['cpu', pytest.param('accelerator', marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.parametrize(
  'family', [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_logits_greedy_tokens_and_the_way_back(family, tmp_path):
  from paxlite.generation.engine import Engine

  theirs = their_model(family)
  theirs.save_pretrained(tmp_path / 'hf')
  run_import('hf', tmp_path / 'hf', tmp_path / 'w')
  experiment, model, params = loaded(tmp_path / 'w')
  ids = np.random.default_rng(0).integers(3, 96, (2, 24))
  with torch.no_grad():
    expected = theirs(torch.tensor(ids)).logits.numpy()
  with jax.default_matmul_precision('highest'):
    logits = jax.jit(model.apply)({'params': params}, ids)
  np.testing.assert_allclose(logits, expected, atol=2e-5, rtol=1e-4)

  engine = Engine(model, params, experiment.MAX_SEQ_LEN, ends=experiment.EOS_IDS)
  with torch.no_grad():
    whole = theirs.generate(torch.tensor(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
  for row, ours in zip(whole[:, 24:].tolist(), engine.continuations(ids.tolist(), 12), strict=True):
    assert (row[: row.index(2)] if 2 in row else row) == ours

  export_weights.main(['--to=hf', f'--checkpoint={tmp_path / "w"}', f'--path={tmp_path / "back"}'])
  back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'back')
  assert type(back) is type(theirs)
  before = theirs.state_dict()
  assert before.keys() == back.state_dict().keys()
  for name, tensor in back.state_dict().items():
    assert torch.equal(tensor, before[name]), name
  with torch.no_grad():
    assert torch.equal(back(torch.tensor(ids)).logits, theirs(torch.tensor(ids)).logits)


def test_bfloat16_in_shards_goes_both_ways(tmp_path):
  theirs = their_model('llama_gqa_tied').to(torch.bfloat16)
  theirs.save_pretrained(tmp_path / 'hf', max_shard_size='20KB')
  assert len(list((tmp_path / 'hf').glob('*.safetensors'))) > 1
  run_import('hf', tmp_path / 'hf', tmp_path / 'w')
  export_weights.main(['--to=hf', f'--checkpoint={tmp_path / "w"}', f'--path={tmp_path / "back"}'])
  back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'back', dtype='auto')
  assert back.dtype == torch.bfloat16
  for name, tensor in back.state_dict().items():
    assert torch.equal(tensor, theirs.state_dict()[name]), name


def hf_folder(tmp_path, **kwargs):
  their_model('llama_gqa_tied').save_pretrained(tmp_path / 'hf', **kwargs)
  return tmp_path / 'hf'


def refused(tmp_path, path, match: str, source: str = 'hf', *flags: str) -> None:
  """Checks that the import ends with one clear error and leaves no files."""
  before = {p.name for p in tmp_path.iterdir()}
  with pytest.raises(UserError, match=match):
    run_import(source, path, tmp_path / 'w', *flags)
  assert {p.name for p in tmp_path.iterdir()} == before


def test_a_model_that_was_saved_without_its_head(tmp_path):
  """transformers' AutoModel saves the names of tensors without the prefix of the base model."""
  whole, config = their_model('llama_gqa_tied'), 'config.json'
  whole.save_pretrained(tmp_path / 'hf')
  whole.model.save_pretrained(tmp_path / 'base')
  (tmp_path / 'base' / config).write_text((tmp_path / 'hf' / config).read_text())
  for name in ('hf', 'base'):
    run_import('hf', tmp_path / name, tmp_path / f'w_{name}')
  ours, base = (jax.tree.leaves(loaded(tmp_path / f'w_{name}')[2]) for name in ('hf', 'base'))
  assert len(ours) == len(base)
  for one, other in zip(ours, base, strict=True):
    np.testing.assert_array_equal(one, other)
  untied = json.loads((tmp_path / 'hf' / config).read_text()) | {'tie_word_embeddings': False}
  (tmp_path / 'base' / config).write_text(json.dumps(untied))
  refused(tmp_path, tmp_path / 'base', 'lm_head.weight')


def test_a_folder_without_weights(tmp_path):
  folder = hf_folder(tmp_path)
  (folder / 'model.safetensors').unlink()
  refused(tmp_path, folder, 'holds no .safetensors')
  (folder / 'config.json').unlink()
  refused(tmp_path, folder, 'config.json is missing')
  refused(tmp_path, tmp_path / 'nowhere', 'does not exist')


def test_a_missing_and_a_truncated_shard(tmp_path):
  folder = hf_folder(tmp_path, max_shard_size='20KB')
  last = sorted(folder.glob('*.safetensors'))[-1]
  packaged = last.read_bytes()
  last.write_bytes(packaged[: len(packaged) // 2])
  refused(tmp_path, folder, f'{last.name} is damaged or truncated')
  last.unlink()
  refused(tmp_path, folder, f'{last.name} is missing')


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
  from safetensors.torch import load_file, save_file

  folder = hf_folder(tmp_path)
  file = folder / 'model.safetensors'
  tensors = load_file(file)
  del tensors['model.norm.weight']
  tensors['more'] = torch.zeros(3)
  tensors['model.layers.0.mlp.up_proj.weight'] = torch.zeros(7, 32)
  save_file(tensors, file)
  refused(
    tmp_path,
    folder,
    r'up_proj.weight is \[7, 32\] and the model has \[56, 32\]; model.norm.weight is missing; '
    r'more \[3\] is not in the model',
  )


def test_options_that_are_not_implemented(tmp_path):
  folder = hf_folder(tmp_path)
  config = json.loads((folder / 'config.json').read_text())
  for change, match in (
    (dict(model_type='falcon'), "model_type 'falcon' is none of"),
    (dict(attention_bias=True), 'attention_bias=True is not implemented'),
    (dict(rope_parameters=dict(rope_type='curved', factor=2.0)), "rope_type 'curved' is not"),
    (dict(rope_parameters=dict(rope_type='yarn', beta=2.0)), 'beta=2.0 of rope_type yarn is not'),
    (dict(model_type='gemma', hidden_act='silu', mlp_bias=None), "hidden_act='silu' is not impl"),
    (dict(hidden_act='mish'), "activation 'mish' is none of"),
    (dict(tomorrows_option=1), 'tomorrows_option=1 is not implemented: it may change what'),
    (dict(quantization_config=dict(quant_method='gptq')), 'quantization_config=.* is not impl'),
    (dict(partial_rotary_factor=0.5), 'partial_rotary_factor=0.5 is not implemented'),
    (dict(num_attention_heads=0), 'config.json: NUM_HEADS=0 must be at least 1'),
    (dict(hidden_size=None), 'MODEL_DIMS must be int'),
    (dict(rope_parameters='linear'), "rope_parameters='linear': no model of this family"),
    (dict(model_type=['llama']), r"model_type \['llama'\] is none of"),
  ):
    (folder / 'config.json').write_text(json.dumps(config | change))
    refused(tmp_path, folder, match)


INDEX = 'model.safetensors.index.json'


@pytest.mark.parametrize('name', ['config.json', 'generation_config.json', INDEX])
@pytest.mark.parametrize('contents', ['[1, 2]', 'null', '{'])
def test_damaged_json(name, contents, tmp_path):
  folder = hf_folder(tmp_path)
  (folder / name).write_text(contents)
  if name == INDEX:  # it is not read where there is one file
    (folder / 'model.safetensors').rename(folder / 'model-00001-of-00001.safetensors')
  refused(tmp_path, folder, f'{name} is damaged')
  if name == INDEX:
    (folder / name).write_text('{"weight_map": [1]}')
    refused(tmp_path, folder, 'is damaged: it has no weight_map')


@pytest.mark.parametrize('dtype', [torch.int8, torch.float64, torch.bool, torch.float8_e4m3fn])
def test_tensors_that_are_no_plain_weights(dtype, tmp_path):
  from safetensors.torch import load_file, save_file

  folder = hf_folder(tmp_path)
  tensors = load_file(folder / 'model.safetensors')
  tensors['model.norm.weight'] = tensors['model.norm.weight'].to(dtype)
  save_file(tensors, folder / 'model.safetensors')
  refused(tmp_path, folder, 'model.norm.weight is .*: dequantize them first')


def test_a_weight_that_is_nan_is_named(tmp_path, caplog):
  from safetensors.torch import load_file, save_file

  folder = hf_folder(tmp_path)
  tensors = load_file(folder / 'model.safetensors')
  tensors['model.norm.weight'][3] = float('nan')
  save_file(tensors, folder / 'model.safetensors', {'format': 'pt'})
  run_import('hf', folder, tmp_path / 'w')
  named = [message for message in caplog.messages if 'NaN' in message]
  assert len(named) == 1
  assert 'model.norm.weight: has numbers that are NaN' in named[0]


def test_a_head_that_is_no_copy_of_the_embedding(tmp_path, caplog):
  """transformers then reads both and says so, whatever tie_word_embeddings is."""
  from safetensors.torch import load_file, save_file

  folder = hf_folder(tmp_path)
  file = folder / 'model.safetensors'
  tensors = load_file(file)
  copy = tensors['model.embed_tokens.weight'].clone()
  save_file(tensors | {'lm_head.weight': copy}, file, {'format': 'pt'})
  run_import('hf', folder, tmp_path / 'good')
  assert not caplog.messages
  assert not loaded(tmp_path / 'good')[0].SEPARATE_EMBEDDING
  save_file(tensors | {'lm_head.weight': copy * 2}, file, {'format': 'pt'})
  run_import('hf', folder, tmp_path / 'w')
  assert 'lm_head.weight is not the embedding, though config.json ties them' in caplog.text
  experiment, model, params = loaded(tmp_path / 'w')
  assert experiment.SEPARATE_EMBEDDING
  ids = np.arange(12)[None]
  with torch.no_grad():
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = theirs(torch.tensor(ids)).logits.numpy()
  with jax.default_matmul_precision('highest'):
    logits = jax.jit(model.apply)({'params': params}, ids)
  np.testing.assert_allclose(logits, expected, atol=2e-5, rtol=1e-4)


def published_sizes() -> list[type]:
  return [
    c for c in experiments().values()
    if issubclass(c, (LLaMA, GPT2)) and c.train_input is Experiment.train_input
  ]  # fmt: skip


@pytest.mark.cases(fast=6)
@pytest.mark.parametrize('cls', published_sizes(), ids=lambda c: c.__name__)
def test_a_published_size_is_known_by_its_config(cls, tmp_path):
  config = config_json(cls(), 'bfloat16', None)
  found = from_config(config, tmp_path / 'config.json')
  assert type(found) is cls
  assert found.model_values == cls().model_values
  other = from_config(config | {'vocab_size': 12345}, tmp_path / 'config.json')
  assert other.VOCAB_SIZE == 12345
  key = 'rotary_emb_base' if 'rotary_emb_base' in config else 'rope_theta'
  if 'rope_parameters' not in config and key in config:  # not of models without rotary positions
    assert from_config(config | {key: 7.0}, tmp_path / 'config.json').ROPE_THETA == 7.0


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('cls', published_sizes(), ids=lambda c: c.__name__)
def test_transformers_has_as_many_parameters(cls):
  """It builds the model of the exported config.json, without memory for it."""
  register_mistral4()
  config = config_json(cls(), 'bfloat16', None)
  kind = config.pop('model_type')
  with torch.device('meta'):
    model = transformers.AutoModelForCausalLM.from_config(
      transformers.AutoConfig.for_model(kind, **config)
    )
  count = sum(parameter.numel() for parameter in model.parameters())
  # DeepSeek-V4's tables of the experts of each token id are integers, and in a file too.
  in_files = (*BUFFERS, 'tid2eid')
  buffers = [b for name, b in model.named_buffers() if name.endswith(in_files)]
  assert count + sum(b.numel() for b in buffers) == num_parameters(cls())


def test_what_no_family_has_is_not_exported(tmp_path):
  """seqax does not scale its queries, and no attribute describes that."""
  from paxlite.experiments.seqax import Seqax84M

  for heads in ({}, dict(NUM_KV_HEADS=1)):
    experiment = Seqax84M(**heads, SOFTMAX_CAP_LOGITS=-1.0, ATTEN_LOGIT_CAP=-1.0)
    with pytest.raises(UserError, match='Seqax84M'):
      family_of(experiment)
  with pytest.raises(UserError, match='it changes them beyond what attributes say'):
    family_of(Scaled())


@pytest.mark.parametrize(
  ('name', 'pattern'),
  [('Qwen3_8B', 'full,full_nope'), ('Gemma3_1B', 'full_nope'), ('Gemma3_1B', '')],
)
def test_kinds_of_attention_that_a_family_does_not_have_are_not_exported(name, pattern):
  """Gemma 3 has other rotary positions in blocks that it calls sliding."""
  e = build_experiment(name, [], {'ATTENTION_PATTERN': f'[{pattern}]'})
  with pytest.raises(UserError, match='Hugging Face has no ATTENTION_PATTERN='):
    config_json(e, 'float32', None)


class Scaled(LLaMA):
  """A LLaMA with a method that changes what its attributes describe."""

  NUM_LAYERS = 1
  NUM_HEADS = 2
  MODEL_DIMS = 8

  def attention(self):
    attention = super().attention()
    attention.attention_tpl.query_scale = 1.0
    return attention


def test_an_edited_experiment_file_is_noticed(tmp_path):
  run_import('hf', hf_folder(tmp_path), tmp_path / 'w')
  path = tmp_path / 'w' / 'experiment.json'
  path.write_text(path.read_text().replace('"NUM_LAYERS": 2', '"NUM_LAYERS": 2 '))
  with pytest.raises(UserError, match=r'experiment\.json is damaged'):
    export_weights.main(['--to=hf', f'--checkpoint={tmp_path / "w"}', f'--path={tmp_path / "o"}'])
  path.unlink()
  with pytest.raises(UserError, match=r'experiment\.json is missing'):
    export_weights.main(['--to=hf', f'--checkpoint={tmp_path / "w"}', f'--path={tmp_path / "o"}'])


def test_tokenizers_go_in_and_out(tmp_path):
  """The files beside them go along. A tokenizer with another vocabulary, or none, is refused."""
  folder = hf_folder(tmp_path)
  config = json.loads((folder / 'config.json').read_text())
  tokenizer = tmp_path / 'tokenizer'
  tokenizer.mkdir()
  words = {f'w{i}': i for i in range(config['vocab_size'])}
  model = dict(type='WordLevel', vocab=words, unk_token='w0')
  empty = dict.fromkeys(('truncation', 'padding', 'normalizer', 'post_processor', 'decoder'))
  file = tokenizer / 'tokenizer.json'
  file.write_text(json.dumps(dict(
    version='1.0', added_tokens=[], pre_tokenizer=dict(type='Whitespace'), model=model, **empty
  )))  # fmt: skip
  special = json.dumps(dict(bos_token='w1', eos_token='w2'))
  (tokenizer / 'tokenizer_config.json').write_text(special)
  run_import('hf', folder, tmp_path / 'w', f'--tokenizer={file}')
  assert (tmp_path / 'w' / 'tokenizer_config.json').read_text() == special
  export_weights.main(['--to=hf', f'--checkpoint={tmp_path / "w"}', f'--path={tmp_path / "o"}'])
  assert (tmp_path / 'o' / 'tokenizer.json').read_text() == file.read_text()
  written = json.loads((tmp_path / 'o' / 'config.json').read_text())
  assert (written['bos_token_id'], written['eos_token_id']) == (1, 2)
  (tmp_path / 'w').rename(tmp_path / 'before')
  refused(tmp_path, folder, 'another model', 'hf', f'--tokenizer={packaged.VOCAB}')
  file.write_text('{}')
  refused(tmp_path, folder, 'is not a tokenizer.json', 'hf', f'--tokenizer={file}')


@pytest.mark.parametrize('shards', [1, 2])
def test_meta_shards(shards, tmp_path):
  """The folder is like Meta's, with interleaved rotary pairs, and split into two files."""
  from paxlite.weights.tensor_names import HUGGING_FACE, META

  theirs = their_model('llama_mha')
  state = theirs.state_dict()
  meta = {META['embedding']: state['model.embed_tokens.weight'], 'rope.freqs': torch.zeros(4)}
  meta |= {META['final_norm']: state['model.norm.weight'], META['head']: state['lm_head.weight']}
  for i in range(2):
    for role, name in META.items():
      if '{i}' in name:
        tensor = state[HUGGING_FACE[role].format(i=i)]
        if role in ('query', 'key'):
          tensor = tensor.reshape(4, 2, 4, 32).transpose(1, 2).reshape(32, 32)
        meta[name.format(i=i)] = tensor
  folder = tmp_path / 'meta'
  folder.mkdir()
  (folder / 'params.json').write_text(
    json.dumps(dict(dim=32, n_layers=2, n_heads=4, norm_eps=1e-6, vocab_size=-1))
  )
  for shard in range(shards):
    part = {}
    for name, tensor in meta.items():
      split = 1 if name.endswith(('wo.weight', 'w2.weight', 'tok_embeddings.weight')) else 0
      whole = tensor.ndim == 1
      part[name] = tensor.clone() if whole else tensor.chunk(shards, split)[shard].clone()
    torch.save(part, folder / f'consolidated.{shard:02d}.pth')
  if shards == 2:
    last = folder / 'consolidated.01.pth'
    last.rename(tmp_path / 'elsewhere')
    refused(tmp_path, folder, r'hold 16 of 32 rows .* not all consolidated', 'meta')
    (tmp_path / 'elsewhere').rename(last)
  (folder / 'params.json').rename(tmp_path / 'params.json')
  refused(tmp_path, folder, 'params.json is missing', 'meta')
  (folder / 'params.json').write_text('[]')
  refused(tmp_path, folder, 'params.json is damaged', 'meta')
  (tmp_path / 'params.json').rename(folder / 'params.json')
  run_import('meta', folder, tmp_path / 'w')
  export_weights.main(['--to=hf', f'--checkpoint={tmp_path / "w"}', f'--path={tmp_path / "back"}'])
  back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'back')
  for name, tensor in back.state_dict().items():
    assert torch.equal(tensor, state[name]), name


class Evil:
  def __reduce__(self):
    return print, ('unpickled',)


def test_a_pickle_is_not_run(tmp_path, capsys):
  folder = tmp_path / 'meta'
  folder.mkdir()
  (folder / 'params.json').write_text(json.dumps(dict(dim=8, n_layers=1, n_heads=1, norm_eps=1.0)))
  torch.save({'a': Evil()}, folder / 'consolidated.00.pth')
  refused(tmp_path, folder, 'does not hold weights alone', 'meta')
  assert 'unpickled' not in capsys.readouterr().out


def test_any_imported_model_can_be_trained(tmp_path, capsys):
  """A size without a class of its own becomes the family's class, with the values of the import."""
  run_import('hf', hf_folder(tmp_path), tmp_path / 'w')
  printed = capsys.readouterr().out
  path = {'CHECKPOINT_RESTORE_PATH': str(tmp_path / 'w')}
  for kind in ('SFT', 'LoRA', 'Documents'):
    assert f'paxlite finetune {path["CHECKPOINT_RESTORE_PATH"]} --method={kind.lower()} ' in printed
    e = build_experiment(f'HuggingFace{kind}', [], path)
    assert class_of({'experiment': full_name(type(e)), 'values': e.values()}) is type(e)
    assert (type(e).__name__, e.MODEL) == (f'HuggingFace{kind}', 'LLaMA')
    assert issubclass(type(e), LLaMA)
    assert (e.NUM_LAYERS, e.MODEL_DIMS, e.MAX_SEQ_LEN, e.EOS_IDS) == (2, 32, 64, [2])
    assert (kind == 'LoRA') == e.USE_LORA
  with pytest.raises(UserError, match=r'HuggingFaceSFT needs CHECKPOINT_RESTORE_PATH'):
    build_experiment('HuggingFaceSFT', [], {})
  their_model('gpt2').save_pretrained(tmp_path / 'gpt2')
  run_import('hf', tmp_path / 'gpt2', tmp_path / 'g')
  assert 'paxlite finetune' not in capsys.readouterr().out
  with pytest.raises(UserError, match='is of a GPT2, which HuggingFaceSFT does not fine-tune'):
    build_experiment('HuggingFaceSFT', [], {'CHECKPOINT_RESTORE_PATH': str(tmp_path / 'g')})


IMAGES = {
  'Kimi_K25': (
    dict(
      model_type='deepseek_v3', num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=12,
      qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10, n_routed_experts=8,
      num_experts_per_tok=3, moe_intermediate_size=24, first_k_dense_replace=1, n_group=1,
      topk_group=1,
    ),
    dict(pos_emb_height=2, pos_emb_width=2, pos_emb_time=1),
    dict(tie_word_embeddings=False),
  ),
  'Gemma3': (
    dict(head_dim=10, sliding_window=5, query_pre_attn_scalar=7, eos_token_id=2),
    dict(image_size=28, patch_size=14),
    dict(mm_tokens_per_image=1, boi_token_index=94, eoi_token_index=93),
  ),
  'Gemma4': (
    dict(
      head_dim=10, global_head_dim=12, sliding_window=5, hidden_size_per_layer_input=0,
      eos_token_id=2,
    ),
    dict(head_dim=8, num_key_value_heads=2, patch_size=4, position_embedding_size=16),
    dict(boi_token_id=93, eoi_token_id=94, image_token_id=95, audio_config=None),
  ),
  'Gemma4 linked': (
    dict(
      head_dim=10, global_head_dim=12, sliding_window=5, hidden_size_per_layer_input=6,
      vocab_size_per_layer_input=96, num_kv_shared_layers=2, use_double_wide_mlp=True,
      layer_types=['sliding_attention', 'full_attention'] * 2, num_hidden_layers=4, eos_token_id=2,
    ),
    dict(head_dim=8, num_key_value_heads=2, patch_size=4, position_embedding_size=16),
    dict(boi_token_id=93, eoi_token_id=94, image_token_id=95, audio_config=None),
  ),
  'Llama4': (
    dict(
      head_dim=10, intermediate_size_mlp=24, num_local_experts=4, attention_chunk_size=7,
      no_rope_layers=[1, 0], floor_scale=5, eos_token_id=2,
    ),
    dict(
      image_size=28, patch_size=14, vision_output_dim=16, projector_input_dim=16,
      projector_output_dim=16, pixel_shuffle_ratio=0.5,
    ),
    dict(boi_token_index=93, eoi_token_index=94),
  ),
  'Mistral3': (
    dict(model_type='mistral', head_dim=10, sliding_window=None),
    dict(model_type='pixtral', image_size=28, patch_size=14, head_dim=8),
    {},
  ),
  'Qwen3_5': (
    dict(
      head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=6,
      linear_value_head_dim=4, layer_types=['linear_attention', 'full_attention'],
      rope_parameters=dict(
        rope_type='default', rope_theta=1e4, partial_rotary_factor=0.5,
        mrope_section=[2, 1, 1], mrope_interleaved=True,
      ),
    ),
    dict(depth=1, num_heads=2, out_hidden_size=32, num_position_embeddings=16),
    {},
  ),
  'Mistral3 with Ministral3': (
    dict(
      model_type='ministral3', head_dim=10,
      rope_parameters=dict(
        rope_type='yarn', rope_theta=1e4, factor=4.0, original_max_position_embeddings=8,
        mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5,
      ),
    ),
    dict(model_type='pixtral', image_size=28, patch_size=14, head_dim=8),
    {},
  ),
}  # fmt: skip


@pytest.mark.cases(fast=1, slow=2)
@pytest.mark.parametrize(
  'name', ['Gemma3', *(pytest.param(name, marks=pytest.mark.slow) for name in [*IMAGES][1:])]
)
def test_the_text_model_of_a_model_with_images(name, tmp_path):
  """Its weights have other names than those of a text model, and config.json has them inside."""
  text, image, others = IMAGES[name]
  name = name.partition(' ')[0]
  size = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
  config = getattr(transformers, f'{name}Config')(
    text_config=BLOCK | dict(num_key_value_heads=2) | text, vision_config=size | image, **others,
    image_token_index=95, eos_token_id=[2, 5],
  )  # fmt: skip
  torch.manual_seed(0)
  model = getattr(transformers, f'{name}ForConditionalGeneration')(config).eval()
  model.save_pretrained(tmp_path / 'hf')
  run_import('hf', tmp_path / 'hf', tmp_path / 'w')
  experiment, ours, params = loaded(tmp_path / 'w')
  assert experiment.EOS_IDS == [2, 5]
  ids = np.random.default_rng(0).integers(6, 90, (2, 24))
  # the whole of Llama 4 in transformers 5.24 wants images
  model = model.language_model if name == 'Llama4' else model
  with torch.no_grad():
    expected = model(input_ids=torch.tensor(ids)).logits.numpy()
  with jax.default_matmul_precision('highest'):
    logits = jax.jit(ours.apply)({'params': params}, ids)
  np.testing.assert_allclose(logits, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
def test_keys_that_no_layer_reads_are_left_out(tmp_path, caplog):
  """Published files of Gemma 4 E2B and E4B have them."""
  from safetensors.torch import save_file

  model = theirs('gemma4_text linked')
  tensors = {name: x.clone() for name, x in model.state_dict().items() if name != 'lm_head.weight'}
  tensors |= {f'model.layers.{i}.self_attn.k_proj.weight': torch.ones(2, 2) for i in (3, 4, 5)}
  model.config.save_pretrained(tmp_path)
  save_file(tensors, tmp_path / 'model.safetensors')
  run_import('hf', tmp_path, tmp_path / 'w')
  assert '3 tensors for what the model does not read' in caplog.text


# What the published files of some models say, apart from keys that every file has.
PUBLISHED = {
  'Qwen2_5_7B': dict(
    model_type='qwen2', hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
    num_attention_heads=28, num_key_value_heads=4, vocab_size=152064, max_window_layers=28,
    sliding_window=131072, use_sliding_window=False, use_mrope=False, rms_norm_eps=1e-6,
    rope_theta=1000000.0, max_position_embeddings=131072, hidden_act='silu',
  ),
  'Qwen3_0_6B': dict(
    model_type='qwen3', attention_bias=False, head_dim=128, hidden_size=1024,
    intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
    vocab_size=151936, tie_word_embeddings=True, rope_theta=1000000, rope_scaling=None,
    max_window_layers=28, sliding_window=None, use_sliding_window=False, rms_norm_eps=1e-6,
    max_position_embeddings=40960, hidden_act='silu',
  ),
  'Gemma3_4B': dict(
    model_type='gemma3', mm_tokens_per_image=256, image_token_index=262144, eos_token_id=[1, 106],
    vision_config=dict(model_type='siglip_vision_model'),
    text_config=dict(
      model_type='gemma3_text', hidden_size=2560, intermediate_size=10240, num_hidden_layers=34,
      rope_scaling=dict(factor=8.0, rope_type='linear'), sliding_window=1024,
    ),
  ),
  'Gemma4_31B': dict(
    model_type='gemma4', image_token_id=258880, eos_token_id=[1, 106], tie_word_embeddings=True,
    vision_config=dict(model_type='gemma4_vision'), audio_config=None,
    text_config=dict(
      model_type='gemma4_text', attention_bias=False, attention_k_eq_v=True, num_experts=None,
      enable_moe_block=False, expert_intermediate_size=None, final_logit_softcapping=30.0,
      global_head_dim=512, head_dim=256, hidden_activation='gelu_pytorch_tanh', hidden_size=5376,
      hidden_size_per_layer_input=0, intermediate_size=21504, max_position_embeddings=262144,
      layer_types=[*['sliding_attention'] * 5, 'full_attention'] * 10, num_attention_heads=32,
      num_global_key_value_heads=4, num_hidden_layers=60, num_key_value_heads=16,
      num_kv_shared_layers=0, rms_norm_eps=1e-6, sliding_window=1024, top_k_experts=None,
      use_bidirectional_attention='vision', use_double_wide_mlp=False, vocab_size=262144,
      vocab_size_per_layer_input=262144,
      rope_parameters=dict(
        full_attention=dict(
          partial_rotary_factor=0.25, rope_theta=1000000.0, rope_type='proportional'
        ),
        sliding_attention=dict(rope_theta=10000.0, rope_type='default'),
      ),
    ),
  ),
  'Gemma4E2B': dict(
    model_type='gemma4', image_token_id=258880, eos_token_id=[1, 106], tie_word_embeddings=True,
    vision_config=dict(model_type='gemma4_vision'), audio_config=dict(model_type='gemma4_audio'),
    text_config=dict(
      model_type='gemma4_text', attention_bias=False, attention_k_eq_v=False, num_experts=None,
      enable_moe_block=False, final_logit_softcapping=30.0, global_head_dim=512, head_dim=256,
      hidden_activation='gelu_pytorch_tanh', hidden_size=1536, hidden_size_per_layer_input=256,
      intermediate_size=6144, max_position_embeddings=131072, num_attention_heads=8,
      layer_types=[*['sliding_attention'] * 4, 'full_attention'] * 7,
      num_global_key_value_heads=None, num_hidden_layers=35, num_key_value_heads=1,
      num_kv_shared_layers=20, rms_norm_eps=1e-6, sliding_window=512, top_k_experts=None,
      use_bidirectional_attention=None, use_double_wide_mlp=True, vocab_size=262144,
      vocab_size_per_layer_input=262144,
      rope_parameters=dict(
        full_attention=dict(
          partial_rotary_factor=0.25, rope_theta=1000000.0, rope_type='proportional'
        ),
        sliding_attention=dict(rope_theta=10000.0, rope_type='default'),
      ),
    ),
  ),
  'Gemma4E4B': dict(
    model_type='gemma4', image_token_id=258880, eos_token_id=[1, 106], tie_word_embeddings=True,
    vision_config=dict(model_type='gemma4_vision'), audio_config=dict(model_type='gemma4_audio'),
    text_config=dict(
      model_type='gemma4_text', attention_bias=False, attention_k_eq_v=False, num_experts=None,
      enable_moe_block=False, final_logit_softcapping=30.0, global_head_dim=512, head_dim=256,
      hidden_activation='gelu_pytorch_tanh', hidden_size=2560, hidden_size_per_layer_input=256,
      intermediate_size=10240, max_position_embeddings=131072, num_attention_heads=8,
      layer_types=[*['sliding_attention'] * 5, 'full_attention'] * 7,
      num_global_key_value_heads=None, num_hidden_layers=42, num_key_value_heads=2,
      num_kv_shared_layers=18, rms_norm_eps=1e-6, sliding_window=512, top_k_experts=None,
      use_bidirectional_attention=None, use_double_wide_mlp=False, vocab_size=262144,
      vocab_size_per_layer_input=262144,
      rope_parameters=dict(
        full_attention=dict(
          partial_rotary_factor=0.25, rope_theta=1000000.0, rope_type='proportional'
        ),
        sliding_attention=dict(rope_theta=10000.0, rope_type='default'),
      ),
    ),
  ),
  'Llama4Scout': dict(
    model_type='llama4', boi_token_index=200080, vision_config=dict(model_type='llama4_vision'),
    text_config=dict(
      model_type='llama4_text', attention_bias=False, attention_chunk_size=8192, attn_scale=0.1,
      attn_temperature_tuning=4, floor_scale=8192, for_llm_compression=False, head_dim=128,
      hidden_act='silu', hidden_size=5120, interleave_moe_layer_step=1, intermediate_size=8192,
      intermediate_size_mlp=16384, max_position_embeddings=10485760, no_rope_layers=[],
      num_attention_heads=40, num_experts_per_tok=1, num_hidden_layers=48, num_key_value_heads=8,
      num_local_experts=16, rms_norm_eps=1e-5, rope_theta=500000.0, use_qk_norm=True,
      router_aux_loss_coef=0.001, router_jitter_noise=0.0, vocab_size=202048,
      rope_scaling=dict(
        factor=16.0, high_freq_factor=1.0, low_freq_factor=1.0, rope_type='llama3',
        original_max_position_embeddings=8192,
      ),
    ),
  ),
  'Qwen3_5_9B': dict(
    model_type='qwen3_5', image_token_id=248056, vision_config=dict(model_type='qwen3_5'),
    text_config=dict(
      model_type='qwen3_5_text', attn_output_gate=True, attention_bias=False, head_dim=256,
      full_attention_interval=4, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32,
      num_attention_heads=16, num_key_value_heads=4, linear_conv_kernel_dim=4, hidden_act='silu',
      linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
      linear_value_head_dim=128, mamba_ssm_dtype='float32', mlp_only_layers=None,
      mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, vocab_size=248320,
      max_position_embeddings=262144, rms_norm_eps=1e-6,
      rope_parameters=dict(
        mrope_interleaved=True, mrope_section=[11, 11, 10], rope_type='default',
        rope_theta=10000000, partial_rotary_factor=0.25,
      ),
    ),
  ),
  'Phi4': dict(
    model_type='phi3', hidden_size=5120, intermediate_size=17920, num_hidden_layers=40,
    num_attention_heads=40, num_key_value_heads=10, vocab_size=100352, rope_theta=250000,
    rope_scaling=None, sliding_window=None, embd_pdrop=0.0, resid_pdrop=0.0, attention_bias=False,
    original_max_position_embeddings=16384, max_position_embeddings=16384, rms_norm_eps=1e-5,
    hidden_act='silu',
  ),
  'Mistral7B_v0_2': dict(
    model_type='mistral', hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, vocab_size=32000, sliding_window=None,
    rope_theta=1000000.0, max_position_embeddings=32768, rms_norm_eps=1e-5, hidden_act='silu',
    tie_word_embeddings=False,
  ),
  'SmolLM135M': dict(
    model_type='llama', is_llama_config=True, rope_interleaved=False, hidden_size=576,
    intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    vocab_size=49152, tie_word_embeddings=True, rope_theta=100000, rope_scaling=None,
    pretraining_tp=1, max_position_embeddings=8192, rms_norm_eps=1e-5, hidden_act='silu',
    attention_bias=False,
  ),
  'GptOss20B': dict(
    model_type='gpt_oss', hidden_size=2880, intermediate_size=2880, num_hidden_layers=24,
    num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=32,
    num_experts_per_tok=4, experts_per_token=4, vocab_size=201088, attention_bias=True,
    sliding_window=128, layer_types=['sliding_attention', 'full_attention'] * 12,
    rope_theta=150000, initial_context_length=4096, swiglu_limit=7.0, hidden_act='silu',
    rope_scaling=dict(
      rope_type='yarn', factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
      original_max_position_embeddings=4096,
    ),
    quantization_config=dict(quant_method='mxfp4'), max_position_embeddings=131072,
    rms_norm_eps=1e-5, router_aux_loss_coef=0.9, output_router_logits=False,
  ),
  'DeepSeekV3_671B': dict(
    model_type='deepseek_v3', hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
    num_attention_heads=128, num_key_value_heads=128, vocab_size=129280, kv_lora_rank=512,
    q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
    first_k_dense_replace=3, moe_layer_freq=1, n_group=8, topk_group=4, topk_method='noaux_tc',
    scoring_func='sigmoid', norm_topk_prob=True, routed_scaling_factor=2.5, ep_size=1,
    num_nextn_predict_layers=1, rope_theta=10000, attention_bias=False, hidden_act='silu',
    rope_scaling=dict(
      type='yarn', factor=40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
      original_max_position_embeddings=4096,
    ),
    quantization_config=dict(
      activation_scheme='dynamic', fmt='e4m3', quant_method='fp8', weight_block_size=[128, 128]
    ),
    max_position_embeddings=163840, rms_norm_eps=1e-6, tie_word_embeddings=False,
  ),
  'KimiK2_1T': dict(
    model_type='kimi_k2', hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
    num_attention_heads=64, num_key_value_heads=64, vocab_size=163840, kv_lora_rank=512,
    q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    moe_intermediate_size=2048, n_routed_experts=384, n_shared_experts=1, num_experts_per_tok=8,
    first_k_dense_replace=1, moe_layer_freq=1, n_group=1, topk_group=1, topk_method='noaux_tc',
    scoring_func='sigmoid', norm_topk_prob=True, routed_scaling_factor=2.827, ep_size=1,
    num_nextn_predict_layers=0, rope_theta=50000.0, attention_bias=False, hidden_act='silu',
    rope_scaling=dict(
      type='yarn', factor=32.0, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
      original_max_position_embeddings=4096,
    ),
    quantization_config=dict(
      activation_scheme='dynamic', fmt='e4m3', quant_method='fp8', weight_block_size=[128, 128]
    ),
    max_position_embeddings=131072, rms_norm_eps=1e-6, tie_word_embeddings=False,
    aux_loss_alpha=0.001, pretraining_tp=1, seq_aux=True,
  ),
  'GLM4_7_Flash': dict(
    model_type='glm4_moe_lite', hidden_size=2048, intermediate_size=10240, num_hidden_layers=47,
    num_attention_heads=20, num_key_value_heads=20, vocab_size=154880, kv_lora_rank=512,
    q_lora_rank=768, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256,
    moe_intermediate_size=1536, n_routed_experts=64, n_shared_experts=1, num_experts_per_tok=4,
    first_k_dense_replace=1, n_group=1, topk_group=1, topk_method='noaux_tc', norm_topk_prob=True,
    routed_scaling_factor=1.8, num_nextn_predict_layers=1, rope_theta=1000000.0, rope_scaling=None,
    partial_rotary_factor=1.0, attention_bias=False, hidden_act='silu', rms_norm_eps=1e-5,
    max_position_embeddings=202752, tie_word_embeddings=False,
  ),
  'DeepSeekV3_2_671B': dict(
    model_type='deepseek_v32', hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
    num_attention_heads=128, num_key_value_heads=128, vocab_size=129280, kv_lora_rank=512,
    q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
    first_k_dense_replace=3, moe_layer_freq=1, n_group=8, topk_group=4, topk_method='noaux_tc',
    scoring_func='sigmoid', norm_topk_prob=True, routed_scaling_factor=2.5, ep_size=1,
    num_nextn_predict_layers=1, rope_theta=10000, attention_bias=False, hidden_act='silu',
    index_head_dim=128, index_n_heads=64, index_topk=2048,
    rope_scaling=dict(
      type='yarn', factor=40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
      original_max_position_embeddings=4096,
    ),
    quantization_config=dict(
      activation_scheme='dynamic', fmt='e4m3', quant_method='fp8', scale_fmt='ue8m0',
      weight_block_size=[128, 128],
    ),
    max_position_embeddings=163840, rms_norm_eps=1e-6, tie_word_embeddings=False,
  ),
  'DeepSeekV4_Flash': dict(
    model_type='deepseek_v4', hidden_size=4096, num_hidden_layers=43, num_attention_heads=64,
    num_key_value_heads=1, head_dim=512, vocab_size=129280, q_lora_rank=1024, qk_rope_head_dim=64,
    o_groups=8, o_lora_rank=1024, sliding_window=128, compress_ratios=[0, 0, 4, *[128, 4] * 20, 0],
    index_head_dim=128, index_n_heads=64, index_topk=512, hc_eps=1e-6, hc_mult=4,
    hc_sinkhorn_iters=20, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1,
    num_experts_per_tok=6, num_hash_layers=3, norm_topk_prob=True, routed_scaling_factor=1.5,
    scoring_func='sqrtsoftplus', topk_method='noaux_tc', swiglu_limit=10.0, hidden_act='silu',
    num_nextn_predict_layers=1, rope_theta=10000, compress_rope_theta=160000, attention_bias=False,
    rope_scaling=dict(
      type='yarn', factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536
    ),
    max_position_embeddings=1048576, rms_norm_eps=1e-6, tie_word_embeddings=False,
  ),
  'GLM5_744B': dict(
    model_type='glm_moe_dsa', hidden_size=6144, intermediate_size=12288, num_hidden_layers=78,
    num_attention_heads=64, num_key_value_heads=64, vocab_size=154880, kv_lora_rank=512,
    q_lora_rank=2048, qk_head_dim=256, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256,
    moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
    first_k_dense_replace=3, moe_layer_freq=1, n_group=1, topk_group=1, topk_method='noaux_tc',
    scoring_func='sigmoid', norm_topk_prob=True, routed_scaling_factor=2.5, ep_size=1, head_dim=64,
    num_nextn_predict_layers=1, attention_bias=False, hidden_act='silu', pretraining_tp=1,
    index_head_dim=128, index_n_heads=32, index_topk=2048, indexer_rope_interleave=True,
    rope_interleave=True,
    rope_parameters=dict(rope_theta=1000000, rope_type='default'),
    max_position_embeddings=202752, rms_norm_eps=1e-5, tie_word_embeddings=False,
  ),
  'MiniMaxM2_230B': dict(
    model_type='minimax_m2', hidden_size=3072, intermediate_size=1536, num_hidden_layers=62,
    num_attention_heads=48, num_key_value_heads=8, head_dim=128, vocab_size=200064, rotary_dim=64,
    num_local_experts=256, num_experts_per_tok=8, shared_intermediate_size=0, hidden_act='silu',
    scoring_func='sigmoid', use_routing_bias=True, use_qk_norm=True, qk_norm_type='per_layer',
    use_mtp=True, num_mtp_modules=3, mtp_transformer_layers=1, attn_type_list=[1] * 62,
    rope_theta=5000000, router_jitter_noise=0.0, max_position_embeddings=196608,
    quantization_config=dict(
      activation_scheme='dynamic', fmt='float8_e4m3fn', quant_method='fp8',
      weight_block_size=[128, 128],
      modules_to_not_convert=['gate', 'e_score_correction_bias', 'lm_head'],
    ),
    rms_norm_eps=1e-6, tie_word_embeddings=False,
  ),
  'FalconH1_0_5B': dict(
    model_type='falcon_h1', hidden_size=1024, intermediate_size=2048, num_hidden_layers=36,
    num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=32784,
    attention_bias=False,
    attention_in_multiplier=1.0, attention_out_multiplier=0.9375, attn_layer_indices=None,
    embedding_multiplier=5.656854249492381, key_multiplier=0.39062499999999994,
    lm_head_multiplier=0.0390625, hidden_act='silu', mamba_chunk_size=128, mamba_conv_bias=True,
    mamba_d_conv=4, mamba_d_head=64, mamba_d_ssm=1536, mamba_d_state=128, mamba_expand=2,
    mamba_n_groups=1, mamba_n_heads=24, mamba_norm_before_gate=False, mamba_proj_bias=False,
    mamba_rms_norm=False, mamba_use_mlp=True, mlp_bias=False, mlp_expansion_factor=8,
    mlp_multipliers=[0.8838834764831844, 0.5859375], num_logits_to_keep=1, projectors_bias=False,
    rope_scaling=None, rope_theta=100000000000.0, ssm_in_multiplier=1.25,
    ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    ssm_out_multiplier=0.23570226039551587, max_position_embeddings=16384, rms_norm_eps=1e-5,
    tie_word_embeddings=False,
  ),
  'OLMo3_7B': dict(
    model_type='olmo3', hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=32, vocab_size=100278, rope_theta=500000,
    rope_scaling=dict(
      rope_type='yarn', factor=8.0, beta_fast=32.0, beta_slow=1.0,
      attention_factor=1.2079441541679836, original_max_position_embeddings=8192,
    ),
    sliding_window=4096, attention_bias=False, hidden_act='silu', rms_norm_eps=1e-6,
    max_position_embeddings=65536, tie_word_embeddings=False,
    layer_types=[*['sliding_attention'] * 3, 'full_attention'] * 8,
  ),
}  # fmt: skip


@pytest.mark.parametrize('name', PUBLISHED)
def test_a_published_file_is_recognized(name, tmp_path):
  everywhere = dict(
    architectures=['X'], torch_dtype='bfloat16', transformers_version='4.51.0', use_cache=True,
    initializer_range=0.02, bos_token_id=1, attention_dropout=0.0,
  )  # fmt: skip
  found = from_config(everywhere | PUBLISHED[name], tmp_path / 'config.json')
  assert type(found).__name__ == name
  assert found.FPROP_DTYPE == 'bfloat16'
