"""The list of the kernels of attention. Other modules ask it what is known of a kernel."""

import dataclasses

from paxlite.layers.attention.attention_case import Case, Kernel, LocalKernel
from paxlite.layers.attention.blockwise_attention import BlockwiseKernel
from paxlite.layers.attention.cache_encoding import EncodedVectors
from paxlite.layers.attention.cached_attention import XlaCachedKernel
from paxlite.layers.attention.cpu_attention import CpuKernel
from paxlite.layers.attention.cudnn_attention import CudnnCachedKernel, CudnnKernel
from paxlite.layers.attention.paged_vectors import PagedVectors
from paxlite.layers.attention.partial_attention import PartialKernel
from paxlite.layers.attention.plain_attention import XlaKernel
from paxlite.layers.attention.splash_attention import SplashKernel
from paxlite.layers.attention.tpu_cached_attention import TpuCachedKernel

# The first one that does not refuse a case computes it; plain XLA refuses none.
_kernels: list[Kernel] = [
  CudnnCachedKernel(), TpuCachedKernel(), XlaCachedKernel(),
  CudnnKernel(), SplashKernel(), BlockwiseKernel(), CpuKernel(), XlaKernel(),
]  # fmt: skip


def register(kernel: Kernel) -> None:
  """Puts a kernel in front of all others, for each attention that is traced from now on.

  Raises ValueError if there is a kernel of this name.
  """
  if any(kernel.name == known.name for known in _kernels):
    raise ValueError(f'an attention kernel named {kernel.name!r} is registered already')
  _kernels.insert(0, kernel)


def refusal(kernel: Kernel, case: Case) -> str | None:
  """Returns why a kernel does not compute a case, to follow its name; None if it does."""
  if kernel.platform not in (None, case.platform):
    return f'is for {kernel.platform}'
  if kernel.is_fused and not case.fused:
    return 'is left out by USE_FLASH_ATTENTION=False'
  if case.over_context and not isinstance(kernel, LocalKernel):
    return 'does not support sequences split over context'
  if isinstance(case.k, EncodedVectors) and not kernel.reads_encoded:
    return 'does not support a cache of 8 bits'
  if isinstance(case.k, PagedVectors) and not kernel.reads_pages:
    return 'does not read pages'
  return kernel.refusal(case)


def why_not_fused(case: Case) -> list[str]:
  """Returns why fused kernels for the case's kind of device do not compute it, with their names.

  This is empty if one of them does, if none may, and if there is none.
  """
  fused = [k for k in _kernels if k.is_fused and k.platform in (None, case.platform)]
  reasons = {k.name: refusal(k, case) for k in fused}
  if not case.fused or None in reasons.values():
    return []
  return [f'{name} {reason}' for name, reason in reasons.items()]


def in_rows(case: Case) -> Case:
  """Returns the case with arrays in the place of pages, unless a kernel reads these."""
  if not (isinstance(case.k, PagedVectors) and isinstance(case.v, PagedVectors)):
    return case
  if any(refusal(kernel, case) is None for kernel in _kernels):
    return case
  return dataclasses.replace(case, k=case.k.vectors(), v=case.v.vectors())


def first(case: Case) -> Kernel:
  """Returns the kernel that computes a case."""
  return next(kernel for kernel in _kernels if refusal(kernel, case) is None)


def local(case: Case) -> LocalKernel:
  """Returns the kernel for whole rows of one device, of a case `over_context`."""
  found = first(case)
  assert isinstance(found, LocalKernel), found.name
  return found


def parts(case: Case) -> PartialKernel:
  """Returns the kernel for parts of the keys, of a case `over_context`."""
  computing = (k for k in _kernels if isinstance(k, LocalKernel) and refusal(k, case) is None)
  return next(part for part in (kernel.parts(case) for kernel in computing) if part is not None)


def is_residual(name: str) -> bool:
  """Returns whether a primitive of this name computes a residual, which a backward pass reads."""
  return any(kernel.kept is not None and kernel.kept.search(name) for kernel in _kernels)


def of_call(name: str) -> Kernel | None:
  """Returns the kernel that makes calls of this name; None for other operations."""
  named = (k for k in _kernels if k.primitives is not None and k.primitives.search(name))
  return next(named, None)
