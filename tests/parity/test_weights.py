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
from tests.support.families import PUBLISHED, register_mistral4, theirs
from tests.support.family_draws import BUFFERS
from tests.support.image_models import IMAGES, model_with_images, save
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


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.usefixtures('platform')
@pytest.mark.parametrize('platform', ['cpu', 'accelerator'], indirect=True)
@pytest.mark.parametrize('family', FAMILIES)
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
    (dict(model_type='falcon'), "model_type 'falcon' is not supported"),
    (dict(attention_bias=True), 'attention_bias=True is not supported'),
    (dict(rope_parameters=dict(rope_type='curved', factor=2.0)), "rope_type 'curved' is not"),
    (dict(rope_parameters=dict(rope_type='yarn', beta=2.0)), 'beta=2.0 of rope_type yarn is not'),
    (dict(model_type='gemma', hidden_act='silu', mlp_bias=None), "hidden_act='silu' is not supp"),
    (dict(hidden_act='mish'), "activation 'mish' is not supported"),
    (dict(tomorrows_option=1), 'tomorrows_option=1 is not supported: it may change what'),
    (dict(quantization_config=dict(quant_method='gptq')), 'quantization_config=.* is not supp'),
    (dict(partial_rotary_factor=0.5), 'partial_rotary_factor=0.5 is not supported'),
    (dict(num_attention_heads=0), 'config.json: NUM_HEADS=0 must be at least 1'),
    (dict(hidden_size=None), 'MODEL_DIMS must be int'),
    (dict(rope_parameters='linear'), "rope_parameters='linear': no model of this family"),
    (dict(model_type=['llama']), r"model_type \['llama'\] is not supported"),
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
  assert 'model.norm.weight: has NaN values, so all that the model computes is NaN' in named[0]


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
    refused(tmp_path, folder, r'hold 16 of 32 rows .* some consolidated', 'meta')
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


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
  'name', [n if n == 'Gemma3' else pytest.param(n, marks=pytest.mark.slow) for n in IMAGES]
)
def test_the_text_model_of_a_model_with_images(name, tmp_path):
  """Its weights have other names than those of a text model, and config.json has them inside."""
  model = model_with_images(name)
  save(model, tmp_path / 'hf')
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


@pytest.mark.parametrize('name', PUBLISHED)
def test_a_published_file_is_recognized(name, tmp_path):
  everywhere = dict(
    architectures=['X'], torch_dtype='bfloat16', transformers_version='4.51.0', use_cache=True,
    initializer_range=0.02, bos_token_id=1, attention_dropout=0.0,
  )  # fmt: skip
  found = from_config(everywhere | PUBLISHED[name], tmp_path / 'config.json')
  assert type(found).__name__ == name
  assert found.FPROP_DTYPE == 'bfloat16'
