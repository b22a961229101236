"""The rules of the house that a linter does not check: who imports whom, what is public, how long a module is."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import statistics
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import fp_multi

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "fp_multi"
MODULES = {path.stem: path for path in sorted(CORE.glob("*.py"))}
ADAPTERS = sorted((ROOT / "adapters").rglob("*.py"))
NATIVE = sorted(p for p in (CORE / "_native").iterdir() if p.suffix in (".cpp", ".h"))

# From the bottom up. A module imports only from rows above its own.
LEVELS = (
    # nothing of ours
    {"errors", "_engine", "_collector", "_version", "_memfd"},
    # the vocabulary
    {"_policy", "_arguments"},
    {"config", "_types", "_hidden", "_advice", "_crew", "_kernel", "_rate_cache"},
    # pure facts: dtypes, nodes, the manifest's members, layout; and what adapters registered
    {
        "_dtypes",
        "_nodes",
        "_manifest",
        "_layout",
        "_registry",
        "_engines",
        "_comm",
        "_block",
        "_machine",
        "_host_memory",
    },
    # boxes and who writes them; messages between ranks
    {"_boxes", "_tiling", "_messages", "_drive"},
    {"_partition", "_round", "_topology"},
    {"_agree"},
    {"_seats"},
    {"_writers_auto"},
    {"_writers"},
    # format and tree, in parts
    {"_header", "_format_check", "_tree_leaves", "_tree_decode"},
    {"_format", "_tree_encode", "_tree_select"},
    {"_tree"},
    # the stages that touch the world
    {"_staging", "_reader", "_streamed", "_ranges"},
    {"_writer", "_assemble", "_target"},
    {"_contents", "_union"},
    {"_part", "_plan", "_partial"},
    {"_commit"},
    {"_recycle", "_state_part", "_ceiling", "_commit_tree"},
    {"_probe"},
    {"_team"},
    {"_together"},
    {"_eager", "_broadcast", "_exchange"},
    {"_save"},
    {"_pending", "_steps"},
    {"_stats", "_trace"},
    {"_in_flight"},
    # the stories
    {"checkpoint", "_safetensors"},
    {"_step_reader", "_verify"},
    {"checkpointer", "storage"},
    {"__init__"},
    {"_cli_text"},
    {"_cli_formats", "_cli_losses"},
    {"_cli_bench", "_cli_convert", "_cli_inspect", "_cli_topology"},
    {"_cli_app"},
    {"cli"},
)
FRAMEWORKS = {"torch", "jax", "jaxlib", "flax", "orbax", "tensorstore", "lightning"}
COMMAND_LINE = {"typer", "rich"}

PUBLIC = {
    *("save", "load", "verify", "read_manifest", "Checkpointer", "PendingSave", "OverlapReport", "Advice"),
    *("save_safetensors", "load_safetensors", "read_safetensors_header"),
    *("SaveConfig", "LoadConfig", "SaveReport", "VerifyReport", "per_node"),
    *("read_checkpoint", "CheckpointReader", "ReadRequest", "Box"),
    *("Comm", "SingleProcess", "ShardOf", "Sharded", "StatePart", "combine_parts"),
    *("errors", "FpMultiError"),
    *("register_tensor_type", "register_extension_type"),
    *("TensorType", "ExtensionType", "LeafSource", "HostTensor", "TensorBuilder", "numpy_dtype"),
    *("capabilities", "measure_ceiling", "CeilingResult", "__version__"),
}


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every import, also inside functions; the name is empty for ``import module``."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # A relative import keeps its dots.
            module = "." * node.level + (node.module or "")
            yield from ((module, alias.name) for alias in node.names)


def own_imports(path: Path) -> Iterator[str]:
    """The modules of the core that a file imports."""
    for module, name in imports(path):
        assert not module.startswith("."), f"{path}: imports are absolute in the core"
        if module == "fp_multi":
            yield name if name in MODULES or name == "_engine" else "__init__"
        elif module.startswith("fp_multi."):
            yield module.split(".")[1]


def level_of(module: str) -> int:
    for number, names in enumerate(LEVELS):
        if module in names:
            return number
    pytest.fail(f"fp_multi/{module}.py has no place in LEVELS; give it one")


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    level = level_of(module)
    wrong = {name for name in own_imports(MODULES[module]) if level_of(name) >= level}
    assert not wrong, f"{module} imports {wrong}, which are not below it"


def test_levels_name_only_what_exists() -> None:
    assert set().union(*LEVELS) == {*MODULES, "_engine"}


@pytest.mark.parametrize("module", MODULES)
def test_core_knows_no_framework(module: str) -> None:
    foreign = {name.partition(".")[0] for name, _ in imports(MODULES[module])}
    assert not foreign & FRAMEWORKS
    assert module.startswith("_cli_") or not foreign & COMMAND_LINE


def test_only_convert_names_a_framework_at_run_time() -> None:
    found = set()
    for module, path in MODULES.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
                names = {a.value for a in node.args if isinstance(a, ast.Constant)}
                if {str(name).partition(".")[0] for name in names} & FRAMEWORKS:
                    found.add(module)
    assert found == {"_cli_convert"}


def test_importing_the_core_loads_no_framework() -> None:
    code = (
        "import sys, fp_multi\n"
        f"loaded = {FRAMEWORKS | COMMAND_LINE!r} & set(sys.modules)\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_adapters_use_public_names_only(path: Path) -> None:
    wrong = []
    for module, name in imports(path):
        if module == "fp_multi" and name and name not in fp_multi.__all__:
            wrong.append(f"fp_multi.{name}")
        elif module.startswith("fp_multi."):
            part = module.split(".")[1]
            if part not in ("adapters", "errors", "config", "storage"):
                wrong.append(module)
    public = {alias for alias in aliases(path)}
    for node in ast.walk(tree_of(path)):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in public
            and node.attr not in fp_multi.__all__
            and node.attr != "adapters"
        ):
            wrong.append(f"fp_multi.{node.attr}")
    assert not wrong, f"not public: {wrong}"


def aliases(path: Path) -> Iterator[str]:
    """The names under which a file has the package itself."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "fp_multi":
                    yield alias.asname or alias.name


def test_adapters_do_not_shadow_the_package_of_that_name() -> None:
    # A top-level adapters/__init__.py would hide PyPI's "adapters" from everybody who runs from here.
    assert not (ROOT / "adapters" / "__init__.py").exists()


@pytest.mark.parametrize("path", [*MODULES.values(), *ADAPTERS], ids=lambda path: path.stem)
def test_library_code_neither_asserts_nor_prints(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Assert), f"{where}: raise an error of the family instead"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{where}: log, or leave printing to the command line"
        if isinstance(node, ast.FunctionDef):
            assert node.name != "__del__", f"{where}: close explicitly"


def lengths(paths: list[Path]) -> dict[str, int]:
    return {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}


def test_modules_are_short() -> None:
    python = lengths([*MODULES.values(), *ADAPTERS])
    assert not {name: n for name, n in (python | lengths(NATIVE)).items() if n > 400}
    assert statistics.median(n for n in python.values() if n) < 150, python


def test_public_names() -> None:
    assert set(fp_multi.__all__) == PUBLIC
    assert len(fp_multi.__all__) == len(set(fp_multi.__all__))
    missing = [name for name in fp_multi.__all__ if not hasattr(fp_multi, name)]
    assert not missing


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_things_are_documented(name: str) -> None:
    thing = getattr(fp_multi, name)
    if isinstance(thing, (type, types.ModuleType, types.FunctionType)):
        assert thing.__doc__, f"{name} has no docstring"
    if isinstance(thing, types.FunctionType):
        for section in ("Args:", "Returns:", "Raises:", "Example:"):
            if section == "Returns:" and inspect.signature(thing).return_annotation == "None":
                continue
            assert section in (thing.__doc__ or ""), f"{name} has no {section}"


@pytest.mark.parametrize("config", [fp_multi.SaveConfig, fp_multi.LoadConfig])
def test_every_setting_is_documented(config: type) -> None:
    rows = [line for line in (ROOT / "docs" / "settings.md").read_text().splitlines() if line.startswith("| `")]
    for field in dataclasses.fields(config):
        (row,) = [row for row in rows if row.startswith(f"| `{field.name}` |")]
        shown = f'"{field.default}"' if isinstance(field.default, str) else str(field.default)
        assert shown in row.split("|")[3], f"{field.name}: the default is {shown}, the table says {row}"
