"""A checkpoint read cold by other ranks than wrote it, in another sharding, against what the same ranks wrote.

Run: python benchmarks/reshard_load.py [--directory DIR] [--size-mib N] [--json FILE]
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import _harness as harness
from _harness import MIB
from _ranks import Ranks, join, serve, start

RANKS = 4
TENSORS = 32
COLUMNS = 4096


class Layout(NamedTuple):
    """How many ranks have the tensors, and which dimension is divided among them."""

    name: str
    ranks: int
    dim: int


LAYOUTS = (
    Layout("one whole", 1, 0),
    Layout("rows on 2", 2, 0),
    Layout("rows on 4", 4, 0),
    Layout("columns on 2", 2, 1),
    Layout("columns on 4", 4, 1),
)
Case = tuple[Layout, Layout]
"""As it was saved, as it is wanted."""
KINDS = ("one whole", "rows, from rows", "rows, from columns", "columns, from columns", "columns, from rows")


def kind_of(saved: Layout, wanted: Layout) -> str:
    """Which line of the goals a case belongs to. One rank's whole tensors are made of rows."""
    if wanted.ranks == 1:
        return "one whole"
    what = ("rows", "columns")
    return f"{what[wanted.dim]}, from {what[saved.dim]}"


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--size-mib", type=int, default=1024, help="size of the state, all ranks together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, help="used by the benchmark itself")
    args = parser.parse_args()
    if args.rank is not None:
        one = Rank(args.rank)
        serve(one.shape[0] * one.shape[1] * 4 * TENSORS, one.act)
        return
    with harness.scratch_in(args.directory) as scratch, start(__file__, scratch, RANKS, args.size_mib) as team:
        for number in range(len(LAYOUTS)):
            team.tell(do="save", path=str(scratch / str(number)), layout=number)
        how, took_s, given_nbytes = measure(team, scratch, args.rounds)
        facts = {
            "state": f"{team.nbytes / MIB:.0f} MiB fp32 in {TENSORS} DTensors with rows of {COLUMNS * 4 >> 10} KiB, "
            "into tensors that exist",
            "cache": f"cold: {how} before each load; from the common start until the last rank has its part",
            "rounds": args.rounds,
            "rows": rows(team.nbytes, took_s, given_nbytes),
            "ratios": ratios(team.nbytes, took_s, given_nbytes),
        }
        harness.finish("reshard", args, facts)


def measure(team: Ranks, scratch: Path, rounds: int) -> tuple[str, dict[Case, list[float]], dict[Case, int]]:
    """Seconds of each case, and what the drive gave; the first round is checked against what was saved, and dropped."""
    took_s: dict[Case, list[float]] = {(saved, wanted): [] for wanted in LAYOUTS for saved in LAYOUTS}
    given_nbytes: dict[Case, int] = {}
    how = ""
    for number in range(rounds + 1):
        for wanted in harness.rotated(LAYOUTS, number):
            team.tell(do="prepare", layout=LAYOUTS.index(wanted))
            for saved in harness.rotated(LAYOUTS, number):
                path = scratch / str(LAYOUTS.index(saved))
                how = harness.cool(path)
                seconds, answers = team.begin(do="load", path=str(path), layout=LAYOUTS.index(wanted))
                took_s[saved, wanted].append(seconds)
                given_nbytes[saved, wanted] = sum(answer["read_nbytes"] for answer in answers)
                if number == 0:
                    team.tell(do="check", layout=LAYOUTS.index(wanted))
        harness.progress(number, rounds)
    return how, {case: taken[1:] for case, taken in took_s.items()}, given_nbytes


def rows(nbytes: int, took_s: dict[Case, list[float]], given_nbytes: dict[Case, int]) -> list[dict[str, Any]]:
    table = []
    for (saved, wanted), taken in took_s.items():
        own = statistics.median(took_s[wanted, wanted])
        table.append(
            harness.row(
                f"{wanted.name}, from {saved.name}",
                [nbytes / 1e9 / seconds for seconds in taken],
                ms=round(statistics.median(taken) * 1e3, 1),
                needed_mib=round(nbytes / MIB),
                read_mib=round(given_nbytes[saved, wanted] / MIB, 1),
                read_per_needed=round(given_nbytes[saved, wanted] / nbytes, 3),
                time_per_own=round(statistics.median(taken) / own, 3) if saved != wanted else None,
            )
        )
    return table


def ratios(nbytes: int, took_s: dict[Case, list[float]], given_nbytes: dict[Case, int]) -> list[dict[str, Any]]:
    """The worst case of each kind."""
    bytes_of: dict[str, list[float]] = {kind: [] for kind in KINDS}
    times_of: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for (saved, wanted), taken in took_s.items():
        if saved != wanted:
            own = statistics.median(took_s[wanted, wanted])
            bytes_of[kind_of(saved, wanted)].append(given_nbytes[saved, wanted] / nbytes)
            times_of[kind_of(saved, wanted)].append(statistics.median(taken) / own)
    return [
        *[harness.ratio(f"{kind}: bytes read / needed", max(bytes_of[kind]), "<= 1.05") for kind in KINDS],
        *[harness.ratio(f"{kind}: time / what the ranks wrote", max(times_of[kind]), "<= 1.15") for kind in KINDS],
    ]


# The measured processes


class Rank:
    """One of the processes that save and load."""

    def __init__(self, rank: int) -> None:
        import torch
        from torch.distributed import new_group
        from torch.distributed.device_mesh import DeviceMesh

        from fp_multi.adapters.torch import TorchComm

        warnings.filterwarnings("ignore", module="torch.distributed")
        join(rank)
        torch.set_num_threads(1)
        self.rank = rank
        self.shape = (int(os.environ["FP_SIZE_MIB"]) * MIB // TENSORS // 4 // COLUMNS, COLUMNS)
        sizes = sorted({layout.ranks for layout in LAYOUTS})
        groups = {size: new_group(list(range(size))) for size in sizes}
        self.meshes = {size: DeviceMesh("cpu", list(range(size))) for size in sizes}
        self.comms = {size: TorchComm(groups[size], timeout_s=300) for size in sizes if rank < size}
        self.target: dict[str, Any] = {}

    def act(self, task: dict[str, Any]) -> dict[str, Any]:
        """Do what the parent asks for."""
        layout = LAYOUTS[task["layout"]]
        self.target = {} if task["do"] in ("save", "prepare") else self.target
        if self.rank >= layout.ranks:
            return {"read_nbytes": 0, "end_s": 0.0}
        answer: dict[str, Any] = getattr(self, task["do"])(layout, task.get("path")) or {}
        return answer

    def save(self, layout: Layout, path: str) -> None:
        """Save with the ranks of a layout."""
        from fp_multi.adapters.torch import save

        state = {f"layer_{i}": self._spread(self._part(i, layout), layout) for i in range(TENSORS)}
        save(state, path, comm=self.comms[layout.ranks])

    def prepare(self, layout: Layout, path: None) -> None:
        """Make the tensors that the next loads fill."""
        import torch

        shape = self._part(0, layout).shape
        self.target = {f"layer_{i}": self._spread(torch.full(shape, -1.0), layout) for i in range(TENSORS)}

    def load(self, layout: Layout, path: str) -> dict[str, Any]:
        """The measured call."""
        from fp_multi.adapters.torch import load

        before, cpu_s = read_nbytes(), time.process_time()
        load(path, target=self.target, inplace=True, comm=self.comms[layout.ranks], broadcast=True)
        end_s = time.perf_counter()
        return {"read_nbytes": read_nbytes() - before, "end_s": end_s, "cpu_s": time.process_time() - cpu_s}

    def check(self, layout: Layout, path: None) -> None:
        """Whether the last load gave what was saved."""
        import torch

        for i, tensor in enumerate(self.target.values()):
            if not torch.equal(tensor.to_local(), self._part(i, layout)):
                raise SystemExit(f"rank {self.rank}, layer_{i}, {layout.name}: loaded is not what was saved")
            tensor.to_local().fill_(-1.0)

    def _part(self, number: int, layout: Layout) -> Any:
        """Numbers that tell their place, which an fp32 holds exactly."""
        import torch

        count = self.shape[0] * self.shape[1]
        whole = torch.arange(number, number + count, dtype=torch.float32).reshape(self.shape)
        return whole.chunk(layout.ranks, layout.dim)[self.rank].contiguous()

    def _spread(self, part: Any, layout: Layout) -> Any:
        from torch.distributed.tensor import DTensor, Shard

        mesh, placements = self.meshes[layout.ranks], [Shard(layout.dim)]
        return DTensor.from_local(part, mesh, placements, shape=self.shape, stride=(self.shape[1], 1))


def read_nbytes() -> int:
    """What drives have given to this process."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise SystemExit("/proc/self/io has no read_bytes")


if __name__ == "__main__":
    main()
