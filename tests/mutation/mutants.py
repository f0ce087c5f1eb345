"""The mutants of a module, from cosmic-ray, without those that cannot change what it computes."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

Place = tuple[int, int]
"""Line and column."""
SPEED = frozenset({"cache", "lru_cache", "no_grad", "cached_property", "runtime_checkable"})
"""Decorators without which the same numbers are found, if slower."""
PORTIONS = frozenset({"CHUNK", "DEVICE_CHUNK", "_CHUNK", "_COPIED", "_SHORT", "INITIAL_CAPACITY", "CAPACITY_INCREMENT"})
"""How much is computed, or made room for, at a time: tests compute the same one entry at a time, and at once."""


@dataclass(frozen=True)
class Mutant:
    """One change of one module.

    Attributes:
        path: of the module.
        operator: of cosmic-ray.
        occurrence: which of the places where the operator applies.
        line: of the place.
    """

    path: Path
    operator: str
    occurrence: int
    line: int

    def source(self) -> str | None:
        """Return the module with the change; ``None`` if it is none, no Python, or compares by ``is`` to no effect."""
        text = self.path.read_text()
        changed: str | None = mutate_code(text, cosmic_ray.plugins.get_operator(self.operator)(), self.occurrence)
        try:
            tree = ast.parse(changed or text)
        except SyntaxError:
            return None
        return None if ast.dump(tree) == ast.dump(ast.parse(text)) or _by_identity(tree) else changed

    def change(self) -> str:
        """Return the changed lines, before and after."""
        before, after = self.path.read_text().splitlines(), (self.source() or "").splitlines()
        if len(before) != len(after):
            return f"{before[self.line - 1].strip()} -> left out"
        both = [(a.strip(), b.strip()) for a, b in zip(before, after, strict=True) if a != b]
        return "; ".join(f"{a} -> {b}" for a, b in both)


def _by_identity(tree: ast.Module) -> bool:
    """Return whether something is compared by ``is`` with a text or a number, or a dtype.

    The first is ruff's F632, so that ``make lint`` notices. Of each dtype torch has one object, so that it is the same.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for op, *pair in zip(node.ops, sides[:-1], sides[1:], strict=True):
                if isinstance(op, ast.Is | ast.IsNot) and any(_is_dtype(side) for side in pair):
                    return True
                literals = [side.value for side in pair if isinstance(side, ast.Constant)]
                if isinstance(op, ast.Is | ast.IsNot) and any(
                    isinstance(value, str | int | float) and not isinstance(value, bool) for value in literals
                ):
                    return True
    return False


def _is_dtype(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and (node.attr == "dtype" or ast.unparse(node).startswith("torch.float"))


def _idle(path: Path) -> list[tuple[Place, Place]]:
    """Return what makes no difference: annotations, decorators for speed, sizes of portions, margins, guards.

    Guards are ``strict=`` of a zip and ``frozen=`` of a dataclass, which only forbid. ``non_blocking=`` of a copy is
    speed. A margin is how many machine epsilons are allowed for rounding.
    """
    found: list[ast.AST] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            found.append(node.test)
        if isinstance(node, ast.AnnAssign):
            found.append(node.annotation)
        if isinstance(node, ast.keyword) and node.arg in ("strict", "frozen", "non_blocking"):
            found.append(node.value)
        if isinstance(node, ast.Assign | ast.Compare) and PORTIONS & {
            n.id for n in ast.walk(node) if isinstance(n, ast.Name)
        }:
            found.append(node)
        if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant) and "eps" in ast.unparse(node.right):
            found.append(node.left)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            found += [arg.annotation for arg in every if arg is not None and arg.annotation is not None]
            found += [node.returns] if node.returns is not None else []
            found += [d for d in node.decorator_list if SPEED & set(ast.unparse(d).replace("(", ".").split("."))]
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in found]  # type: ignore[attr-defined]


def mutants(path: Path) -> dict[Place, list[Mutant]]:
    """Return every mutant of a module by its place."""
    idle = _idle(path)
    nodes = list(ast_nodes(get_ast(path.read_text())))
    found: dict[Place, list[Mutant]] = defaultdict(list)
    for name in cosmic_ray.plugins.operator_names():
        kind = cosmic_ray.plugins.get_operator(name)
        if kind.arguments() or name.endswith("NoOp"):
            continue
        places = [start for node in nodes for start, _ in kind().mutation_positions(node)]
        for occurrence, (line, column) in enumerate(places):
            # A decorator begins with its @.
            if not any(
                begin <= (line, column + (line == begin[0] and "Decorator" in name)) <= end for begin, end in idle
            ):
                found[line, column].append(Mutant(path, name, occurrence, line))
    return found


def sample(paths: list[Path], count: int, seed: int) -> Iterator[Mutant]:
    """Yield mutants of some modules at random: a place first, for an operator of arithmetic has ten and a word one."""
    chosen = random.Random(seed)
    places = [every for path in paths for every in mutants(path).values()]
    chosen.shuffle(places)
    done = 0
    for every in places:
        mutant = chosen.choice(every)
        if done < count and mutant.source() is not None:
            done += 1
            yield mutant
