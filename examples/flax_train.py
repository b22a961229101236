"""Train a Flax model on eight devices with Orbax's CheckpointManager and fp_multi's handler; kill it, resume it.

The text is Python's own standard library. The weights are spread over a mesh of eight (pretended) CPU devices, and a
checkpoint is saved at every step while the next one computes. A run that was killed and resumed has, bit for bit, the
losses of a run that was left alone. At the end the checkpoint is restored on a mesh of two devices and must give the
same loss.

Run: python examples/flax_train.py DIRECTORY
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

STEPS = 12
KILLED_AFTER = 5
CONTEXT, BATCH, WIDTH = 16, 64, 256
TEXT_NBYTES = 1 << 20


def main(path: str | os.PathLike[str]) -> None:
    """Run the training twice, once with a SIGKILL in the middle, and compare.

    Args:
        path: a directory for checkpoints.
    """
    root = Path(path).resolve()
    root.mkdir(parents=True, exist_ok=True)
    alone = losses_of(root / "alone", devices=8)
    killed = start(root / "killed", devices=8, kill_after=KILLED_AFTER)
    killed.communicate()
    if killed.returncode != -signal.SIGKILL:
        raise SystemExit(f"expected the run to be killed, found exit status {killed.returncode}")
    resumed = losses_of(root / "killed", devices=8)
    first = min(resumed)
    same = all([resumed[step] == alone[step] for step in resumed])
    print(f"killed after step {KILLED_AFTER}, resumed at step {first}: losses {'are the same' if same else 'DIFFER'}")
    if not same:
        raise SystemExit(f"{alone}\n{resumed}")
    ((step, on_8),) = losses_of(root / "killed", devices=8, evaluate=True).items()
    ((_, on_2),) = losses_of(root / "killed", devices=2, evaluate=True).items()
    print(f"step {step} restored on 8 devices: the next loss is {on_8:.6f}; on 2 devices: {on_2:.6f}")
    if abs(on_2 - on_8) > 1e-5:
        raise SystemExit("the restored model is another one")


def start(directory: Path, *, devices: int, kill_after: int | None = None, evaluate: bool = False) -> Any:
    """A process of its own: the number of devices is fixed when JAX starts."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, __file__, str(directory), "--train"]
    command += [] if kill_after is None else ["--kill-after", str(kill_after)]
    command += ["--evaluate"] if evaluate else []
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def losses_of(directory: Path, *, devices: int, evaluate: bool = False) -> dict[int, float]:
    """Run to the end; the loss of each step that it made."""
    process = start(directory, devices=devices, evaluate=evaluate)
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the training failed with exit status {process.returncode}")
    return {int(step): float.fromhex(loss) for step, loss in json.loads(output.splitlines()[-1]).items()}


def train(directory: Path, kill_after: int | None, evaluate: bool) -> None:
    """The training itself, or the loss of the newest checkpoint."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import orbax.checkpoint as ocp
    from flax.training.train_state import TrainState
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from fp_multi.adapters.orbax import FastPersistRestore, FastPersistSave

    class Model(nn.Module):
        """Predicts the next byte from the bytes before it."""

        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = nn.Embed(256, 32)(tokens).reshape(len(tokens), -1)
            for _ in range(3):
                x = nn.gelu(nn.Dense(WIDTH)(x))
            return nn.Dense(256)(x)

    mesh = Mesh(np.array(jax.devices()), ("model",))

    def sharding_of(leaf: Any) -> NamedSharding:
        spread = getattr(leaf, "ndim", 0) == 2 and leaf.shape[1] % len(jax.devices()) == 0
        return NamedSharding(mesh, PartitionSpec(None, "model") if spread else PartitionSpec())

    model, optimizer = Model(), optax.adamw(1e-3)
    apply = model.apply

    def begin() -> TrainState:
        params = model.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))
        return TrainState.create(apply_fn=apply, params=params, tx=optimizer)

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        logits = apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1]).mean()

    @jax.jit
    def step_of(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state.params, tokens)
        return state.apply_gradients(grads=gradients), loss

    text = np.frombuffer(standard_library(), np.uint8)

    def batch(step: int) -> jax.Array:
        begins = np.random.default_rng(step).integers(0, len(text) - CONTEXT - 1, BATCH)
        return jnp.asarray(np.stack([text[at : at + CONTEXT + 1] for at in begins]).astype(np.int32))

    # Shapes, dtypes and where everything shall be: on this mesh, whatever mesh has saved it.
    abstract = jax.eval_shape(begin)
    target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding_of(a)), abstract)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    losses: dict[int, str] = {}
    with ocp.CheckpointManager(directory, options=options) as manager:
        latest = manager.latest_step()
        if latest is None:
            state = jax.device_put(begin(), jax.tree.map(sharding_of, abstract))
        else:
            state = manager.restore(latest, args=FastPersistRestore(target))
        if evaluate:
            print(json.dumps({latest: float(loss_of(state.params, batch(STEPS))).hex()}))
            return
        for step in range(0 if latest is None else latest + 1, STEPS):
            state, loss = step_of(state, batch(step))
            losses[step] = float(loss).hex()
            # The next step computes while this one is written; JAX arrays never change, so there is no fence.
            manager.save(step, args=FastPersistSave(state))
            if step == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
        manager.wait_until_finished()
    print(json.dumps(losses))


def standard_library() -> bytes:
    """Real text that is on every machine with Python."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return b"".join([file.read_bytes() for file in files])[:TEXT_NBYTES]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--train", action="store_true", help="used by the example itself")
    parser.add_argument("--kill-after", type=int, metavar="STEP", help="used by the example itself")
    parser.add_argument("--evaluate", action="store_true", help="used by the example itself")
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.directory, arguments.kill_after, arguments.evaluate)
    else:
        main(arguments.directory)
