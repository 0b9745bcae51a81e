"""Tiny models of transformers that read images, with random weights, and images for them."""

import pathlib
from typing import Any

IMAGE_ID = 95  # stands where an image is
_BLOCK = dict(
  vocab_size=96, bos_token_id=1, eos_token_id=2, hidden_size=32, intermediate_size=56,
  num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
_VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
# What text_config, vision_config and config.json say, by the first word of transformers' classes.
IMAGES = {
  'Kimi_K25': (
    dict(
      model_type='deepseek_v3', num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=12,
      qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10, n_routed_experts=8,
      num_experts_per_tok=3, moe_intermediate_size=24, first_k_dense_replace=1, n_group=1,
      topk_group=1,
    ),
    dict(pos_emb_height=2, pos_emb_width=2, pos_emb_time=1),
    dict(
      tie_word_embeddings=False, projection_hidden_size=16, image_token_id=95, video_token_id=94
    ),
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
      projector_output_dim=16, pixel_shuffle_ratio=0.5, intermediate_size=64,
    ),
    dict(boi_token_index=93, eoi_token_index=94),
  ),
  'Mistral3': (
    dict(model_type='mistral', head_dim=10, sliding_window=None),
    dict(model_type='pixtral', image_size=56, patch_size=14, head_dim=8),
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
    dict(image_token_id=95, video_token_id=94, vision_start_token_id=93, vision_end_token_id=92),
  ),
  'Mistral3 with Ministral3': (
    dict(
      model_type='ministral3', head_dim=10,
      rope_parameters=dict(
        rope_type='yarn', rope_theta=1e4, factor=4.0, original_max_position_embeddings=8,
        mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5,
      ),
    ),
    dict(model_type='pixtral', image_size=56, patch_size=14, head_dim=8),
    {},
  ),
}  # fmt: skip


def model_with_images(name: str, **text: Any):
  """Returns the ForConditionalGeneration of a case, with changes of its text_config."""
  import torch
  import transformers

  inside, image, others = IMAGES[name]
  first = name.partition(' ')[0]
  config = getattr(transformers, f'{first}Config')(
    text_config=_BLOCK | inside | text, vision_config=_VISION | image, **others,
    image_token_index=IMAGE_ID, eos_token_id=[2, 5],
  )  # fmt: skip
  torch.manual_seed(0)
  model = getattr(transformers, f'{first}ForConditionalGeneration')(config).eval()
  with torch.no_grad():
    for name, tensor in model.named_parameters():
      if 'language_model' not in name:  # projections of images are 0 at first
        tensor.add_(torch.randn_like(tensor) * 0.1)
  return model


def save(model, folder: pathlib.Path, **options: Any) -> None:
  """Writes a model as it is published; transformers 5.24 calls layers of Kimi's text blocks."""
  from safetensors.torch import load_file, save_file

  model.save_pretrained(folder, **options)
  wrong, right = 'language_model.model.blocks.', 'language_model.model.layers.'
  for path in folder.glob('*.safetensors'):
    if wrong.encode() in path.read_bytes():
      tensors = {name.replace(wrong, right): x for name, x in load_file(path).items()}
      save_file(tensors, path, metadata={'format': 'pt'})
  for index in folder.glob('*.index.json'):
    index.write_text(index.read_text().replace(wrong, right))


def image_inputs(name: str, seed: int) -> dict[str, Any]:
  """Returns what a model of a case reads: a text with an image of random pixels."""
  import torch

  generator = torch.Generator().manual_seed(seed)
  draw = lambda *shape: torch.rand(shape, generator=generator)
  first, count = name.partition(' ')[0], 1
  if first == 'Qwen3_5':  # patches of 2 · 3 · 16 · 16 numbers, four of which make a token
    given, count = dict(pixel_values=draw(16, 1536), image_grid_thw=torch.tensor([[1, 4, 4]])), 4
  elif first == 'Kimi_K25':
    pixels = draw(16, 3, 14, 14)
    given, count = dict(pixel_values=pixels, image_grid_thw=torch.tensor([[1, 4, 4]])), 4
  elif first == 'Mistral3':  # of one token alone, transformers 5.24 takes numbers for tokens
    given = dict(pixel_values=draw(1, 3, 56, 56), image_sizes=torch.tensor([[56, 56]]))
    count = 4
  elif first == 'Gemma4':  # nine patches make a token
    at = torch.cartesian_prod(torch.arange(6), torch.arange(6)).flip(-1)[None]
    given, count = dict(pixel_values=draw(1, 36, 48), image_position_ids=at), 4
  else:
    given = dict(pixel_values=draw(1, 3, 28, 28))
  ids = torch.tensor([[7, 8, *[IMAGE_ID] * count, 9, 10, 11]])
  if first == 'Qwen3_5':
    given['mm_token_type_ids'] = (ids == IMAGE_ID).int()
  return given | dict(input_ids=ids)
