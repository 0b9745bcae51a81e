"""How llama.cpp stores Mixtral; see weights.gguf_architecture."""

from paxlite.weights.gguf_architecture import EXPERTS, SILU, SIZES, Architecture

ARCHITECTURES = (Architecture('mixtral', 'llama', SIZES | EXPERTS, SILU, 'interleaved'),)
