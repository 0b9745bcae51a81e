"""paxlite prove MODEL

Checks a model against the proof.json that `paxlite export --proof` wrote. MODEL is a Hugging Face
folder, a GGUF file, paxlite weights, a run, or a server with OpenAI's API that returns logprobs
(vLLM, llama.cpp).

Files are compared by config, tensor bits, tokenizer, chat template and the float32
log-probabilities of the proof's prompts; a server is asked for the continuations. Exits with 0 if
the model is the proof's, bit by bit or within its type's rounding, and with 2 if not. What MODEL
does not state is reported as not proven.

Examples:
  paxlite prove exported/zed
  paxlite prove http://localhost:8000 --proof=exported/zed/proof.json
"""

import pathlib
from collections.abc import Sequence

from paxlite.cli.parser import Parser, local
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject

PARSER = Parser(__doc__)
PARSER.word('model', 'MODEL', 'folder, GGUF file, run, or server address')
PARSER.option('--proof', 'proof.json (next to the model)', local)


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)

  from paxlite.proof.model_proof import FILE, read_proof

  is_server = args.model.startswith(('http://', 'https://'))
  if is_server and args.proof is None:
    raise UserError(f'a server needs --proof=FILE, the {FILE} of an export')
  path = pathlib.Path(local(args.model)) if not is_server else pathlib.Path()
  beside = path if path.is_dir() else path.parent
  place = pathlib.Path(args.proof) if args.proof is not None else beside / FILE
  proof = read_proof(place)
  print(f'{place}: {proof["model"]}, exported as {proof["facts"]["format"]}')
  problems = _of_server(args.model, proof) if is_server else _of_files(path, proof)
  if problems:
    raise UserError(f'{args.model} is not the model of {place}: {"; ".join(problems)}')


def _of_server(url: str, proof: JsonObject) -> list[str]:
  """Returns what shows that a server has another model."""
  from paxlite.proof.completion_server import CompletionServer
  from paxlite.proof.model_proof import TOLERANCES, compared_completion, worst
  from paxlite.proof.prompt_replies import STEPS, TOP

  server = CompletionServer(url)
  # a server computes in 16 bits, whatever the weights are
  tolerance = max(TOLERANCES[proof['facts']['type']], TOLERANCES['bf16'])
  found = [
    compared_completion(reply, server.completion(reply['text'], STEPS, TOP))
    for reply in proof['replies']
  ]
  for comparison in found:
    print(f'  {comparison.line}')
  problems = worst(found, tolerance)
  if not problems:
    _say_verdict([c.largest for c in found], tolerance)
    print('Not proven: the config, the bits of the weights, the chat template of the server')
  return problems


def _of_files(path: pathlib.Path, proof: JsonObject) -> list[str]:
  """Returns what shows that files hold another model."""
  from paxlite.proof.exported_model import opened
  from paxlite.proof.model_proof import TOLERANCES, compared_facts, compared_reply, worst
  from paxlite.proof.prompt_replies import judged

  expected = proof['facts']
  model = opened(path, expected['config'])
  stated = model.facts()
  facts = compared_facts(expected, stated)
  print(f'As in the proof: {", ".join(facts.proven) or "nothing"}')
  if facts.has_other_config:
    return facts.problems  # its weights would not fit
  if stated['tokenizer'] is None:
    return [*facts.problems, 'it has no tokenizer to read the prompts']
  with model.inference() as inference:
    replies = judged(inference, proof['replies'])
    reads = model.tokenizer is not None  # or its fields alone say what its tokenizer is
    ids = [inference.encode(reply['text']) if reads else None for reply in proof['replies']]
  tolerance = max(TOLERANCES[model.type], TOLERANCES['f32'])
  found = [
    compared_reply(reply, own, i)
    for reply, own, i in zip(proof['replies'], replies, ids, strict=True)
  ]
  for comparison in found:
    print(f'  {comparison.line}')
  problems = [*facts.problems, *worst(found, tolerance)]
  if not problems:
    _say_verdict([c.largest for c in found], tolerance)
    if facts.unproven:
      print(f'Not proven: {"; ".join(facts.unproven)}')
  return problems


def _say_verdict(differences: Sequence[float | None], tolerance: float) -> None:
  """Prints how close the log-probabilities are."""
  largest = max((d for d in differences if d is not None), default=None)
  if largest is None:
    print('It is the model of the proof, by its texts alone')
  elif largest == 0:
    print('It is the model of the proof: all log-probabilities are bit-equal')
  else:
    print(f'It is the model of the proof, within rounding: {largest:.3g} of {tolerance:g}')
