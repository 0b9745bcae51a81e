"""python -m tests.support.context_meshes [CASE…]: tests.support.meshes, with split rows.

A case is MODEL/MESH of the tables below.
"""

import sys

from paxlite.experiments.llama import LLaMA
from tests.support import meshes

_LLAMA = meshes.SMALL | dict(NUM_KV_HEADS=2)
meshes.MODELS |= {
  'window': (LLaMA, _LLAMA | dict(SLIDING_WINDOW=12)),
  'pattern': (LLaMA, _LLAMA | dict(SLIDING_WINDOW=20, ATTENTION_PATTERN=['sliding', 'full'])),
}


def mesh(way: str, *sizes: int) -> dict[str, object]:
  axes = [*meshes.AXES, 'context']
  return dict(MESH_AXES=axes, ICI_MESH_SHAPE=list(sizes), CONTEXT_ATTENTION=way)


meshes.MESHES |= {
  'ring2': mesh('ring', 1, 2, 2, 2),
  'ring4': mesh('ring', 2, 1, 1, 4),
  'ring8': mesh('ring', 1, 1, 1, 8) | dict(PERCORE_BATCH_SIZE=0.25),
  'heads2': mesh('heads', 2, 2, 1, 2),
  'heads4': mesh('heads', 1, 2, 1, 4),
}

if __name__ == '__main__':
  meshes.main(sys.argv[1:])
