"""What differs between recipes is said by the recipe: few lines elsewhere ask which one they have."""

import ast
from pathlib import Path

import foundry_fp8
from foundry_fp8.numerics import recipes, scalings
from foundry_fp8.numerics.recipes import RECIPES

PACKAGE = Path(foundry_fp8.__file__).parent
WHERE_THEY_ARE = ("numerics/recipes.py", "numerics/scalings.py", "backends/native/scaling/")
CLASSES = {
    name
    for module in (recipes, scalings)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, recipes.Recipe | scalings.Scaling)
} - {"Recipe", "Scaling"}
WORDS = (
    set(RECIPES) | {recipe.kind for recipe in map(lambda cls: cls(), RECIPES.values())} | {"row", "tensor"}
)


def asks(source):
    """The lines whose conditions name a recipe, or compare one's name, kind or granularity with a word."""
    lines = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            found = any(isinstance(n, ast.Name) and n.id in CLASSES for n in ast.walk(node))
        elif isinstance(node, ast.Compare):
            text = ast.unparse(node)
            found = any(isinstance(n, ast.Constant) and n.value in WORDS for n in ast.walk(node))
            found &= any(word in text for word in ("recipe", "kind", "granularity", "scaling"))
        else:
            continue
        if found:
            lines.add(node.lineno)
    return lines


def test_few_lines_outside_of_recipes_and_scalings_ask_which_one_they_have():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(WHERE_THEY_ARE) and (lines := asks(path.read_text())):
            found[name] = sorted(lines)
    assert sum(map(len, found.values())) <= 25 and len(found) <= 8, found


def test_the_search_finds_them():
    assert asks(
        "if isinstance(recipe, BlockScaling):\n    pass\nx = recipe.kind == 'mx'\ny = recipe.by_row"
    ) == {1, 3}
    assert asks("a = 1 if layer.recipe.name in ('delayed', 'current') else 2\nb = o.name == 'block'") == {1}
