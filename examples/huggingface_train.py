"""Train a small Llama on bytes with the Hugging Face Trainer; the optimizer's state is written beside training.

Two things make the difference to a stock script: the trainer's class and ``overlap=``. Start it again with more steps
and it goes on from the last checkpoint. The text is Python's own standard library; nothing is downloaded.

Run: python examples/huggingface_train.py DIRECTORY --steps 40
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from fp_multi.adapters.torch.huggingface import FastPersistTrainer

CONTEXT = 64


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Bytes of the standard library's sources, a context in each row."""

    def __init__(self, nbytes: int = 1 << 20) -> None:
        text = bytearray()
        for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += source.read_bytes()
            if len(text) >= nbytes:
                break
        rows = min(len(text), nbytes) // CONTEXT
        self.rows = torch.frombuffer(text, dtype=torch.uint8)[: rows * CONTEXT].view(rows, CONTEXT).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **sizes))


def main(path: str | os.PathLike[str], steps: int = 40, **options: Any) -> None:
    """Train until ``steps`` steps are done, from the last checkpoint in ``path`` on."""
    path = Path(path)
    arguments = TrainingArguments(
        output_dir=str(path),
        max_steps=steps,
        save_steps=2,
        save_total_limit=2,
        logging_steps=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        **options,
    )
    trainer = FastPersistTrainer(model=model(), args=arguments, train_dataset=Rows(), overlap="hybrid")
    last = get_last_checkpoint(str(path)) if path.is_dir() else None
    if last is not None:
        print(f"resuming from {Path(last).name}")
    trainer.train(resume_from_checkpoint=last)
    print(f"step {trainer.state.global_step}: {sorted(entry.name for entry in path.iterdir())}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="checkpoints go here; a run that was stopped goes on from here")
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    main(given.path, given.steps)
