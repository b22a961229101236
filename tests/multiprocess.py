"""Real processes for tests: torchrun's environment over gloo, and jax.distributed on the CPU.

A test gives a function of its own module; each process imports that module anew, sets the framework up, calls the
function and stores what it returned. ``check_`` in front of such functions keeps them apart from tests::

    def check_sum(x):
        return dist.get_rank() + x

    def test_sum():
        assert run_torch(check_sum, 2, 10).results == [10, 11]

One start costs seconds, most of it the framework's import: let one function check many things.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Function = Callable[..., Any]
StoreHost = Literal["agent", "rank0", "file"]

HANG_LIMIT_S = 120.0
"""Only a hang takes so long; each process then shows where it stands, and all are killed."""
GRACE_S = 20.0
"""How long the others may go on when a process has failed that should not have."""


@dataclass(frozen=True)
class Job:
    """What became of the processes, in the order of their ranks."""

    codes: list[int]
    """Exit status; for a process that a signal killed, minus its number."""
    results: list[Any]
    """What the function returned; None where it did not."""
    outputs: list[str]
    """Standard output and standard error."""


def die() -> None:
    """End this process as the kernel's out-of-memory killer would, in the middle of whatever it does."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_plain(
    what: Function | Path,
    ranks: int,
    *arguments: Any,
    dies: Collection[int] = (),
    timeout_s: float = HANG_LIMIT_S,
    grace_s: float = GRACE_S,
) -> Job:
    """Run a function in processes without a framework, which know their ``RANK``; otherwise as :func:`run_torch`."""
    return _run(what, ranks, arguments, {"FP_FRAMEWORK": "none"}, dies, lambda rank: (), timeout_s, grace_s)


def run_torch(
    what: Function | Path,
    ranks: int,
    *arguments: Any,
    store: StoreHost = "agent",
    dies: Collection[int] = (),
    env: Mapping[str, str] | None = None,
    prefix: Callable[[int], Sequence[str]] = lambda rank: (),
    timeout_s: float = HANG_LIMIT_S,
) -> Job:
    """Run a function, or a script that calls ``init_process_group`` itself, in processes with torchrun's environment.

    Args:
        what: a function at the top level of a module, or the path of a script.
        ranks: number of processes.
        *arguments: for the function (pickled), or for the script's command line.
        store: who hosts the key-value store: torchrun's agent (this process), rank 0 (only for functions), or a file.
        dies: ranks that need not end well.
        env: further environment variables; ``{rank}`` in a value stands for the rank.
        prefix: what comes before ``python`` on a rank's command line, such as ``unshare --net``.
        timeout_s: hang limit.

    Returns:
        What became of them.

    Raises:
        AssertionError: a process that should have ended well did not; shows what it wrote.
    """
    with contextlib.ExitStack() as stack:
        variables = {"FP_FRAMEWORK": "torch", "FP_STORE": store, "GLOO_SOCKET_IFNAME": "lo"}
        if store == "agent":
            variables |= stack.enter_context(_torch_agent())
        return _run(what, ranks, arguments, {**variables, **(env or {})}, dies, prefix, timeout_s)


def run_jax(
    what: Function | Path,
    processes: int,
    *arguments: Any,
    devices: int | None = None,
    dies: Collection[int] = (),
    env: Mapping[str, str] | None = None,
    prefix: Callable[[int], Sequence[str]] = lambda rank: (),
    timeout_s: float = HANG_LIMIT_S,
) -> Job:
    """Run a function in the processes of a jax.distributed job on the CPU.

    Args:
        what: as for :func:`run_torch`; a script finds ``JAX_COORDINATOR_ADDRESS``, ``RANK`` and ``WORLD_SIZE``.
        processes: their number.
        *arguments: for the function or script.
        devices: devices to pretend in each process.
        dies: processes that need not end well.
        env: further environment variables; ``{rank}`` in a value stands for the rank.
        prefix: what comes before ``python`` on a command line.
        timeout_s: hang limit.

    Returns:
        What became of them.
    """
    with _reserved_port() as port:
        variables = {
            "FP_FRAMEWORK": "jax",
            "JAX_PLATFORMS": "cpu",
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        }
        if devices is not None:
            variables["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        return _run(what, processes, arguments, {**variables, **(env or {})}, dies, prefix, timeout_s)


@contextlib.contextmanager
def _torch_agent() -> Iterator[dict[str, str]]:
    """A store in this process, which the ranks find as they find that of torchrun's agent; it chooses its port."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    del store


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that nobody is given while this holds it; the coordinator can listen on it, as gRPC shares ports."""
    with socket.socket(socket.AF_INET6) as holder:
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("::", 0))
        yield holder.getsockname()[1]


def _run(
    what: Function | Path,
    count: int,
    arguments: tuple[Any, ...],
    variables: Mapping[str, str],
    dies: Collection[int],
    prefix: Callable[[int], Sequence[str]],
    timeout_s: float,
    grace_s: float = GRACE_S,
) -> Job:
    with tempfile.TemporaryDirectory(prefix="fp_multi-job-") as name:
        directory = Path(name)
        if isinstance(what, Path):
            command = [sys.executable, str(what), *map(str, arguments)]
        else:
            command = [sys.executable, __file__, name]
            call = (what.__code__.co_filename, what.__qualname__, arguments, tuple(dies), time.time() + timeout_s)
            (directory / "call").write_bytes(pickle.dumps(call))
        with contextlib.ExitStack() as stack:
            processes = []
            for rank in range(count):
                env = {
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "RANK": str(rank),
                    "WORLD_SIZE": str(count),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(count),
                    "GROUP_RANK": "0",
                    **{key: value.replace("{rank}", str(rank)) for key, value in variables.items()},
                }
                output = stack.enter_context((directory / f"output-{rank}").open("wb"))
                processes.append(
                    subprocess.Popen(
                        [*prefix(rank), *command],
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # with all that it starts it can be killed
                    )
                )
            hung = _wait(processes, dies, timeout_s, grace_s)
        codes = [process.returncode for process in processes]
        outputs = [(directory / f"output-{rank}").read_text(errors="replace") for rank in range(count)]
        results = [_result(directory, rank) for rank in range(count)]
    bad = [rank for rank, code in enumerate(codes) if code != 0 and rank not in dies]
    if bad or hung:
        shown = "\n".join(f"--- rank {rank}, status {codes[rank]}\n{outputs[rank]}" for rank in range(count))
        raise AssertionError(f"{f'hung for {timeout_s} s' if hung else f'ranks {bad} failed'}\n{shown}")
    return Job(codes, results, outputs)


def _wait(processes: list[subprocess.Popen[bytes]], dies: Collection[int], timeout_s: float, grace_s: float) -> bool:
    """Wait for all to end, or kill them; says whether they hung."""
    deadline_s = time.monotonic() + timeout_s
    failed = False
    try:
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline_s:
                return not failed
            if not failed and any(process.poll() and rank not in dies for rank, process in enumerate(processes)):
                failed = True
                deadline_s = min(deadline_s, time.monotonic() + grace_s)
            time.sleep(0.02)
        return False
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _result(directory: Path, rank: int) -> Any:
    try:
        return pickle.loads((directory / f"result-{rank}").read_bytes())
    except FileNotFoundError:
        return None


def _worker(directory: Path) -> int:
    """What each process does."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    file, name, arguments, dies, end_s = pickle.loads((directory / "call").read_bytes())
    # Before the parent kills it, so that there is something to show.
    faulthandler.dump_traceback_later(max(0.9 * (end_s - time.time()), 0.1))
    try:
        if os.environ["FP_FRAMEWORK"] == "torch":
            _set_up_torch(directory, rank, count)
        elif os.environ["FP_FRAMEWORK"] == "jax":
            _set_up_jax(rank, count)
        result = _import(file).__dict__[name](*arguments)
    except BaseException:
        traceback.print_exc()
        return 1
    whole = directory / f"result-{rank}"
    part = whole.with_suffix(".part")
    part.write_bytes(pickle.dumps(result))
    part.rename(whole)
    # Rank 0 may host the store that the others still use.
    while not all((directory / f"result-{other}").exists() for other in range(count) if other not in dies):
        time.sleep(0.01)
    return 0


def _import(file: str) -> Any:
    sys.path.append(str(Path(__file__).parent))
    spec = importlib.util.spec_from_file_location("the_test", file)
    if spec is None or spec.loader is None:
        raise ImportError(file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["the_test"] = module
    spec.loader.exec_module(module)
    return module


def _set_up_torch(directory: Path, rank: int, count: int) -> None:
    import torch.distributed as dist

    store: Any = None
    if os.environ["FP_STORE"] == "file":
        store = dist.FileStore(str(directory / "store"), count)
    elif os.environ["FP_STORE"] == "rank0":
        file = directory / "port"
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            file.with_suffix(".part").write_text(str(store.port))
            file.with_suffix(".part").rename(file)
        else:
            while not file.exists():
                time.sleep(0.01)
            store = dist.TCPStore("127.0.0.1", int(file.read_text()), wait_for_workers=False)
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count)


def _set_up_jax(rank: int, count: int) -> None:
    import jax

    jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], count, rank, initialization_timeout=60)


if __name__ == "__main__":
    status = _worker(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the frameworks' own endings: gloo's may abort, and JAX's waits for processes that a test has killed.
    os._exit(status)
