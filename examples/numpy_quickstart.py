"""Save, look, load, and notice damage: the whole of fp_multi with NumPy alone.

Run: python examples/numpy_quickstart.py [DIRECTORY]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np

import fp_multi as fp


def main(path: str | os.PathLike[str]) -> None:
    """Make ``path``/step_100, read it back in three ways, then damage it."""
    checkpoint = Path(path) / "step_100"
    rng = np.random.default_rng(seed=0)
    state = {
        "params": {"w": rng.standard_normal((1024, 1024), dtype=np.float32), "b": np.zeros(1024)},
        "history": [0.7, 0.4, 0.2],
        "shape": (1024, 1024),
        "step": 100,
    }

    report = fp.save(state, checkpoint, overwrite=True, metadata={"run": "quickstart"})
    print(f"saved {report.tensor_nbytes / 1e6:.1f} MB, durable after {report.elapsed_s * 1e3:.0f} ms ({report.engine})")

    loaded = fp.load(checkpoint)  # the same nesting: the tuple is a tuple, the int an int
    if not (np.array_equal(loaded["params"]["w"], state["params"]["w"]) and loaded["shape"] == state["shape"]):
        raise SystemExit("the state came back changed")

    bias = fp.load(checkpoint, only=["params.b"])["params"]["b"]  # reads these 8 KiB only
    print(f"one tensor by name: {bias.dtype} {bias.shape}")

    fp.load(checkpoint, target=state, inplace=True)  # into the memory of the arrays that are there

    print(f"verified {fp.verify(checkpoint).nbytes / 1e6:.1f} MB")
    shard = next(checkpoint.glob("shard-*"))
    with open(shard, "r+b") as file:
        last = os.pread(file.fileno(), 1, shard.stat().st_size - 1)[0]
        os.pwrite(file.fileno(), bytes([last ^ 1]), shard.stat().st_size - 1)  # one bit
    try:
        fp.load(checkpoint)
    except fp.errors.ChecksumError as error:
        print(f"one bit flipped, and load says: {error}")
    else:
        raise SystemExit("the damage went unnoticed")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
