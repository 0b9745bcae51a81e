"""Writes the proof next to an export."""

import functools
import json
import pathlib
from collections.abc import Callable

from paxlite.compilation.versions import code_of_paxlite, versions
from paxlite.core.json_text import JsonObject
from paxlite.core.run_files import write_file
from paxlite.experiments.language_model import LanguageModel
from paxlite.files.json_files import read_object
from paxlite.generation.inference import load_checkpoint
from paxlite.proof.exported_model import config_of, opened
from paxlite.proof.model_proof import FILE, VERSION
from paxlite.proof.prompt_replies import replies


def proof_of(checkpoint: str, base_weights: str) -> Callable[[pathlib.Path, LanguageModel], None]:
  """Returns what writes the proof of weights into the folder of their export; see _write.

  Raises UserError if there is no tokenizer, or the model is too short for the prompts.

  Args:
    checkpoint: The run or the weights.
    base_weights: The folder of the base weights of a LoRA run, if they were moved.
  """
  inference = load_checkpoint(
    checkpoint, overrides={'FPROP_DTYPE': 'float32'}, base_weights=base_weights
  )
  source = inference.source
  written = source.written_by
  data = source.folder / 'data' / 'metadata'
  proof = {
    'proof': VERSION,
    'model': written['experiment'].rpartition('.')[2],
    'experiment': written,
    'checkpoint': {'name': source.folder.name, 'crc32': source.fingerprint},
    # of a run: the step, and the checksums of what it reads
    'data': read_object(data) if data.is_file() else None,
    'versions': versions(),
    'code': code_of_paxlite(),
    'replies': replies(inference),
  }
  return functools.partial(_write, proof)


def _write(proof: JsonObject, folder: pathlib.Path, experiment: LanguageModel) -> None:
  """Writes proof.json into an exported folder, with what identifies the files that are there."""
  contents = proof | {'facts': opened(folder, config_of(experiment)).facts()}
  write_file(folder / FILE, (json.dumps(contents, indent=1, ensure_ascii=False) + '\n').encode())
