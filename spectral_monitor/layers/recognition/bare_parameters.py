"""Read from the source of a module what it does with a parameter that it holds itself.

A matrix ``w`` may be meant as ``x @ w`` or as ``w @ x``, as a table of rows, or as numbers that are added or multiplied
entry by entry. Its shape does not tell. The line that uses it does. So does it of matrices one behind the other, each
of which multiplies inputs of its own, as in an ensemble.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from torch import nn

Use = Literal["linear", "transposed", "table", "added", "elementwise"]
"""A matrix (out, in) or (in, out), a table of rows, or what is added to features or multiplied entry by entry."""

_SAME = frozenset(
    {"to", "type", "type_as", "float", "double", "half", "bfloat16"}
    | {"contiguous", "clone", "detach", "expand", "expand_as", "repeat"}
)
"""Methods that leave a matrix what it is."""
_TURNED = frozenset({"t", "transpose", "T", "mT", "adjoint", "mH", "H"})
_LAST_TWO = ({"1", "2"}, {"-1", "-2"})
"""The dimensions that ``transpose`` swaps where it turns each matrix of a stack."""
_MOVED = frozenset({"permute", "movedim", "moveaxis", "swapaxes", "swapdims"})
"""Functions after which a dimension may be anywhere."""
_RESHAPED = frozenset({"reshape", "flatten", "unflatten", "ravel", "view"})
_PRODUCTS = frozenset({"matmul", "mm", "bmm", "mv"})
_JOINED = frozenset({"cat", "concat", "concatenate", "stack"})
_SIZES = frozenset({"shape", "size", "device", "dtype", "ndim", "dim", "numel", "__len__"})
"""What a tensor says of itself without its entries."""


def use_of(module: nn.Module, key: str, holder: tuple[nn.Module, str] | None = None, stack: bool = False) -> Use | None:
    """Return what the methods of a module do with its parameter ``key``; ``None`` if they do not agree or say.

    Args:
        module: that holds the parameter; a ``ParameterList`` or ``ParameterDict`` is looked at in its holder.
        key: the parameter's name in it.
        holder: the module that holds that one, and under which name.
        stack: whether it has three dimensions (n, a, b), not two; the answer is then on each of its matrices.
    """
    listed = isinstance(module, (nn.ParameterList, nn.ParameterDict))
    if listed and holder is None:
        return None
    owner, name = holder if listed and holder else (module, key)
    found = {use for function in _methods(type(owner).__mro__) for use in function.uses(name, listed, stack)}
    return found.pop() if len(found) == 1 else None


@lru_cache(maxsize=256)
def _methods(bases: tuple[type, ...]) -> tuple[_Function, ...]:
    """Return the methods of a class, given as the order of those it inherits from, but for ``nn.Module``'s own."""
    seen: dict[str, _Function | None] = {}
    for base in bases[: bases.index(nn.Module)]:
        for name, function in vars(base).items():
            if name not in seen and inspect.isfunction(function) and name != "__init__":
                seen[name] = _parsed(function)
    return tuple(function for function in seen.values() if function is not None)


def _parsed(function: Any) -> _Function | None:
    """Return a function's syntax; ``None`` where there is no source, as for what was typed into ``python -c``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    root = tree.body[0] if tree.body else None
    arguments = root.args.posonlyargs + root.args.args if isinstance(root, ast.FunctionDef) else []
    return _Function(root, arguments[0].arg) if isinstance(root, ast.FunctionDef) and arguments else None


@dataclass(frozen=True)
class _Value:
    """A parameter, or what was made of it so far without any data."""

    turned: bool = False  # whether transposed
    inside: bool = False  # whether it was multiplied with another weight, and is a part of that product
    stack: bool = False  # whether it is a stack of matrices

    def side(self, left: bool) -> Use:
        """Return what it is as a factor: ``w @ x`` takes (out, in), ``x @ w`` takes (in, out)."""
        return "linear" if left != self.turned else "transposed"


@dataclass
class _Function:
    """The syntax of a method, and which of its expressions come from data."""

    root: ast.FunctionDef
    self_name: str
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    data: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for node in ast.walk(self.root):
            self.parents.update((child, node) for child in ast.iter_child_nodes(node))
        its = self.root.args
        every = [*its.posonlyargs, *its.args, *its.kwonlyargs, *filter(None, (its.vararg, its.kwarg))]
        self.data = {argument.arg for argument in every} - {self.self_name}
        # What is made of data is data, also in a loop's earlier lines.
        before = -1
        while len(self.data) != before:
            before = len(self.data)
            for target, value in self._assigned():
                if self._is_data(value):
                    self.data.update(node.id for node in ast.walk(target) if isinstance(node, ast.Name))

    def _assigned(self) -> Iterator[tuple[ast.AST, ast.AST]]:
        for node in ast.walk(self.root):
            if isinstance(node, ast.Assign):
                yield from ((target, node.value) for target in node.targets)
            elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                yield node.target, node.value
            elif isinstance(node, (ast.For, ast.comprehension)):
                yield node.target, node.iter

    def _is_data(self, node: ast.AST) -> bool:
        """Return whether entries of data are in an expression, not just their number."""
        if isinstance(node, ast.Attribute) and node.attr in _SIZES:
            return False
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len":
            return False
        if isinstance(node, ast.Name):
            return node.id in self.data
        return any(self._is_data(child) for child in ast.iter_child_nodes(node))

    def _is_own(self, node: ast.AST, key: str | None = None) -> bool:
        owned = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self.self_name
        return owned and (key is None or getattr(node, "attr", None) == key)

    def uses(self, key: str, listed: bool = False, stack: bool = False) -> set[Use]:
        """Return every use of ``self.<key>``, or of its items, that can be told."""
        places = [node for node in ast.walk(self.root) if self._is_own(node, key)]
        if listed:
            places = [item for place in places for item in self._items(place)]
        return {use for place in places for use in self._follow(place, _Value(stack=stack), set())}

    def _items(self, place: ast.AST) -> list[ast.AST]:
        """Return what stands for an item of a list: one that is taken out, or the name of a loop over it."""
        parent = self.parents[place]
        if isinstance(parent, ast.Subscript) and parent.value is place:
            return [parent]
        index = None
        if (
            isinstance(parent, ast.Call)
            and isinstance(parent.func, ast.Name)
            and (name := parent.func.id) in ("zip", "enumerate")
        ):
            places = [None, place] if name == "enumerate" else parent.args  # an item comes after its number
            index = next((i for i, argument in enumerate(places) if argument is place), None)
            place, parent = parent, self.parents[parent]
        if not isinstance(parent, (ast.For, ast.comprehension)) or parent.iter is not place:
            return []
        target = parent.target
        if index is not None:
            if not isinstance(target, ast.Tuple) or index >= len(target.elts):
                return []
            target = target.elts[index]
        return self._named(target.id) if isinstance(target, ast.Name) else []

    def _named(self, name: str) -> list[ast.AST]:
        nodes = (node for node in ast.walk(self.root) if isinstance(node, ast.Name) and node.id == name)
        return [node for node in nodes if isinstance(node.ctx, ast.Load)]

    def _follow(self, node: ast.AST, value: _Value, names: set[str]) -> set[Use]:
        """Return where an expression that stands for a parameter meets data, or else where it meets other weights."""
        while True:
            parent = self.parents[node]
            after: set[Use] | _Value = value
            match parent:
                case ast.Attribute():
                    after = self._attribute(parent, value, names)
                    call = self.parents[parent]
                    parent = call if isinstance(call, ast.Call) and call.func is parent else parent
                case ast.BinOp(op=ast.MatMult()):
                    left = parent.left is node
                    other = parent.right if left else parent.left
                    after = self._product(parent, left, self._is_data(other), value, names)
                case ast.BinOp():
                    if self._is_data(parent.right if parent.left is node else parent.left):
                        after = {"added" if isinstance(parent.op, (ast.Add, ast.Sub)) else "elementwise"}
                case ast.UnaryOp() | ast.IfExp() | ast.NamedExpr():
                    pass
                case ast.Subscript() if parent.value is node:
                    kept = [_keeps_rows(index) for index in _indices(parent.slice)]
                    one_of_stack = value.stack and not kept[0] and all(kept[1:])
                    after = value if all(kept) or one_of_stack else set() if kept[0] or value.stack else {"table"}
                case ast.List() | ast.Tuple():
                    call = self.parents[parent]
                    after = {"table"} if isinstance(call, ast.Call) and _called(call) in _JOINED else set()
                case ast.Call():
                    after = self._argument(parent, node, value)
                case ast.Assign(targets=[ast.Name(id=name)]) if name not in names | self.data:
                    places = self._named(name)
                    after = {use for place in places for use in self._follow(place, value, names | {name})}
                case _:
                    after = set()
            if isinstance(after, set):
                return after
            node, value = parent, after

    def _attribute(self, place: ast.Attribute, value: _Value, names: set[str]) -> set[Use] | _Value:
        """Return what a method or an attribute does with a parameter, or what it makes of it."""
        name, call = place.attr, self.parents[place]
        if name in _SIZES:
            return set()
        if isinstance(call, ast.Call) and call.func is place:
            with_data = any(map(self._is_data, call.args))
            if name in _PRODUCTS:
                return self._product(call, True, with_data, value, names)
            if with_data and name not in _SAME:
                return _entry_by_entry(name)
        if value.stack and name not in _SAME | _TURNED:
            return set()
        return _made(name, call.args if isinstance(call, ast.Call) and call.func is place else [], value)

    def _product(self, parent: ast.AST, left: bool, with_data: bool, value: _Value, names: set[str]) -> set[Use]:
        """Return the side on which a parameter is multiplied: with data here, or with data that its product meets."""
        side = value.side(left)
        if with_data:
            return {side}
        found = self._follow(parent, _Value(inside=True, stack=value.stack), names) & {"linear", "transposed"}
        return found or (set() if value.inside else {side})

    def _argument(self, call: ast.Call, node: ast.AST, value: _Value) -> set[Use] | _Value:
        """Return what a function does with an argument, or the value if its result still stands for the parameter."""
        name = _called(call)
        at = next((i for i, argument in enumerate(call.args) if argument is node), None)
        others = [argument for argument in call.args if argument is not node]
        # A method's object comes before its arguments.
        with_data = any(map(self._is_data, [call.func, *others, *(keyword.value for keyword in call.keywords)]))
        if name == "linear" and at == 1:
            return {value.side(left=True)}
        if name == "embedding" and at == 1:
            return {"table"}
        if name in _PRODUCTS and at in (0, 1):
            return {value.side(left=at == 0 and len(call.args) == 2)}
        if name in ("addmm", "baddbmm") and at in (1, 2):
            return {value.side(left=at == 1)}
        if name == "einsum" and at is not None and isinstance(call.args[0], ast.Constant):
            found = _einsum(str(call.args[0].value), at - 1, value)
            return found if found or with_data else value
        if with_data:
            return _entry_by_entry(name)
        of_torch = isinstance(call.func, ast.Attribute) and not self._is_own(call.func)
        return _made(name, call.args[1:], value) if of_torch and at is not None else set()


def _entry_by_entry(name: str) -> set[Use]:
    """Return what a function of a parameter and data does with it, if it takes them entry by entry."""
    if name in {"add", "sub"}:
        return {"added"}
    return {"elementwise"} if name in {"mul", "div"} else set()


def _made(name: str, arguments: Sequence[ast.AST], value: _Value) -> set[Use] | _Value:
    """Return what a function without data, or an attribute, makes of a parameter; nothing where that cannot be told."""
    if name in _MOVED or (value.stack and name in _RESHAPED):
        return set()
    if name not in _TURNED:
        return value
    swaps_last = name == "transpose" and {ast.unparse(argument) for argument in arguments} in _LAST_TWO
    if value.stack and name != "mT" and not swaps_last:
        return set()
    return replace(value, turned=not value.turned)


def _called(call: ast.Call) -> str:
    """Return the last part of a function's name."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _indices(index: ast.AST) -> list[ast.AST]:
    return list(index.elts) if isinstance(index, ast.Tuple) else [index]


def _keeps_rows(index: ast.AST) -> bool:
    """Return whether an index is a slice, an ellipsis or a new axis."""
    return isinstance(index, ast.Slice) or (isinstance(index, ast.Constant) and index.value in (None, ...))


def _einsum(equation: str, at: int, value: _Value) -> set[Use]:
    """Return what an equation such as ``"bi,io->bo"`` does with its operand ``at``, or with its last two axes."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if not arrow or not 0 <= at < len(operands) or len(operands[at]) != 2 + value.stack or "." in operands[at]:
        return set()
    elsewhere = set("".join(operands[:at] + operands[at + 1 :]))
    if value.stack and not (operands[at][0] in elsewhere and operands[at][0] in output):
        return set()
    letters = operands[at][-2:]
    summed = [letter in elsewhere and letter not in output for letter in letters]
    own = [letter in output and letter not in elsewhere for letter in letters]
    if summed[1] and own[0]:
        return {value.side(left=True)}
    if summed[0] and own[1]:
        return {value.side(left=False)}
    return {"elementwise"} if not any(summed) and not any(own) else set()
