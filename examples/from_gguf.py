"""Writes a GGUF file as a folder of Hugging Face, which paxlite import reads, by transformers.

    python examples/from_gguf.py downloads/model-q8_0.gguf --to=downloads/model

It needs transformers and torch. The weights become those that the file stands for, in float32.
"""

import argparse
import pathlib

from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('file', type=pathlib.Path, help='the GGUF file')
  parser.add_argument('--to', required=True, help='the folder to write')
  args = parser.parse_args()
  folder, name = args.file.parent, args.file.name
  whole = GgufConfig(dequantize=True)  # which can be saved
  model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, quantization_config=whole)
  if hasattr(model.config, 'rms_norm_eps'):  # the file has it in float32
    model.config.rms_norm_eps = round(model.config.rms_norm_eps, 12)
  model.save_pretrained(args.to)
  AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(args.to)


if __name__ == '__main__':
  main()
