"""Train a small byte-level language model with Lightning; checkpoints are written beside training.

Two things make the difference to a stock Lightning script: ``plugins=[io]`` and ``io.callback``. Start it again with
more steps and it goes on from the last checkpoint. The text is Python's own standard library.

Run: python examples/lightning_train.py DIRECTORY --steps 40
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fp_multi.adapters.torch.lightning import FastPersistCheckpointIO

CONTEXT = 64
BATCH = 8


class Bytes(pl.LightningModule):
    """Predicts the next byte from the eight before it."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(256, width)
        self.mix = nn.Conv1d(width, width, kernel_size=8)
        self.head = nn.Linear(width, 256)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        tokens = batch[0].long()
        seen = F.pad(self.embed(tokens[:, :-1]).transpose(1, 2), (self.mix.kernel_size[0] - 1, 0))
        logits = self.head(F.gelu(self.mix(seen)).transpose(1, 2))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def read_text(nbytes: int = 1 << 20) -> Tensor:
    """The first bytes of the standard library's sources, a context and its next byte in each row."""
    text = bytearray()
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += source.read_bytes()
        if len(text) >= nbytes:
            break
    rows = min(len(text), nbytes) // (CONTEXT + 1)
    return torch.frombuffer(text, dtype=torch.uint8)[: rows * (CONTEXT + 1)].view(rows, CONTEXT + 1)


def main(path: str | os.PathLike[str], steps: int = 40, **trainer_options: Any) -> None:
    """Train until ``steps`` steps are done, from the last checkpoint in ``path`` on."""
    path = Path(path)
    pl.seed_everything(1)
    io = FastPersistCheckpointIO(overlap="hybrid")
    keep = ModelCheckpoint(path, filename="{step}", monitor="loss", save_top_k=2, save_last=True, every_n_train_steps=2)
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_model_summary=False,
        plugins=[io],
        callbacks=[io.callback, keep],
        **trainer_options,
    )
    last = path / "last.ckpt"
    if last.exists():
        print(f"resumed from step {io.load_checkpoint(last)['global_step']}")
    trainer.fit(Bytes(), DataLoader(TensorDataset(read_text()), BATCH), ckpt_path=last if last.exists() else None)
    print(f"step {trainer.global_step}: {sorted(entry.name for entry in path.iterdir())}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="checkpoints go here; a run that was stopped goes on from here")
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    main(given.path, given.steps)
