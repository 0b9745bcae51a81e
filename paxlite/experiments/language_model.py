"""The base class of experiments with a language model, and the backend of its multiplications."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import fiddle as fdl

from paxlite import extensions
from paxlite.compilation.compiler import Option, is_known_here
from paxlite.config.attribute_kinds import Run, Training
from paxlite.core.errors import UserError
from paxlite.experiments.parts.stack import DeviceKind
from paxlite.experiments.parts.transformer import Transformer
from paxlite.layers.precision import backends
from paxlite.layers.precision.backends import Backend, TeRecipe

if TYPE_CHECKING:
  import jax


class LanguageModel(Transformer, subject='Backends'):
  """A decoder-only transformer on any backend, trained with Pax's Adam.

  At most one of USE_FP8, USE_TE and USE_INT8 may be on.
  If USE_TE or TE_RECIPE is not set, it follows the environment's ENABLE_TE=1 or ENABLE_FP8=1.

  USE_TE=gemm uses Transformer Engine's matrix multiplications; the model's parameters stay the
  same. USE_TE=layer uses Transformer Engine's whole layers, which have other parameters
  (paxlite convert-te converts them).
  """

  _is_published = False  # whether the experiments that fine-tune any model take it

  USE_FP8: Training[bool] = False  # FP8 matrix multiplications, by XLA alone
  USE_INT8: Training[Literal['off', 'forward', 'forward_backward']] = (
    'off'  # int8 matrix multiplications, in the forward pass or both
  )

  @property
  def USE_TE(self) -> Training[Literal['off', 'gemm', 'layer']]:
    """Transformer Engine for matrix multiplications (gemm) or whole blocks (layer)."""
    return 'gemm' if backends.environment_flag('ENABLE_TE') else 'off'

  @property
  def TE_RECIPE(self) -> Training[TeRecipe]:
    """Transformer Engine's FP8 recipe, or NVFP4; bf16: none."""
    if vars(self).get('USE_TE') == 'off':
      return 'bf16'
    return 'DelayedScaling' if backends.environment_flag('ENABLE_FP8') else 'bf16'

  @property
  def plain_backend(self) -> dict[str, object]:
    return dict(USE_FP8=False, USE_TE='off', TE_RECIPE='bf16', USE_INT8='off')

  @property
  def continues_text(self) -> bool:
    return self.USE_TE != 'layer'

  @functools.cached_property
  def backend(self) -> Backend:
    """The backend, and the attribute or environment variable that chose it.

    Raises UserError if two backends that exclude each other were chosen.
    """
    names = [name for name, is_on in self._backends.items() if is_on]
    if len(names) > 1:
      raise UserError(
        f'{" and ".join(map(self._origin, names))} exclude each other: choose one; USE_FP8=False, '
        'USE_TE=off or USE_INT8=off turn the others off'
      )
    if self.TE_RECIPE != 'bf16' and self.USE_TE == 'off':
      raise UserError(
        f'{self._origin("TE_RECIPE")} is for Transformer Engine, which is off: set ENABLE_TE=1 or '
        "USE_TE=gemm; or, for XLA's own FP8, unset ENABLE_FP8 and give USE_FP8=True"
      )
    if not names:
      return super().backend
    if self.USE_FP8:
      return Backend('xla_fp8', self._origin('USE_FP8'))
    if self.USE_INT8 != 'off':
      return Backend('int8', self._origin('USE_INT8'))
    reason = f'{self._origin("USE_TE")}, {self._origin("TE_RECIPE")}'
    if self.USE_TE == 'layer':
      reason += f', NVTE_FUSED_ATTN={backends.fused_attention():d}'
    kinds: dict[TeRecipe, backends.BackendName] = {'bf16': 'te', 'NVFP4': 'te_fp4'}
    return Backend(kinds.get(self.TE_RECIPE, 'te_fp8'), reason)

  @property
  def _backends(self) -> dict[str, bool]:
    """The attributes that choose another backend than plain XLA, and whether they do."""
    return {
      'USE_FP8': self.USE_FP8,
      'USE_TE': self.USE_TE != 'off',
      'USE_INT8': self.USE_INT8 != 'off',
    }

  def attention_choices(self, device: 'jax.Device') -> list[str]:
    return [] if self.USE_TE == 'layer' else super().attention_choices(device)

  def _origin(self, name: str) -> str:
    """Returns an attribute with its value, or the environment variable that it follows."""
    variable = {'USE_TE': 'ENABLE_TE', 'TE_RECIPE': 'ENABLE_FP8'}.get(name)
    if variable is not None and name not in vars(self) and backends.environment_flag(variable):
      return f"the environment's {variable}=1"
    return f'{name}={getattr(self, name)}'

  def validate(self) -> None:
    super().validate()
    if self.USE_TE == 'layer':
      self.build_task()
    if self.backend.name not in ('xla', 'xla_fp8') and self.num_stages > 1:
      raise UserError(
        f'{self.backend}: a pipeline (mesh axis stage) runs in XLA alone, FP8 included'
      )

  @property
  def UNROLL_LAYERS(self) -> Run[list[DeviceKind]]:
    """Device kinds that compile repeated layers one by one, without a loop.

    With Transformer Engine there are none: policies neither see nor keep its products.
    """
    return [] if self.USE_TE != 'off' else super().UNROLL_LAYERS

  def compiler_options(
    self, platform: str, is_known: Callable[[str, Option], bool] = is_known_here
  ) -> dict[str, Option]:
    options = super().compiler_options(platform, is_known)
    if self.backend.name == 'xla_fp8' and platform in ('gpu', 'cuda'):
      # Triton's kernels would multiply FP8 matrices in bfloat16; cuBLASLt has FP8 kernels.
      options.setdefault('xla_gpu_enable_triton_gemm', False)
    return options

  def complete(self, task: fdl.Config) -> None:
    self.check_optimizer(task)
    self.quantize_frozen(task)
    for name, is_on in self._backends.items():
      if is_on:
        extensions.hook(name)(self, task)

  @property
  def learns_chats(self) -> bool:
    """Whether the model learns answers, so that what ends an answer of a chat always stops it."""
    return False

  @property
  def reads_clock(self) -> bool:
    """Whether the training data depend on the day, because the chat template writes it."""
    return False
