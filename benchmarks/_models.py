"""States with the tensors of real models: names, shapes and dtypes of a training, cut to what there is room for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

Spec = dict[str, tuple[tuple[int, ...], torch.dtype]]
F32, BF16 = torch.float32, torch.bfloat16


class Model(NamedTuple):
    """A family of one architecture: ``spec(size)`` has so many layers (or rows)."""

    name: str
    full: int
    """Layers, or rows, of the real one."""
    unit: str
    spec: Callable[[int], Spec]

    def cut_to(self, nbytes: int) -> tuple[str, Spec]:
        """The greatest that fits, and its name, which says what was cut.

        Where not even one layer fits, it is those tensors of one layer that do, in their order.
        """
        low, high = 1, self.full
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if nbytes_of(self.spec(middle)) <= nbytes else (low, middle - 1)
        spec = self.spec(low)
        if nbytes_of(spec) > nbytes:
            spec = _first(spec, nbytes)
            return f"{self.name}, {len(spec):,} of {len(self.spec(self.full)):,} tensors", spec
        return self.name if low == self.full else f"{self.name}, {low:,} of {self.full:,} {self.unit}", spec


def nbytes_of(spec: Spec) -> int:
    """Bytes of all tensors."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in spec.values())


def filled(spec: Spec) -> dict[str, torch.Tensor]:
    """Random values: a drive or a file system that compresses must not look faster than it is."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(shape, generator=generator).to(dtype) for name, (shape, dtype) in spec.items()}


def _first(spec: Spec, nbytes: int) -> Spec:
    kept: Spec = {}
    for name, (shape, dtype) in spec.items():
        size = math.prod(shape) * dtype.itemsize
        if size <= nbytes:
            kept[name] = shape, dtype
            nbytes -= size
    return kept


def _adamw(weights: dict[str, tuple[int, ...]], dtype: torch.dtype = F32) -> Spec:
    """Weights, with fp32 copies if they are of less precision, and both moments, with a step for each."""
    kinds = {"model": dtype, "exp_avg": F32, "exp_avg_sq": F32} | ({} if dtype == F32 else {"master": F32})
    spec: Spec = {f"{kind}.{name}": (shape, of) for kind, of in kinds.items() for name, shape in weights.items()}
    return spec | {f"step.{name}": ((), F32) for name in weights}


def _gpt(width: int, vocabulary: int = 50257, context: int = 1024) -> Callable[[int], Spec]:
    def spec(layers: int) -> Spec:
        block = {
            **{f"{ln}.{part}": (width,) for ln in ("ln_1", "ln_2") for part in ("weight", "bias")},
            **_linear("attn.c_attn", width, 3 * width),
            **_linear("attn.c_proj", width, width),
            **_linear("mlp.c_fc", width, 4 * width),
            **_linear("mlp.c_proj", 4 * width, width),
        }
        rest = {"wte.weight": (vocabulary, width), "wpe.weight": (context, width)}
        return _adamw({**rest, **_layers(block, layers), "ln_f.weight": (width,), "ln_f.bias": (width,)})

    return spec


def _experts(layers: int) -> Spec:
    """Width 1024, 16 experts of 2816 in each layer, bf16."""
    width, inner, experts = 1024, 2816, 16
    block: dict[str, tuple[int, ...]] = {
        **{f"attn.{name}.weight": (width, width) for name in "qkvo"},
        "norm_1.weight": (width,),
        "norm_2.weight": (width,),
        "router.weight": (experts, width),
    }
    for number in range(experts):
        block |= {f"experts.{number}.{name}.weight": (inner, width) for name in ("gate", "up")}
        block |= {f"experts.{number}.down.weight": (width, inner)}
    return _adamw({"embed.weight": (32000, width), **_layers(block, layers), "head.weight": (32000, width)}, BF16)


def _vit(layers: int) -> Spec:
    """ViT-L/16: width 1024, 24 layers."""
    width = 1024
    block = {
        **{f"{ln}.{part}": (width,) for ln in ("norm_1", "norm_2") for part in ("weight", "bias")},
        **_linear("attn.qkv", width, 3 * width),
        **_linear("attn.proj", width, width),
        **_linear("mlp.fc_1", width, 4 * width),
        **_linear("mlp.fc_2", 4 * width, width),
    }
    rest = {"patch.weight": (width, 3, 16, 16), "patch.bias": (width,), "cls": (1, 1, width), "pos": (1, 197, width)}
    return _adamw({**rest, **_layers(block, layers), **_linear("head", width, 1000)})


def _recommender(rows: int) -> Spec:
    """One table with a row-wise Adagrad's sum for each row, and dense layers with AdamW beside it."""
    dense: dict[str, tuple[int, ...]] = {}
    for number, (inputs, outputs) in enumerate([(13, 512), (512, 256), (256, 128), (479, 1024), (1024, 512), (512, 1)]):
        dense |= _linear(f"dense.{number}", inputs, outputs)
    return {"embedding.weight": ((rows, 128), F32), "embedding.sum": ((rows,), F32), **_adamw(dense)}


def _small(count: int) -> Spec:
    """4 KiB each."""
    return {f"group_{i // 100}.leaf_{i % 100}": ((1024,), F32) for i in range(count)}


def _linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _layers(block: dict[str, tuple[int, ...]], layers: int) -> dict[str, tuple[int, ...]]:
    return {f"h.{i}.{name}": shape for i in range(layers) for name, shape in block.items()}


MODELS = (
    Model("GPT-2 124M + AdamW", 12, "layers", _gpt(768)),
    Model("GPT 1.3B + AdamW", 24, "layers", _gpt(2048)),
    Model("MoE, 16 experts, bf16 + AdamW", 12, "layers", _experts),
    Model("ViT-L/16 + AdamW", 24, "layers", _vit),
    Model("recommender", 10_000_000, "rows", _recommender),
    Model("small leaves", 20_000, "leaves", _small),
)


def even(nbytes: int, tensors: int) -> Spec:
    """So many fp32 tensors of one size."""
    return {f"layer_{i}": ((max(nbytes // tensors // 4, 1),), F32) for i in range(tensors)}
