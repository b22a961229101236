"""Train in JAX on four devices, go on in torch on three ranks, come back to JAX on two devices: one checkpoint format.

Every process reads just its part of every tensor, whoever wrote it and in whatever parts. Each change of framework is
checked: the weights are the same bit for bit, and the two models give the same outputs (float32 sums are made in
another order, so within 1e-4). The data are the bytes of Python's own standard library.

Run: python examples/cross_framework.py [DIRECTORY]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import fp_multi as fp

CONTEXT, HIDDEN, BATCH = 16, 256, 256
RATE, MOMENTUM = 0.05, 0.9
SHAPES = {"0.weight": (HIDDEN, CONTEXT * 256), "0.bias": (HIDDEN,), "2.weight": (256, HIDDEN), "2.bias": (256,)}
"""A perceptron that guesses the next byte; the names are those of a torch.nn.Sequential's state dict."""
JAX_STEPS, TORCH_STEPS = 40, 20
TOLERANCE = 1e-4


def main(path: str | os.PathLike[str]) -> None:
    """Make ``path``/jax and ``path``/torch, each read by the other framework."""
    Path(path).mkdir(parents=True, exist_ok=True)
    run(path, "jax-train", devices=4)
    run(path, "torch-train", ranks=3)
    run(path, "jax-check", devices=2)


def run(path: str | os.PathLike[str], stage: str, *, ranks: int = 1, devices: int = 1) -> None:
    """Run one stage in processes of its own."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with tempfile.TemporaryDirectory() as meeting:
        command = [sys.executable, __file__, str(path), "--stage", stage, "--meeting", f"{meeting}/place"]
        command += ["--ranks", str(ranks)]
        processes = [subprocess.Popen([*command, "--rank", str(rank)], env=env) for rank in range(ranks)]
        if any([process.wait() for process in processes]):
            raise SystemExit(f"{stage} failed")


def batch(number: int, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (BATCH, CONTEXT * 256), one-hot, and the bytes that follow."""
    begins = np.random.default_rng(number).integers(0, len(text) - CONTEXT, BATCH)
    windows = text[begins[:, None] + np.arange(CONTEXT + 1)]
    return np.eye(256, dtype=np.float32)[windows[:, :-1]].reshape(BATCH, -1), windows[:, -1].astype(np.int64)


def read_text() -> np.ndarray:
    library = Path(sysconfig.get_path("stdlib"))
    return np.frombuffer(b"".join([file.read_bytes() for file in sorted(library.glob("*.py"))[:60]]), np.uint8)


def compare(what: str, state: dict[str, Any], outputs: np.ndarray, path: Path) -> str:
    """Weights against the file, outputs against those of the framework that wrote it."""
    stored = fp.load(path)
    for name in SHAPES:
        if state[name].tobytes() != stored["params"][name].tobytes():
            raise SystemExit(f"{what}: {name} came back changed")
    difference = float(np.abs(outputs - stored["outputs"]).max())
    if difference > TOLERANCE:
        raise SystemExit(f"{what}: the outputs differ by {difference}")
    return f"weights equal bit for bit, outputs within {difference:.1e}"


# JAX: arrays cut into rows, over the devices of one process


def jax_model() -> Any:
    import jax
    import jax.numpy as jnp

    def apply(params: Any, x: Any) -> Any:
        hidden = jax.nn.relu(x @ params["0.weight"].T + params["0.bias"])
        return hidden @ params["2.weight"].T + params["2.bias"]

    def loss(params: Any, x: Any, y: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(apply(params, x)), y[:, None], 1).mean()

    @jax.jit
    def step(params: Any, momentum: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum, gradients)
        return jax.tree.map(lambda p, m: p - RATE * m, params, momentum), momentum, value

    return apply, loss, step


def rows_over_devices() -> Any:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    return NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), PartitionSpec("rows"))


def jax_train(path: Path) -> None:
    import jax
    import jax.numpy as jnp

    import fp_multi.adapters.orbax  # noqa: F401  # from now on fp.save knows JAX's arrays

    apply, _, step = jax_model()
    rng = np.random.default_rng(0)
    params: Any = {
        name: jax.device_put(rng.normal(0, 0.05, shape).astype(np.float32), rows_over_devices())
        for name, shape in SHAPES.items()
    }
    momentum, text, losses = jax.tree.map(jnp.zeros_like, params), read_text(), []
    for number in range(JAX_STEPS):
        params, momentum, value = step(params, momentum, *batch(number, text))
        losses.append(float(value))
    outputs = apply(params, batch(0, text)[0])
    state = {"params": params, "momentum": momentum, "step": JAX_STEPS, "outputs": np.asarray(outputs)}
    report = fp.save(state, path / "jax", overwrite=True)
    print(
        f"JAX, {len(jax.devices())} devices: loss {losses[0]:.2f} -> {losses[-1]:.2f}; "
        f"saved {report.tensor_nbytes / 1e6:.1f} MB in {report.elapsed_s * 1e3:.0f} ms",
        flush=True,
    )


def jax_check(path: Path) -> None:
    import jax

    from fp_multi.adapters.orbax import load

    apply, loss, _ = jax_model()
    only = [("params",), ("step",)]
    state = load(path / "torch", only=only, device=rows_over_devices())
    x, y = batch(0, read_text())
    params = {name: np.asarray(value) for name, value in state["params"].items()}
    result = compare("JAX", params, np.asarray(apply(state["params"], x)), path / "torch")
    print(f"JAX, {len(jax.devices())} devices: {result}; loss {float(loss(state['params'], x, y)):.2f}", flush=True)


# torch: parameters and momentum as DTensors, one part on each rank (FSDP2)


def torch_train(path: Path, rank: int, ranks: int, meeting: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from fp_multi.adapters.torch import TorchComm, load, save

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    comm = TorchComm(timeout_s=60)
    nn = torch.nn
    model = nn.Sequential(nn.Linear(CONTEXT * 256, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 256))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    parameters = dict(model.named_parameters())  # the ranks' parts; after a forward pass the model shows whole ones
    optimizer = torch.optim.SGD(parameters.values(), RATE, MOMENTUM)

    # The model says in which parts the tensors are wanted; JAX wrote them in others.
    like = model.state_dict()
    target = {"params": dict(like), "momentum": dict(like), "step": 0, "outputs": torch.empty(BATCH, 256)}
    state = load(path / "jax", target=target)
    model.load_state_dict(state["params"])
    for name, parameter in parameters.items():
        optimizer.state[parameter]["momentum_buffer"] = state["momentum"][name]

    text = read_text()
    x, y = (torch.from_numpy(array) for array in batch(0, text))
    whole = {name: tensor.full_tensor().numpy() for name, tensor in model.state_dict().items()}
    result = compare("torch", whole, model(x).detach().numpy(), path / "jax")
    loss = nn.functional.cross_entropy
    before = loss(model(x), y).item()
    for number in range(JAX_STEPS, JAX_STEPS + TORCH_STEPS):
        inputs, following = (torch.from_numpy(array) for array in batch(number, text))
        optimizer.zero_grad()
        loss(model(inputs), following).backward()
        optimizer.step()
    outputs = model(x).detach()
    momentum = {name: optimizer.state[parameter]["momentum_buffer"] for name, parameter in parameters.items()}
    state = {"params": dict(model.state_dict()), "momentum": momentum, "step": number + 1, "outputs": outputs}
    report = save(state, path / "torch", overwrite=True, comm=comm)
    if rank == 0:
        print(
            f"torch, {ranks} ranks: {result}; loss {before:.2f} -> {loss(outputs, y):.2f}; "
            f"saved {report.tensor_nbytes / 1e6:.1f} MB in {report.elapsed_s * 1e3:.0f} ms",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, nargs="?", help="checkpoints go here")
    for name, default in (("stage", ""), ("meeting", "")):
        parser.add_argument(f"--{name}", default=default, help=argparse.SUPPRESS)
    for name in ("rank", "ranks"):
        parser.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stage == "jax-train":
        jax_train(given.path)
    elif given.stage == "torch-train":
        torch_train(given.path, given.rank, given.ranks, given.meeting)
    elif given.stage == "jax-check":
        jax_check(given.path)
    elif given.path is not None:
        main(given.path)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
