"""Containers of every make: with a target, without one, and without the modules that have them."""

from __future__ import annotations

import collections
import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import check_child

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")
import jax.numpy as jnp  # noqa: E402

import fp_multi as fp  # noqa: E402
from fp_multi.adapters.orbax import FastPersistHandler, FastPersistRestore, FastPersistSave  # noqa: E402
from fp_multi.adapters.orbax._types import TYPES_KEY, type_named, with_types  # noqa: E402

QUICK = fp.SaveConfig(durable=False)


class Pair(NamedTuple):
    a: Any
    b: Any


class Empty(NamedTuple):
    pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Static:
    kernel: Any
    name: str = dataclasses.field(default="none", metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Checked:
    value: Any

    def __post_init__(self) -> None:
        if isinstance(self.value, dict):
            raise ValueError("not a dict")


@jax.tree_util.register_pytree_node_class
class Numbered:
    def __init__(self, first: Any, second: Any) -> None:
        self.children = (first, second)

    def tree_flatten(self) -> Any:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Any:
        return cls(*children)


@dataclasses.dataclass
class Unregistered:
    a: Any


calls: list[str] = []


class Trap:
    def __init__(self, *args: Any, **how: Any) -> None:
        calls.append("constructed")


def saved(directory: Path, state: Any) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    handler = FastPersistHandler(config=QUICK)
    handler.save(directory, args=FastPersistSave(state))
    handler.finalize(directory)
    return directory


def restore(directory: Path, item: Any = None) -> Any:
    return FastPersistHandler().restore(directory, args=FastPersistRestore(item))


def same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(one) is type(other)
        if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(one, other)


STATE = {
    "pair": Pair(np.arange(3), [Pair(1, None), Empty()]),
    "layer": [Layer(jnp.ones((2, 3)), np.zeros(3)), Layer({"x": 1}, Pair(2, Layer(3, 4)))],
    "numbered": Numbered(jnp.zeros(2), (5, 6)),
    "ordered": collections.OrderedDict([("z", 1), ("a", Layer(7, 8))]),
    "checked": Checked(np.ones(2)),
}


def test_types_come_back(tmp_path: Path) -> None:
    item = saved(tmp_path / "item", STATE)
    same(restore(item), STATE)
    assert list(restore(item)["ordered"]) == ["z", "a"]
    same(restore(item, STATE), STATE)


def test_the_plain_form(tmp_path: Path) -> None:
    state = {
        "static": Static(jnp.ones(2), "name"),
        "default": collections.defaultdict(list, {"b": 1, "a": 2}),
        "partial": jax.tree_util.Partial(max, 1, key=2),
        "checked": Checked(jnp.ones(1)),
    }
    item = saved(tmp_path / "item", state)
    plain = fp.load(item)
    assert type(plain["static"]) is dict
    assert plain["static"]["kernel"].tolist() == [1, 1]
    assert plain["default"] == {"b": 1, "a": 2}
    assert plain["partial"] == [(1,), {"key": 2}]
    found = restore(item)
    # Without its name it would be another Static.
    assert type(found["static"]) is dict
    assert type(found["checked"]) is Checked
    again = restore(item, state)
    assert again["static"].name == "name"
    assert again["partial"].func is max
    same(again, state)


def test_a_static_field_that_is_its_default(tmp_path: Path) -> None:
    found = restore(saved(tmp_path / "item", {"static": Static(jnp.ones(2))}))
    assert isinstance(found["static"], Static)


def test_targets_of_other_types(tmp_path: Path) -> None:
    item = saved(tmp_path / "item", {"x": {"kernel": np.ones(2), "bias": 3}, "y": [1, 2], "z": Pair(4, 5)})
    found = restore(item, {"x": Layer(np.zeros(2), 0), "y": {"0": 0, "1": 0}, "z": {"a": 0, "b": 0}})
    assert isinstance(found["x"], Layer)
    assert found["x"].bias == 3
    assert found["y"] == {"0": 1, "1": 2}
    assert found["z"] == {"a": 4, "b": 5}
    found = restore(item, {"x": {"kernel": None, "bias": 0}, "y": (0, 0), "z": (0, 0)})
    assert found["y"] == (1, 2)
    assert found["z"] == (4, 5)


@pytest.mark.parametrize(
    "root", [jnp.arange(3.0), np.arange(3), 5, "text", Pair(1, 2), Layer(1, np.ones(2)), [1], (2,)]
)
def test_any_root(tmp_path: Path, root: Any) -> None:
    item = saved(tmp_path / "item", root)
    same(restore(item), root)
    same(restore(item, root), root)


@jax.tree_util.register_pytree_with_keys_class
class Twice:
    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("x"), child) for child in self.children], None

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Any:
        return cls(*children)


def test_children_of_one_name(tmp_path: Path) -> None:
    item = saved(tmp_path / "item", {"a": Twice(1, 2)})
    assert fp.load(item)["a"] == [1, 2]
    assert restore(item)["a"].children == (1, 2)


def test_unregistered_types(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Unregistered"):
        saved(tmp_path / "item", {"a": Unregistered(1)})


def test_enumerations_and_array_likes(tmp_path: Path) -> None:
    import enum

    class Color(enum.IntEnum):
        RED = 3

    class Name(str, enum.Enum):  # noqa: UP042 (str() of these says more than their value)
        FIRST = "first"

    class Like:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.arange(3)

    found = restore(
        saved(tmp_path / "item", {"a": Color.RED, "b": Like(), "c": Name.FIRST, "d": np.rec.array([(1, 2)])})
    )
    assert type(found["c"]) is str
    assert found["c"] == "first"
    assert type(found["d"]) is np.ndarray
    assert found["d"].tolist() == [(1, 2)]
    with pytest.raises(TypeError, match="the subclass would be lost"):
        saved(tmp_path / "item", {"a": np.ma.masked_array([1, 2], [True, False])})
    assert type(found["a"]) is int
    assert found["a"] == 3
    assert found["b"].tolist() == [0, 1, 2]


def test_names_in_a_file_are_only_looked_up(tmp_path: Path) -> None:
    """A file chooses among types that this process has registered: nothing is imported, and nothing else called."""
    assert type_named(f"{__name__}:Layer") is Layer
    hostile = (
        f"{__name__}:Trap",
        f"{__name__}:Unregistered",
        f"{__name__}:test_types_come_back",
        f"{__name__}:nothing",
        f"{__name__}:Layer.__init__",
        f"{__name__}:",
        "subprocess:Popen",
        "os:system",
        "builtins:dict",
        "builtins:exec",
        "antigravity:anything",
        "not a name",
        ":",
        "",
    )
    for name in hostile:
        assert type_named(name) is None
    assert not calls
    assert "antigravity" not in sys.modules
    plain = {"a": {"kernel": 1}}
    for text in (
        *[json.dumps({name: [["a"]]}) for name in hostile],
        json.dumps({f"{__name__}:Layer": [["a"]]}),  # a field is missing
        json.dumps({f"{__name__}:Layer": [["b"], ["a", "kernel", "deep"], [], [{}], 5]}),
        json.dumps({f"{__name__}:Layer": 5}),
        json.dumps([1]),
        "not JSON",
        "[" * 10000,
    ):
        assert with_types({"a": {"kernel": 1}}, {TYPES_KEY: text}) == plain
    assert not calls


def test_without_the_module(tmp_path: Path) -> None:
    module = tmp_path / "its_module.py"
    module.write_text(
        "import dataclasses, jax\n"
        "@jax.tree_util.register_dataclass\n"
        "@dataclasses.dataclass\n"
        "class Thing:\n    a: object\n"
    )
    code = """
        sys.path.append(sys.argv[1])
        import its_module
        from pathlib import Path
        from fp_multi.adapters.orbax import *
        from fp_multi.adapters.orbax import FastPersistHandler, FastPersistSave
        item = Path(sys.argv[1]) / "item"
        item.mkdir()
        handler = FastPersistHandler()
        handler.save(item, args=FastPersistSave({"x": its_module.Thing(np.arange(3))}))
        handler.finalize(item)
        assert type(handler.restore(item)["x"]) is its_module.Thing
    """
    check_child(code, tmp_path)
    found = restore(tmp_path / "item")
    assert type(found["x"]) is dict
    assert found["x"]["a"].tolist() == [0, 1, 2]
    assert "its_module" not in sys.modules


# Flax, optax and chex


def test_optax_and_linen(tmp_path: Path) -> None:
    optax = pytest.importorskip("optax")
    linen = pytest.importorskip("flax.linen")
    from flax.core import FrozenDict, freeze
    from flax.training.train_state import TrainState

    model = linen.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((2, 4)))["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1.0, 0.1, 5)))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    item = saved(tmp_path / "item", {"state": state, "opt": state.opt_state, "frozen": freeze({"a": {"b": params}})})
    found = restore(item)
    assert jax.tree.structure(found["opt"]) == jax.tree.structure(state.opt_state)
    assert type(found["frozen"]) is FrozenDict
    assert jax.tree.structure(found["frozen"]) == jax.tree.structure(freeze({"a": {"b": params}}))
    # Functions are in no file: without a target a TrainState is a dict of its fields.
    assert set(found["state"]) == {"step", "params", "opt_state"}
    fresh = TrainState.create(apply_fn=model.apply, params=jax.tree.map(jnp.zeros_like, params), tx=tx)
    again = restore(item, {"state": fresh, "opt": None, "frozen": None})["state"]
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert type(again.step) is int
    np.testing.assert_array_equal(again.params["kernel"], params["kernel"])
    abstract = jax.eval_shape(lambda: fresh)
    again = restore(item, {"state": abstract, "opt": None, "frozen": None})["state"]
    np.testing.assert_array_equal(again.params["kernel"], params["kernel"])


def test_masked_leaves(tmp_path: Path) -> None:
    optax = pytest.importorskip("optax")
    item = saved(tmp_path / "item", {"a": optax.MaskedNode(), "b": jnp.ones(2)})
    assert restore(item)["a"] == optax.MaskedNode()
    assert restore(item, {"a": optax.MaskedNode(), "b": jnp.zeros(2)})["a"] == optax.MaskedNode()
    found = restore(item, {"a": jnp.zeros(3), "b": jnp.zeros(2)})
    assert found["a"] is None
    assert found["b"].tolist() == [1, 1]


def test_nnx(tmp_path: Path) -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.linear = nnx.Linear(4, 3, rngs=rngs)
            self.norm = nnx.BatchNorm(3, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.drop(self.norm(self.linear(x)))

    model = Model(nnx.Rngs(0))
    graph, state = nnx.split(model)
    item = saved(tmp_path / "item", state)
    found = restore(item)
    assert type(found) is type(state)
    assert type(found["linear"]["kernel"]) is nnx.Param
    same(restore(item, state), state)
    _, abstract = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(1))))
    merged = nnx.merge(graph, restore(item, abstract))
    np.testing.assert_array_equal(merged.linear.kernel[...], model.linear.kernel[...])
    pure = nnx.to_pure_dict(state)
    item = saved(tmp_path / "item", pure)
    other = Model(nnx.Rngs(2))
    _, state = nnx.split(other)
    nnx.replace_by_pure_dict(state, restore(item))
    nnx.update(other, state)
    np.testing.assert_array_equal(other.linear.kernel[...], model.linear.kernel[...])


def test_chex(tmp_path: Path) -> None:
    chex = pytest.importorskip("chex")

    @chex.dataclass
    class Local:
        a: Any

    state = {"x": Local(a=jnp.ones(2))}
    item = saved(tmp_path / "item", state)
    # A class in a function has no name to be found by.
    assert type(restore(item)["x"]) is dict
    same(restore(item, state), state)
