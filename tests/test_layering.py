"""The plan in docs/architecture.md is the one that `make lint` holds, the public names are what they say, and private ones are ours."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import foundry_fp8
from tests.mutants import MUTANTS

ROOT = Path(foundry_fp8.__file__).parents[1]


def packages_of_the_contract():
    text = (ROOT / "pyproject.toml").read_text().split("[[tool.importlinter.contracts]]")[1]
    listed = re.search(r"layers = \[(.*?)\]", text, re.S)[1]
    return [set(re.findall(r"\w+", line)) for line in re.findall(r'"(.*?)"', listed)][
        ::-1
    ]  # the lowest first


def packages_of_the_plan():
    plan = (ROOT / "docs/architecture.md").read_text().split("    foundry_fp8/\n", 1)[1].split("\n\n", 1)[0]
    return [re.match(r"\s+([a-z_]+)(?:/|\.py)", line)[1] for line in plan.splitlines()]


def test_the_plan_lists_every_folder_in_the_order_of_the_contract():
    readme, contract = packages_of_the_plan(), packages_of_the_contract()
    assert set(readme) == set().union(*contract)
    place = {package: rank for rank, packages in enumerate(contract) for package in packages}
    ranks = [place[package] for package in readme if package != "config" and package != "compat"]
    assert ranks == sorted(ranks)


def test_every_public_name_can_be_imported():
    assert set(foundry_fp8.__all__) == {*foundry_fp8._HOMES, "__version__"}
    for name in foundry_fp8.__all__:
        assert getattr(foundry_fp8, name) is not None
    assert set(dir(foundry_fp8)) == set(foundry_fp8.__all__)


IMPORTS = """
import sys
import torch
before = set(sys.modules)
sys.modules["triton"] = None  # whoever imports it now fails
import foundry_fp8
new = {m for m in set(sys.modules) - before if not m.startswith("foundry_fp8")} - {"triton"}
assert not new, new
import foundry_fp8.backends.native
for name, home in foundry_fp8._HOMES.items():
    if not home.startswith("models."):  # which are transformers'
        getattr(foundry_fp8, name)
others = {"composer", "llmfoundry", "streaming", "transformers", "transformer_engine"} & set(sys.modules)
assert not others, others
kernels = {m for m in sys.modules if m.startswith("foundry_fp8.kernels.")} - {f"foundry_fp8.kernels.{free}" for free in ("launch", "sources")}
assert not kernels, kernels
"""


def test_importing_the_package_loads_nothing_beside_torch_and_its_names_need_torch_alone():
    """And no Triton."""
    result = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_mutant_is_one_of_todays_code():
    for mutant in MUTANTS:
        text = (ROOT / "foundry_fp8" / mutant.file).read_text()
        assert text.count(mutant.old) == 1, f"{mutant.file}: {mutant.old!r}: update tests/mutants.py"
        assert [test for test in mutant.tests.split() if not (ROOT / "tests" / test).exists()] == []


def test_the_documented_yamls_are_those_of_the_package():
    assert (ROOT / "yamls").resolve() == (ROOT / "foundry_fp8" / "yamls").resolve()


LIBRARIES = {
    "torch",
    "triton",
    "composer",
    "llmfoundry",
    "transformers",
    "transformer_engine",
    "peft",
    "torchao",
}
DOCUMENTED = {
    "_version": "torch: a tensor's version, in its notes on autograd",
    "_exit": "Python: the end of a process whose threads may hold it",
    "_base": "torch: what a tensor is a view of, beside it",
    "_scaled_mm": "torch: the only FP8 GEMM of 2.7; backends/native/backend.py says why the backend is missing without it",
    "_allgather_base": "torch: what a ProcessGroup in Python has to define",
    "_reduce_scatter_base": "torch: the same",
    "_modules": "torch: a module's children, shared ones too, where they are replaced",
    "_parameters": "torch: the same of parameters",
    "_buffers": "torch: the same of buffers",
    "_forward_hooks": "torch: who listens to a module, which fusing it would pass by",
    "_forward_pre_hooks": "torch: the same",
    "_attn_implementation": "transformers: what a model reads to choose its attention",
    "_attn_implementation_autoset": "transformers: what `save_pretrained` sets before it writes a configuration",
    "_tied_weights_keys": "transformers: what a model says of its tied weights",
    "_gradient_checkpointing_func": "transformers: what a model that checkpoints itself calls",
    "_activation_checkpointing": "LLM Foundry: what a model says of a block that may be checkpointed",
    "_is_residual": "LLM Foundry: what a model says to its initialisers",
    "_register_custom_module": "peft: in its guide to custom models",
    "_replace": "Python: of a NamedTuple",
}
"""Private names of others that foundry_fp8 may use outside of compat/, and why."""


def _own_private_names(tree):
    """Private names that a file defines: functions, classes, fields, variables, and attributes of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr


def _private(name):
    return name.startswith("_") and not name.endswith("__") and name not in ("_", "_asdict")


def _private_uses(tree):
    """``(name, the node, whose)`` of private names that are read, written, asked for by a string or imported."""
    modules = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).split(".")[0] in LIBRARIES
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                path = [*(getattr(node, "module", None) or "").split("."), *alias.name.split(".")]
                if path[0] in LIBRARIES or (path[:1] == [""] and path[1] in LIBRARIES):
                    yield from ((part, node, "a library") for part in path if _private(part))
            continue
        if isinstance(node, ast.Attribute):
            name, of = node.attr, node.value
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr", "delattr")
            and isinstance(node.args[1], ast.Constant)
        ):
            name, of = str(node.args[1].value), node.args[0]
        else:
            continue
        if _private(name):
            root = of
            while isinstance(root, ast.Attribute | ast.Call):
                root = root.value if isinstance(root, ast.Attribute) else root.func
            rooted = root.id if isinstance(root, ast.Name) else ""
            own = (rooted in ("self", "cls") and isinstance(of, ast.Name)) or rooted == "super"
            yield name, node, "a library" if rooted in modules else "self" if own else "another"


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def uses_in(path):
    return list(_private_uses(tree_of(path)))


def private_names_of_others(files):
    """Where a private name is used that neither the file (for ``self`` the package) defines nor :data:`DOCUMENTED` allows."""
    trees = {path: tree_of(path) for path in files}
    ours = {path: set(_own_private_names(tree)) for path, tree in trees.items()}
    of_all = set().union(*ours.values())
    known = {"a library": lambda path: set(), "another": ours.__getitem__, "self": lambda path: of_all}
    return [
        f"{path.name}: {ast.unparse(node)}"
        for path in files
        for name, node, whose in uses_in(path)
        if name not in DOCUMENTED and name not in known[whose](path)
    ]


def test_private_names_of_other_libraries_are_in_compat_alone():
    """There each is tested where it is imported or called, and one message says what to do when it has moved."""
    package = ROOT / "foundry_fp8"
    files = [path for path in package.rglob("*.py") if package / "compat" not in path.parents]
    found = private_names_of_others(files)
    assert found == [], "\n".join(found)
    used = {name for path in files for name, *_ in uses_in(path)}
    assert used >= set(DOCUMENTED)


def test_the_search_for_private_names_finds_them(tmp_path):
    """Each of these lines once stood in the package, or is of its kind."""
    lines = [
        "import torch; torch._C._len_torch_dispatch_stack()",
        "import torch.distributed as dist; dist.distributed_c10d._get_default_store()",
        "from transformer_engine.pytorch.distributed import _get_module_fsdp_state",
        "from torch.utils._pytree import tree_map",
        "def key(x): return x.untyped_storage()._cdata",
        "def key(node): return getattr(node, '_saved_attn_mask', None)",
        "import torch\ndef _dynamo(): return torch._dynamo",
    ]
    for line in lines:
        tree_of.cache_clear()
        uses_in.cache_clear()
        path = tmp_path / "module.py"
        path.write_text(line)
        assert private_names_of_others([path]), line
