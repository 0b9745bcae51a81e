"""Measures the training of Hugging Face's models on torch; imports torch and not paxlite.

float32 weights with bfloat16 autocast, torch's scaled_dot_product_attention (its flash kernel on
GPUs), fused AdamW, global-norm clipping at 1, torch.compile for model and loss.
"""

import statistics
import time
from typing import Any

Result = dict[str, Any]


def measure(name: str, tiny: bool, most: int | None, sizes: dict[str, Any]) -> Result:
  """Trains the model of `sizes` (sizes.torch_sizes) and returns the measurements."""
  del name, most
  import torch

  # --tiny must run on machines without a C++ compiler.
  device, backend = ('cpu', 'eager') if tiny else ('cuda', 'inductor')
  if tiny:
    torch.set_num_threads(1)
  torch.manual_seed(0)
  torch.set_float32_matmul_precision('high')
  started = time.perf_counter()
  model = build(sizes, device)
  loss_of = loss_function(model, device)
  if sizes['compiled']:
    loss_of = torch.compile(loss_of, backend=backend)
  optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=sizes['learning_rate'],
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.1,
    fused=True,
  )
  rows, length = sizes['batch']
  data = [tokens(sizes, device) for _ in range(4)]
  wait = torch.cuda.synchronize if device == 'cuda' else lambda: None

  def step(i: int) -> Any:
    ids = data[i % len(data)]
    optimizer.zero_grad(set_to_none=True)
    loss = loss_of(ids[:, :-1], ids[:, 1:])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()

  losses, seconds = [float(step(0))], []
  wait()
  compile_seconds = time.perf_counter() - started
  steps, warm_up, queued_steps = sizes['steps']
  for i in range(1, steps):
    before = time.perf_counter()
    loss = step(i)
    wait()
    seconds.append(time.perf_counter() - before)
    losses.append(float(loss))
  before = time.perf_counter()
  for i in range(queued_steps):
    step(i)
  wait()
  queued = (time.perf_counter() - before) / queued_steps
  low, median, high = statistics.quantiles(seconds[warm_up - 1 :], n=4)
  per_second = rows * length / median
  return {
    'backend': f'torch {torch.__version__}' + ', compiled' * sizes['compiled'],
    'platform': device,
    'layers': sizes['layers'],
    'fitted': {},
    'batch': sizes['batch'],
    'recomputes': sizes['recomputes'],
    'parameters': sum(p.numel() for p in model.parameters()),
    'median_seconds': median,
    'quartile_seconds': [low, high],
    'queued_seconds': queued,
    'tokens_per_second': per_second,
    'model_flops': per_second * sizes['flops_per_token'],
    'compile_seconds': compile_seconds,
    'peak_bytes': torch.cuda.max_memory_allocated() if device == 'cuda' else 0,
    'losses': losses,
  }


def build(sizes: dict[str, Any], device: str) -> Any:
  """Returns a GPT-2 or Llama of these sizes with random weights, created on the device."""
  import torch
  import transformers

  transformers.AttentionInterface.register('causal_sdpa', causal_attention)
  common = dict(vocab_size=sizes['vocab'], use_cache=False, attn_implementation='causal_sdpa')
  if sizes['architecture'] == 'gpt2':
    config = transformers.GPT2Config(
      n_positions=sizes['batch'][1],
      n_embd=sizes['model'],
      n_layer=sizes['layers'],
      n_head=sizes['heads'],
      n_inner=sizes['hidden'],
      resid_pdrop=0.0,
      embd_pdrop=0.0,
      attn_pdrop=0.0,
      **common,
    )
    cls = transformers.GPT2LMHeadModel
  else:
    config = transformers.LlamaConfig(
      max_position_embeddings=sizes['batch'][1],
      hidden_size=sizes['model'],
      intermediate_size=sizes['hidden'],
      num_hidden_layers=sizes['layers'],
      num_attention_heads=sizes['heads'],
      rms_norm_eps=1e-5,
      tie_word_embeddings=False,
      **common,
    )
    cls = transformers.LlamaForCausalLM
  with torch.device(device):
    model = cls(config).train()
  if sizes['recomputes']:
    model.gradient_checkpointing_enable({'use_reentrant': False})
  return model


def causal_attention(
  module: Any,
  query: Any,
  key: Any,
  value: Any,
  attention_mask: Any,
  scaling: float | None = None,
  **others: Any,
) -> tuple[Any, None]:
  """Computes torch's attention without a mask, because its flash kernel takes none.

  Some versions of transformers make a mask under torch.compile for their own `sdpa`.
  """
  del module, others
  import torch

  if attention_mask is not None:
    raise RuntimeError('transformers gives attention a mask: its flash kernel takes none')
  out = torch.nn.functional.scaled_dot_product_attention(
    query, key, value, is_causal=True, scale=scaling
  )
  return out.transpose(1, 2).contiguous(), None


def loss_function(model: Any, device: str) -> Any:
  import torch

  def loss_of(ids: Any, labels: Any) -> Any:
    with torch.autocast(device, torch.bfloat16):
      logits = model(input_ids=ids).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

  return loss_of


def tokens(sizes: dict[str, Any], device: str) -> Any:
  """Returns random tokens; the k-th token is about 1/k as frequent as the first."""
  import torch

  rows, length = sizes['batch']
  made = sizes['vocab'] ** torch.rand(rows, length + 1, dtype=torch.float64)
  return (made.long() - 1).to(device)
