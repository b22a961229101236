"""What storage with a planner or a commit of its own is built from: the pieces that adapters for such hosts use.

``fp_multi.save`` and ``load`` are the whole story for a program that calls them. A framework that decides itself who
writes what, or in which directory, and when a checkpoint counts, needs the parts: describe a state, put pieces into
shards, write them, make the manifest, commit, read boxes back. They are used by ``fp_multi.adapters`` and documented
where they are defined; they may change between minor versions.
"""

from __future__ import annotations

from fp_multi._agree import Round as Round
from fp_multi._agree import Session as Session
from fp_multi._assemble import refuse_pickle as refuse_pickle
from fp_multi._assemble import value as stored_value
from fp_multi._boxes import Cut as Cut
from fp_multi._boxes import cut_rule as cut_rule
from fp_multi._boxes import unit_boxes as unit_boxes
from fp_multi._boxes import unit_offsets as unit_offsets
from fp_multi._collector import collector_paused as collector_paused
from fp_multi._commit import DirectoryCommit as DirectoryCommit
from fp_multi._commit import MemberCommit as MemberCommit
from fp_multi._commit import make_parents as make_parents
from fp_multi._commit import require_space as require_space
from fp_multi._commit_tree import replace_tree as replace_tree
from fp_multi._contents import Contents as Contents
from fp_multi._contents import lay_out_shard as lay_out_shard
from fp_multi._contents import narrowed as narrowed
from fp_multi._contents import shard_name as shard_name
from fp_multi._dtypes import itemsize as itemsize
from fp_multi._engine import WriteJob as WriteJob
from fp_multi._engine import crc32c as crc32c
from fp_multi._engine import mkdir as mkdir
from fp_multi._engines import release_memory as release_memory
from fp_multi._format import Manifest as Manifest
from fp_multi._format import Tensor as Tensor
from fp_multi._format import encode_manifest as encode_manifest
from fp_multi._hidden import claim as claim
from fp_multi._hidden import is_checkpoint as is_checkpoint
from fp_multi._hidden import remove_tree as remove_tree
from fp_multi._hidden import resolve as resolve
from fp_multi._hidden import translated as translated
from fp_multi._hidden import unlock as unlock
from fp_multi._hidden import work_name as work_name
from fp_multi._layout import chunk_nbytes_for as chunk_nbytes_for
from fp_multi._machine import host_of as host_of
from fp_multi._memfd import memfd as memfd
from fp_multi._part import Part as Part
from fp_multi._part import PartWrite as PartWrite
from fp_multi._part import combine as combine
from fp_multi._part import head as head
from fp_multi._partition import Items as Items
from fp_multi._partition import plan as plan
from fp_multi._plan import UNIT_NBYTES as UNIT_NBYTES
from fp_multi._plan import shards_of as shards_of
from fp_multi._streamed import StreamedTensor as StreamedTensor
from fp_multi._streamed import groups as groups
from fp_multi._tree import check_tree as check_tree
from fp_multi._tree import decode as decode
from fp_multi._tree import describe as describe
from fp_multi._types import Described as Described

__all__ = [
    "UNIT_NBYTES",
    "Contents",
    "Cut",
    "Described",
    "DirectoryCommit",
    "Items",
    "Manifest",
    "MemberCommit",
    "Part",
    "PartWrite",
    "Round",
    "Session",
    "StreamedTensor",
    "Tensor",
    "WriteJob",
    "check_tree",
    "chunk_nbytes_for",
    "claim",
    "collector_paused",
    "combine",
    "crc32c",
    "cut_rule",
    "decode",
    "describe",
    "encode_manifest",
    "groups",
    "head",
    "host_of",
    "is_checkpoint",
    "itemsize",
    "lay_out_shard",
    "make_parents",
    "memfd",
    "mkdir",
    "narrowed",
    "plan",
    "refuse_pickle",
    "release_memory",
    "remove_tree",
    "replace_tree",
    "require_space",
    "resolve",
    "shard_name",
    "shards_of",
    "stored_value",
    "translated",
    "unit_boxes",
    "unit_offsets",
    "unlock",
    "work_name",
]
