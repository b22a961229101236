"""The vocabulary: the few frozen records that pass from stage to stage.

Save: state -> describe -> ``Described`` -> plan/layout -> ``ShardLayout`` -> stage and write -> ``ShardReceipt`` ->
commit -> ``SaveReport``. Load: ``Manifest`` (in ``_format``) -> select/coalesce -> ``ReadPlan`` -> read -> assemble.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Path: TypeAlias = tuple[Any, ...]
"""Keys and positions from the root of a state to a leaf."""

Fetch: TypeAlias = Callable[[int, int, int], Callable[[], None]]
"""``fetch(address, start, nbytes)`` starts copying bytes ``[start, start + nbytes)`` of a device tensor's C-order
bytes to
host memory at ``address`` and returns a function that waits until they are there."""


Pin: TypeAlias = Callable[[int, int], Callable[[], None]]
"""``pin(address, nbytes)`` page-locks host memory for device copies and returns the undo."""


class Box(NamedTuple):
    """An axis-aligned part of a tensor."""

    start: tuple[int, ...]
    """First index on each axis."""
    length: tuple[int, ...]
    """Number of indices on each axis."""


@dataclass(frozen=True, slots=True)
class Sharded:
    """How a global tensor lies spread over ranks, and which boxes of it are here."""

    boxes: tuple[Box, ...]
    """They tile the global shape exactly; the same on every rank, in the same order."""
    holders: tuple[tuple[int, ...], ...]
    """For each box the ranks that have its values, ascending: more than one are replicas. Empty where only this rank's
    own box is known (:class:`ShardOf`)."""
    local: tuple[tuple[int, LeafSource], ...]
    """What this rank has: index of a box, and the source of its bytes (whose shape is the box's length)."""


@dataclass(frozen=True, slots=True)
class ShardOf:
    """A leaf of a state that is one box of a larger tensor, whose other boxes are on other ranks.

    For states that no framework describes: a sharded optimizer's flat buffers, for instance. Ranks that give the same
    box have replicas of it; together the boxes must tile the tensor.

    Example:
        >>> import numpy as np, fp_multi as fp
        >>> part = fp.ShardOf(np.ones(3), shape=(6,), start=(3,))
        >>> part.shape
        (6,)
    """

    array: Any
    """NumPy array or a registered framework's tensor: the box's values."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: tuple[int, ...]
    """Where the box begins on each axis."""


class LeafSource(NamedTuple):
    """Where the bytes of one tensor are, and what they mean.

    Exactly one of ``address`` (host memory) and ``fetch`` (device memory) is used. ``strides`` is None for C-contiguous
    memory, else in bytes, one for each axis.
    """

    dtype: str
    """Name as in docs/format.md section 3.5."""
    shape: tuple[int, ...]
    nbytes: int
    """Bytes in C order: product of the shape times the item size."""
    address: int
    keepalive: object
    """Whatever must stay referenced until the last byte has been read."""
    kind: str = "numpy"
    strides: tuple[int, ...] | None = None
    attrs: Mapping[str, str] | None = None
    fetch: Fetch | None = None
    itemsize: int = 1
    identity: object = None
    """Equal for two leaves that are one tensor; None derives it from address, shape, strides and dtype."""
    pin: Pin | None = None
    """For device tensors: how to page-lock the host memory that ``fetch`` copies to."""
    sharded: Sharded | None = None
    """For a tensor spread over ranks or devices: ``shape`` and ``nbytes`` are the global ones then, and neither
    ``address`` nor ``fetch`` is used."""


class HostTensor(NamedTuple):
    """One loaded tensor on its way to the caller, as given to a tensor builder."""

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
    """1-d, C order, little-endian; it owns its memory and nobody else holds it."""
    kind: str
    attrs: Mapping[str, str]
    path: str
    """The tensor's name in the checkpoint, for messages."""


TensorBuilder: TypeAlias = Callable[[HostTensor], Any]
"""Makes a framework's tensor of a :class:`HostTensor` whose kind is not NumPy's."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """How an adapter's tensors are described; see :func:`fp_multi.register_tensor_type`."""

    describe: Callable[[Any, str], LeafSource]
    """``describe(tensor, path)``; raises UnsupportedLeafError (with the path) for what it cannot store exactly."""
    pin: Pin | None = None
    """How to page-lock host memory for copies from the tensors' device."""
    spec: Callable[[Any], tuple[str, tuple[int, ...]]] | None = None
    """``spec(tensor)``: dtype name and shape, also of tensors that have no memory (meta tensors)."""
    assign: Callable[[Any, Any], None] | None = None
    """``assign(tensor, value)`` copies a loaded tensor into an existing one (``load(..., inplace=True)``)."""
    parts: Callable[[Any, str], Sequence[tuple[Box, Any]] | None] | None = None
    """``parts(tensor, path)``: of a tensor that is spread over processes the boxes that are here, each with the tensor
    that holds it; None for any other tensor. ``load(..., target=)`` reads these boxes only."""
    join: Callable[[Any, Sequence[Any]], Any] | None = None
    """``join(tensor, values)``: a tensor spread like an existing one, made of loaded ones for its ``parts``."""


@dataclass(frozen=True, slots=True)
class ExtensionType:
    """How an adapter's plain values are stored; see :func:`fp_multi.register_extension_type`."""

    encode: Callable[[Any], Any]
    """To None, bool, int, float, str or a tuple or list of such."""
    decode: Callable[[Any], Any]
    """Back. A value that cannot be what ``encode`` gave raises ValueError."""


@dataclass(frozen=True, slots=True)
class Described:
    """A state taken apart: its tensors and the tree that refers to them by index."""

    tree: Any
    """The *Node* of docs/format.md section 3.3, as plain JSON values."""
    names: list[str]
    sources: list[LeafSource]


@dataclass(frozen=True, slots=True)
class ShardReceipt:
    """What the engine did for one file."""

    file: str
    nbytes: int
    engine: str
    """``io_uring`` or ``threads``."""
    direct: bool
    reasons: tuple[str, ...]
    """Why a capability left on ``auto`` was not used; empty when all were."""
    open_s: float
    write_s: float
    fsync_s: float


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did, and how."""

    path: str
    tensors: int
    tensor_nbytes: int
    file_nbytes: int
    engine: str
    """Empty if this process wrote nothing."""
    direct: bool
    reasons: tuple[str, ...]
    plan_s: float
    write_s: float
    fsync_s: float
    commit_s: float
    elapsed_s: float
    begin_s: float = 0.0
    """When the save was asked for, on the clock of ``time.perf_counter()``."""
    shards: tuple[ShardReceipt, ...] = field(default=())
    """What this process wrote."""
    writers: tuple[int, ...] = (0,)
    """The ranks that were chosen to write what several ranks have."""
    writers_reason: str = ""
    """Why these; empty for a process on its own."""

    @property
    def written_nbytes(self) -> int:
        """Bytes of the files that this process wrote."""
        return sum([shard.nbytes for shard in self.shards])

    @property
    def gbytes_per_s(self) -> float:
        """Tensor bytes / 1e9 / seconds until durable."""
        return self.tensor_nbytes / 1e9 / self.elapsed_s if self.elapsed_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a successful :func:`fp_multi.verify` read."""

    path: str
    tensors: int
    shards: int
    nbytes: int
    elapsed_s: float


Selection: TypeAlias = Sequence[str | Path]
