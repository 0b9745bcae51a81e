"""Trains low-rank factors beside the weights of an imported model, which stay as they are (LoRA).

    python examples/lora.py --weights=weights/smollm --data=chats.jsonl --folder=runs/lora

Arguments and defaults are those of finetune.py. `paxlite export runs/lora/run --to=peft --path=OUT`
writes the factors for peft, and `--to=hf` the merged model for transformers.
"""

from finetune import tuned

if __name__ == '__main__':
  tuned('HuggingFaceLoRA', __doc__, rate=1e-2, LORA_RANK=8)
