"""Carry out what the ranks of a host read together in a DCP load: read a share for all, and take from the others.

It only saves reading. Whatever goes wrong here - a rank that fails, is killed, does not answer, or has no memory - the
ranks part, and each reads the rest of what it wants alone: then the error is its own, with the tensor's name.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np
from torch.distributed.checkpoint.planner import LoadPlanner

from fp_multi import Box, CheckpointReader, ReadRequest

from ._dcp_blocks import BEGIN_NBYTES, Block, HostPlan, Part
from ._dcp_peers import Listener, Memory, PeerLostError, Peers
from ._dcp_share import Orders
from ._dcp_targets import Bytes, Wanted, fill

SLOTS = 3
"""Blocks of one rank that are in its memory at once: some are read while others are taken."""
AHEAD = 2
"""Blocks that are read at once: the drive has work while one is handed on."""

_log = logging.getLogger("fp_multi")


def read_together(
    wanted: Sequence[Wanted], planner: LoadPlanner, reader: CheckpointReader, orders: Orders, listener: Listener
) -> list[Wanted]:
    """Do this rank's part, and fill its tensors with what all read.

    Args:
        wanted: all that this rank wants.
        planner: is told of each part that is complete.
        reader: the checkpoint.
        orders: the coordinator's.
        listener: where the others reach this rank.

    Returns:
        What is left to be read alone.
    """
    plan = msgspec.msgpack.decode(orders.plan, type=HostPlan)
    if not any(orders.rank in block.takers for block in plan.blocks):
        return list(wanted)
    taking = _Taking(wanted, planner, reader, plan)
    mine = [(number, block) for number, block in enumerate(plan.blocks) if block.reader == orders.rank]
    try:
        peers = Peers(orders.rank, min(SLOTS, len(mine)) * plan.slot_nbytes)
        try:
            _run(peers, plan, mine, taking, reader, orders, listener)
        finally:
            peers.close()
    except PeerLostError as error:
        listener.close()  # or the others would wait for this rank
        _log.warning(
            "the ranks of this host read no longer together, rank %d reads the rest alone: %s", orders.rank, error
        )
    return taking.left()


def _run(
    peers: Peers,
    plan: HostPlan,
    mine: Sequence[tuple[int, Block]],
    taking: _Taking,
    reader: CheckpointReader,
    orders: Orders,
    listener: Listener,
) -> None:
    near = {
        rank
        for block in plan.blocks
        if orders.rank in block.takers
        for rank in (block.takers if block.reader == orders.rank else (block.reader,))
    }
    try:
        addresses = {rank: orders.addresses[rank] for rank in near - {orders.rank}}
        peers.meet(listener, orders.token, addresses, _nbytes_from_others(plan, orders.rank))
    finally:
        listener.close()
    serving = _Serving(peers, plan, mine, reader)
    thread = threading.Thread(target=serving, name="fp_multi: read for all", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise PeerLostError(f"there is no thread to read for all: {error}") from error
    lost: PeerLostError | None = None
    try:
        for number, block in enumerate(plan.blocks):
            if orders.rank in block.takers:
                memory = peers.receive(number, block.reader)
                taking.take(block, memory[_slot(block, plan) :])
                peers.taken(number, block.reader)
    except PeerLostError as error:
        lost = error
        peers.hang_up()
    except BaseException:
        peers.hang_up()
        raise
    finally:
        thread.join()
    failed = serving.error
    # A peer that is lost is lost for both; anything else that stopped the reading is why nothing came any more.
    if failed is not None and (lost is None or not isinstance(failed, PeerLostError)):
        raise PeerLostError(f"reading for all failed: {failed}") from failed
    if lost is not None:
        raise lost


def _nbytes_from_others(plan: HostPlan, rank: int) -> int:
    blocks = [block for block in plan.blocks if rank in block.takers and block.reader != rank]
    return sum([part.nbytes for block in blocks for part in block.parts])


def _slot(block: Block, plan: HostPlan) -> int:
    """Where a block is in its reader's memory."""
    return block.turn % SLOTS * plan.slot_nbytes + BEGIN_NBYTES


class _Serving:
    """Reads this rank's blocks one after the other; a thread's target."""

    def __init__(
        self, peers: Peers, plan: HostPlan, mine: Sequence[tuple[int, Block]], reader: CheckpointReader
    ) -> None:
        self._peers = peers
        self._plan = plan
        self._mine = mine
        self._reader = reader
        self._reading: deque[Future[None]] = deque()
        self.error: Exception | None = None

    def __call__(self) -> None:
        try:
            with ThreadPoolExecutor(AHEAD, "fp_multi: read") as pool:
                self._serve(pool)
        except Exception as error:
            self.error = error
            self._peers.hang_up()

    def _serve(self, pool: ThreadPoolExecutor) -> None:
        for turn, (_, block) in enumerate(self._mine):
            if turn >= SLOTS:
                self._wait_taken(turn - SLOTS)
            self._reading.append(pool.submit(self._read, block))
            if len(self._reading) == AHEAD:
                self._announce(turn + 1 - AHEAD)
        while self._reading:
            self._announce(len(self._mine) - len(self._reading))
        for turn in range(max(len(self._mine) - SLOTS, 0), len(self._mine)):
            self._wait_taken(turn)

    def _read(self, block: Block) -> None:
        memory = self._peers.memory[_slot(block, self._plan) :]
        self._reader.read(list(self._requests(block, memory)))

    def _announce(self, turn: int) -> None:
        self._reading.popleft().result()
        number, block = self._mine[turn]
        self._peers.announce(number, block.takers)

    def _wait_taken(self, turn: int) -> None:
        number, block = self._mine[turn]
        self._peers.wait_taken(number, block.takers)

    def _requests(self, block: Block, memory: Memory) -> Iterator[ReadRequest]:
        for part in block.parts:
            at = part.at
            for tensor, box, nbytes in self._plan.boxes_of(part, self._reader.manifest):
                yield ReadRequest(tensor, box, memory[at : at + nbytes])
                at += nbytes


class _Taking:
    """Puts what arrives where it is wanted."""

    def __init__(
        self, wanted: Sequence[Wanted], planner: LoadPlanner, reader: CheckpointReader, plan: HostPlan
    ) -> None:
        self._wanted = wanted
        self._planner = planner
        self._tensors = reader.manifest.tensors
        self._plan = plan
        self._done: set[int] = set()
        self._arrived: dict[int, int] = {}
        """By box the bytes that have come of it."""
        self._buffers: dict[int, Bytes] = {}
        """By box, if it comes in several parts and cannot go straight to where it is wanted."""
        self._who: dict[tuple[int, Box], list[int]] = {}
        for number, one in enumerate(wanted):
            self._who.setdefault((one.tensor, one.box), []).append(number)

    def take(self, block: Block, memory: Memory) -> None:
        """Copy a block."""
        for part in block.parts:
            who = self._who.get(self._plan.box(part.box), ())
            if who:  # a planner may have changed its mind
                self._take(part, memory[part.at : part.at + part.nbytes], who)

    def _take(self, part: Part, data: Memory, who: Sequence[int]) -> None:
        begin, end = part.begin, part.begin + part.nbytes
        total = self._wanted[who[0]].nbytes
        for number in who:
            out = self._wanted[number].out
            if out is not None:
                out[begin:end] = data
        buffered = [self._wanted[number] for number in who if self._wanted[number].out is None]
        if buffered and part.nbytes < total:
            if part.box not in self._buffers:
                self._buffers[part.box] = np.empty(total, np.uint8)
            self._buffers[part.box][begin:end] = data
        arrived = self._arrived[part.box] = self._arrived.get(part.box, 0) + part.nbytes
        if arrived < total:
            return
        whole = self._buffers.pop(part.box, data)
        for one in buffered:
            fill(one, whole, self._tensors[one.tensor])
        for number in who:
            self._planner.commit_tensor(self._wanted[number].item, self._wanted[number].target)
        self._done.update(who)

    def left(self) -> list[Wanted]:
        """What did not arrive whole."""
        return [one for number, one in enumerate(self._wanted) if number not in self._done]
