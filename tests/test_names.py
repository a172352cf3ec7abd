"""Names are nouns and verbs of the field: no filler words, and no participles for functions."""

import ast

import pytest
from house import ROOT

FILLERS = {
    *("found", "own", "each", "chosen", "seen", "known", "there", "how", "few", "given", "shown"),
    *("words", "kept", "what", "said", "begun"),
}
IRREGULAR = FILLERS | {"built", "drawn", "made", "taken"}
# Idioms of Python and torch, verbs that end as participles do, and the command `published`.
VERBS = {"embed", "exceed", "feed", "need", "proceed", "published", "seed", "shed", "speed"}
FOLDERS = (
    *("benchmarks", "capsule_zoo", "data", "docs", "examples", "experiments", "guides"),
    *("inference", "models", "tests", "tools"),
)
FILES = sorted({p.resolve() for name in FOLDERS for p in (ROOT / name).rglob("*.py")})


def bound_names(tree: ast.AST) -> set[str]:
    """Return the names of all variables, parameters, functions and classes that code binds."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def is_filler(name: str) -> bool:
    return name.strip("_").lower() in FILLERS


def is_participle(name: str) -> bool:
    return name in IRREGULAR or (name.endswith("ed") and "_" not in name and name not in VERBS)


def public_functions(tree: ast.Module) -> set[str]:
    """Return the names of public functions, and of public methods that are not properties."""
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    return {
        node.name
        for body in bodies
        for node in body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and not any("property" in ast.unparse(wrapper) for wrapper in node.decorator_list)
    }


def test_no_name_is_a_filler_word():
    fillers = {
        (str(path.relative_to(ROOT)), name)
        for path in FILES
        for name in bound_names(ast.parse(path.read_text()))
        if is_filler(name)
    }
    assert not fillers, sorted(fillers)


def test_no_public_function_is_named_by_a_participle():
    participles = {
        (str(path.relative_to(ROOT)), name)
        for path in FILES
        if "tests" not in path.relative_to(ROOT).parts
        for name in public_functions(ast.parse(path.read_text()))
        if is_participle(name)
    }
    assert not participles, sorted(participles)


@pytest.mark.parametrize(
    "code", ["for each in x: pass", "def f(given): pass", "_KEPT = 3", "class Found: pass"]
)
def test_a_filler_word_is_seen_wherever_it_is_bound(code):
    assert any(map(is_filler, bound_names(ast.parse(code))))


@pytest.mark.parametrize(
    ("name", "expected"), [("compared", True), ("drawn", True), ("seed", False), ("draw", False)]
)
def test_participles_are_told_from_verbs(name, expected):
    (function,) = public_functions(ast.parse(f"def {name}(): pass"))
    assert is_participle(function) == expected
