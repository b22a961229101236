"""DeepSpeed's engine with our checkpoint engine, on the CPU: what it saves, when it commits, what it resumes."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest
from support import check_child

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

# DeepSpeed starts a process group, which would stay for other tests: everything runs in a process of its own.
CODE = """
import glob, os, warnings
warnings.simplefilter("ignore")
os.environ.update(DS_ACCELERATOR="cpu", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
os.environ["MASTER_PORT"] = sys.argv[2]
import deepspeed, torch
from fp_multi.adapters.torch import load
from fp_multi.adapters.torch.deepspeed import FastPersistCheckpointEngine
from fp_multi.errors import PickleRefusedError, StorageError, UnsupportedLeafError

# Not by name: deepspeed.comm has torch itself under the name of its own module. The operator would be compiled for
# minutes, and one process does without.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
torch.set_num_threads(1)
home = sys.argv[1]
stage = int(sys.argv[3])
quick = fp.SaveConfig(durable=False)
how = {"allow_pickle": True, "config": quick}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
        self.register_buffer("calls", torch.zeros(9, dtype=torch.int64))

    def forward(self, rows):
        self.calls += 1  # changes in a forward pass, as batch norm's statistics do
        return self.layers(rows)


def made(**options):
    torch.manual_seed(1)
    net = Net()
    settings = {"train_batch_size": 4, "zero_optimization": {"stage": stage}, "bf16": {"enabled": stage > 0},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}}
    engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=settings)[0]
    return engine, (FastPersistCheckpointEngine.install(engine, **options) if options else None)


def backward(engine):
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(engine.global_steps))
    engine.backward(engine(rows.to(next(engine.module.parameters()).dtype)).float().square().mean())


def train(engine, steps):
    for _ in range(steps):
        backward(engine)
        engine.step()


def weights(engine):
    return {name: value.detach().clone() for name, value in engine.module.state_dict().items()}


def equal(a, b):
    assert list(a) == list(b)
    return all(torch.equal(a[name], b[name]) for name in a)


def latest(name):
    path = f"{home}/{name}/latest"
    return open(path).read() if os.path.exists(path) else None


# DeepSpeed alone.
engine, _ = made()
train(engine, 2)
engine.save_checkpoint(f"{home}/stock")
train(engine, 2)
reference = weights(engine)

# Decoupled: read beside the next forward and backward pass, committed by the next step.
engine, ours = made(**how)
train(engine, 2)
before = weights(engine)
engine.save_checkpoint(f"{home}/ours", client_state={"epoch": (1, "a")})
assert latest("ours") is None and ours.get_commit_info().tag == "global_step2"
backward(engine)
assert latest("ours") is None
engine.step()
assert latest("ours") == "global_step2" and ours.get_commit_info() is None
train(engine, 1)
assert equal(weights(engine), reference)
files = sorted(glob.glob(f"{home}/ours/global_step2/*.pt"))
stock_files = sorted(glob.glob(f"{home}/stock/global_step2/*.pt"))
assert [os.path.basename(file) for file in files] == [os.path.basename(file) for file in stock_files]
for file in files:
    fp.verify(file)
assert equal(load(files[-1], allow_pickle=True)["module"], before)

# Resumed, from either kind of checkpoint.
for name in ("ours", "stock"):
    engine, ours = made(**how)
    path, client = engine.load_checkpoint(f"{home}/{name}")
    assert path is not None and engine.global_steps == 2
    assert client.get("epoch") == ((1, "a") if name == "ours" else None)
    assert equal(weights(engine), before)
    train(engine, 2)
    assert equal(weights(engine), reference), name

# The last one, which no step follows; and one that is replaced.
engine.save_checkpoint(f"{home}/ours", tag="last")
ours.finish()
assert latest("ours") == "last"
engine.save_checkpoint(f"{home}/ours", tag="last")
ours.finish()
engine.save_checkpoint(f"{home}/ours", tag="unfinished")
ours.cleanup()
assert latest("ours") == "last" and fp.verify(glob.glob(f"{home}/ours/unfinished/*model_states.pt")[0])

# A failure: raised by the step, before it changes anything; not named in latest.
before = weights(engine)
_engine.inject_fault("write_completion", error=errno.ENOSPC)
engine.save_checkpoint(f"{home}/ours", tag="failed")
backward(engine)
try:
    engine.step()
except StorageError as error:
    assert error.errno == errno.ENOSPC
else:
    raise AssertionError("no error")
changed = {name for name, value in weights(engine).items() if not torch.equal(value, before[name])}
assert changed == {"calls"}
assert latest("ours") == "last"
engine.step()
assert not equal(weights(engine), before)

# Not decoupled: all there on return.
engine, ours = made(decoupled=False, **how)
train(engine, 1)
engine.save_checkpoint(f"{home}/sync")
assert latest("sync") == "global_step1" and not ours.is_decoupled()

# Pickles only if asked for.
engine, ours = made(config=quick)
try:
    engine.load_checkpoint(f"{home}/stock")
except PickleRefusedError as error:
    assert "allow_pickle=True" in str(error)
else:
    raise AssertionError("no error")
if stage:
    try:
        engine.save_checkpoint(f"{home}/refused")
    except UnsupportedLeafError as error:
        assert "optimizer_state_dict.loss_scaler" in str(error), error
    else:
        raise AssertionError("no error")
print("all is well", flush=True)
os._exit(0)  # whatever gloo and DeepSpeed do at the end of a process is not the matter here
"""


@pytest.mark.parametrize("stage", [0, 1])
def test_training_saving_and_resuming(tmp_path: Path, stage: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    output = check_child(CODE, tmp_path, port, stage, timeout_s=180)
    assert "all is well" in output
