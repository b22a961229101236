"""Train a small GPT with a checkpoint at every step; kill it whenever you like and start it again.

A checkpoint is written while the next step's forward and backward pass run. The text is Python's own standard library,
which every machine that runs this has. All that the next step depends on is in the checkpoint (weights, optimizer,
schedule, position, random states), so a run that was killed and resumed any number of times has, bit for bit, the
losses of a run that was left alone.

Run: python examples/torch_train.py DIRECTORY --steps 20
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp_multi import PendingSave
from fp_multi.adapters.torch import Checkpointer

TEXT_NBYTES = 4 << 20
KEEP = 2


@dataclass(frozen=True)
class Config:
    """The defaults make a checkpoint of 130 MB and a step of about half a second on one core."""

    layers: int = 6
    width: int = 384
    heads: int = 6
    context: int = 128
    batch: int = 4
    dropout: float = 0.1  # draws from torch's generator, whose state is therefore in the checkpoint
    learning_rate: float = 1e-3
    schedule_steps: int = 200
    seed: int = 1


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads, self.dropout = config.heads, config.dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.attend(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + F.dropout(self.shrink(F.gelu(self.grow(self.norm2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, config.width)
        self.position = nn.Parameter(0.02 * torch.randn(config.context, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Trainer:
    """The model and all that goes with it; ``state()`` is what a checkpoint holds."""

    def __init__(self, config: Config) -> None:
        torch.manual_seed(config.seed)
        np.random.seed(config.seed)
        random.seed(config.seed)
        self.config = config
        self.text = read_text()
        self.text_sha256 = hashlib.sha256(memoryview(self.text.numpy())).hexdigest()
        self.model = GPT(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, config.schedule_steps)
        self.step = 0
        self.tokens_seen = 0

    def train_step(self) -> float:
        """One step forward; returns the loss."""
        tokens = self._next_batch()
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        self.tokens_seen += tokens[:, 1:].numel()
        return loss.item()

    def _next_batch(self) -> Tensor:
        # The position alone decides the batch, whatever ran before.
        generator = torch.Generator().manual_seed(self.config.seed << 32 | self.tokens_seen)
        length = self.config.context + 1
        begins = torch.randint(len(self.text) - length, (self.config.batch,), generator=generator)
        return torch.stack([self.text[i : i + length] for i in begins]).long()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "text_sha256": self.text_sha256,
            "random": {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        if state["text_sha256"] != self.text_sha256:
            raise SystemExit(
                "the checkpoint was made with the text of another Python version; start in a new directory"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step, self.tokens_seen = state["step"], state["tokens_seen"]
        torch.set_rng_state(state["random"]["torch"])
        np.random.set_state(state["random"]["numpy"])
        random.setstate(state["random"]["python"])


def read_text() -> Tensor:
    """The first bytes of the standard library's sources, in the order of their names."""
    library = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for source in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
        if source.parent.name not in ("site-packages", "dist-packages"):
            text += source.read_bytes()
        if len(text) >= TEXT_NBYTES:
            break
    return torch.frombuffer(text[:TEXT_NBYTES], dtype=torch.uint8)


def append(path: Path, line: str) -> None:
    """Add a line with one write, so that a kill leaves a whole line or none."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, f"{line}\n".encode())
    finally:
        os.close(fd)


def main(path: str | os.PathLike[str], steps: int = 20, config: Config = Config()) -> None:
    """Train until ``steps`` steps are done, from the newest checkpoint in ``path`` on.

    ``path``/losses.log gets a line "step loss" for each step, with the loss in hexadecimal, which is exact.
    ``path``/saves.log gets "step stall_s elapsed_s nbytes" for each save that is on the drive: how long the training
    loop stood still for it, how long it took in all, and for how much.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True)
    trainer = Trainer(config)

    def log_save(pending: PendingSave) -> None:
        report = pending.report
        if pending.done and report.save is not None:
            facts = f"{report.stall_s:.6f} {report.save.elapsed_s:.6f} {report.save.tensor_nbytes}"
            append(path / "saves.log", f"{report.step} {facts}")

    with Checkpointer(path, keep=KEEP, progress=log_save) as checkpointer:
        checkpointer.attach(trainer.optimizer)  # its step waits until the last save no longer needs the old weights
        if checkpointer.latest_step() is not None:
            step, state = checkpointer.restore(map_location="cpu")
            trainer.restore(state)
            print(f"resumed from step {step}", flush=True)
        while trainer.step < steps:
            begin = time.perf_counter()
            loss = trainer.train_step()
            append(path / "losses.log", f"{trainer.step} {loss.hex()}")
            checkpointer.save(trainer.step, trainer.state())
            print(f"step {trainer.step}  loss {loss:.4f}  {time.perf_counter() - begin:.2f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="checkpoints and logs go here; a run that was killed goes on from here")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--threads", type=int, default=2, help="the number of threads is part of what makes losses equal"
    )
    for name in ("layers", "width", "heads", "context", "batch"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Config, name))
    given = vars(parser.parse_args())
    torch.set_num_threads(given.pop("threads"))
    main(given.pop("path"), given.pop("steps"), Config(**given))
