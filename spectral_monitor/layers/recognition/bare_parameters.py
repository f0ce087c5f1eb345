"""Read from the source of a module what it does with a parameter of its own.

A matrix ``w`` may be used as ``x @ w`` or as ``w @ x``, as a table of rows, or as numbers that are added or multiplied
entry by entry. Its shape does not tell, but the line that uses it does. The same is true of a stack of matrices, each
of which multiplies its own inputs, as in an ensemble.
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
"""A matrix (out, in) or (in, out), a table of rows, numbers added to features, or numbers used entry by entry."""

_IDENTITIES = frozenset(
    {"to", "type", "type_as", "float", "double", "half", "bfloat16"}
    | {"contiguous", "clone", "detach", "expand", "expand_as", "repeat"}
)
"""Methods that do not change a matrix."""
_TRANSPOSES = frozenset({"t", "transpose", "T", "mT", "adjoint", "mH", "H"})
_LAST_TWO = ({"1", "2"}, {"-1", "-2"})
"""The dimensions with which ``transpose`` transposes each matrix of a stack."""
_PERMUTATIONS = frozenset({"permute", "movedim", "moveaxis", "swapaxes", "swapdims"})
_RESHAPES = frozenset({"reshape", "flatten", "unflatten", "ravel", "view"})
_PRODUCTS = frozenset({"matmul", "mm", "bmm", "mv"})
_ENTRYWISE = frozenset({"exp", "exp2", "expm1", "log", "sigmoid", "softplus"})
"""Functions of each entry. A parameter with no known product after one is not a matrix, such as Mamba's ``A_log``."""
_CONCATENATIONS = frozenset({"cat", "concat", "concatenate", "stack"})
_METADATA = frozenset({"shape", "size", "device", "dtype", "ndim", "dim", "numel", "__len__"})
"""Attributes of a tensor that do not depend on its entries."""


def use_of(module: nn.Module, key: str, holder: tuple[nn.Module, str] | None = None, stack: bool = False) -> Use | None:
    """Return what the methods of a module do with its parameter ``key``; ``None`` if they disagree or do not tell.

    Args:
        module: the module of the parameter; for a ``ParameterList`` or ``ParameterDict`` the methods of its parent
            are read.
        key: the parameter's name in the module.
        holder: the parent of the module, and the module's name there.
        stack: whether the parameter has three dimensions (n, a, b), not two; the answer then holds for each matrix.
    """
    listed = isinstance(module, (nn.ParameterList, nn.ParameterDict))
    if listed and holder is None:
        return None
    owner, name = holder if listed and holder else (module, key)
    uses = {use for method in _methods(type(owner).__mro__) for use in method.uses(name, listed, stack)}
    return uses.pop() if len(uses) == 1 else None


@lru_cache(maxsize=256)
def _methods(bases: tuple[type, ...]) -> tuple[_Function, ...]:
    """Return the methods of a class, given by its method resolution order, without those of ``nn.Module``."""
    methods: dict[str, _Function | None] = {}
    for base in bases[: bases.index(nn.Module)]:
        for name, function in vars(base).items():
            if name not in methods and inspect.isfunction(function) and name != "__init__":
                methods[name] = _parsed(function)
    return tuple(method for method in methods.values() if method is not None)


def _parsed(function: Any) -> _Function | None:
    """Return a method's syntax tree; ``None`` if its source is not available, as in ``python -c``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    root = tree.body[0] if tree.body else None
    if not isinstance(root, ast.FunctionDef):
        return None
    arguments = root.args.posonlyargs + root.args.args
    return _Function(root, arguments[0].arg) if arguments else None


@dataclass(frozen=True)
class _Value:
    """A parameter, or a value computed from it without any data."""

    transposed: bool = False
    in_product: bool = False  # whether it was multiplied with another weight
    stack: bool = False  # whether it is a stack of matrices
    changed: bool = False  # whether a function was applied to each entry

    def as_factor(self, left: bool) -> Use:
        """Return its use as the left or right factor: ``w @ x`` takes (out, in), ``x @ w`` takes (in, out)."""
        return "linear" if left != self.transposed else "transposed"


@dataclass
class _Function:
    """The syntax tree of a method, and its variables that come from data."""

    root: ast.FunctionDef
    self_name: str
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    data: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for node in ast.walk(self.root):
            self.parents.update((child, node) for child in ast.iter_child_nodes(node))
        args = self.root.args
        arguments = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
        self.data = {argument.arg for argument in arguments} - {self.self_name}
        # Values computed from data are data. A loop may assign one below the line that uses it, so repeat.
        previous_count = -1
        while len(self.data) != previous_count:
            previous_count = len(self.data)
            for target, value in self._assignments():
                if self._is_data(value):
                    self.data.update(node.id for node in ast.walk(target) if isinstance(node, ast.Name))

    def _assignments(self) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield each target with the value that is assigned to it."""
        for node in ast.walk(self.root):
            if isinstance(node, ast.Assign):
                yield from ((target, node.value) for target in node.targets)
            elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                yield node.target, node.value
            elif isinstance(node, (ast.For, ast.comprehension)):
                yield node.target, node.iter

    def _is_data(self, node: ast.AST) -> bool:
        """Return whether an expression depends on entries of data, not only on their number."""
        if isinstance(node, ast.Attribute) and node.attr in _METADATA:
            return False
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len":
            return False
        if isinstance(node, ast.Name):
            return node.id in self.data
        return any(self._is_data(child) for child in ast.iter_child_nodes(node))

    def _is_own(self, node: ast.AST) -> bool:
        """Return whether an expression is an attribute of ``self``."""
        return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self.self_name

    def uses(self, key: str, listed: bool = False, stack: bool = False) -> set[Use]:
        """Return all recognized uses of ``self.<key>``, or of its items."""
        nodes = [node for node in ast.walk(self.root) if self._is_own(node) and getattr(node, "attr", None) == key]
        if listed:
            nodes = [item for node in nodes for item in self._items(node)]
        return {use for node in nodes for use in self._follow(node, _Value(stack=stack), set())}

    def _items(self, node: ast.AST) -> list[ast.AST]:
        """Return the expressions for an item of a list: a subscript, or the variable of a loop over the list."""
        parent = self.parents[node]
        if isinstance(parent, ast.Subscript) and parent.value is node:
            return [parent]
        index = None
        if isinstance(parent, ast.Call) and (name := getattr(parent.func, "id", "")) in ("zip", "enumerate"):
            iterated = [None, node] if name == "enumerate" else parent.args  # an item comes after its number
            index = next((i for i, argument in enumerate(iterated) if argument is node), None)
            node, parent = parent, self.parents[parent]
        if not isinstance(parent, (ast.For, ast.comprehension)) or parent.iter is not node:
            return []
        target = parent.target
        if index is not None:
            if not isinstance(target, ast.Tuple) or index >= len(target.elts):
                return []
            target = target.elts[index]
        return self._reads(target.id) if isinstance(target, ast.Name) else []

    def _reads(self, name: str) -> list[ast.AST]:
        """Return the expressions that read a variable."""
        nodes = (node for node in ast.walk(self.root) if isinstance(node, ast.Name) and node.id == name)
        return [node for node in nodes if isinstance(node.ctx, ast.Load)]

    def _follow(self, node: ast.AST, value: _Value, names: set[str]) -> set[Use]:
        """Return the uses of an expression that stands for a parameter: with data, or else with other weights.

        ``names``: variables that the parameter was assigned to on the way.
        """
        while True:
            parent = self.parents[node]
            outcome: set[Use] | _Value = value
            match parent:
                case ast.Attribute():
                    outcome = self._attribute(parent, value, names)
                    call = self.parents[parent]
                    parent = call if isinstance(call, ast.Call) and call.func is parent else parent
                case ast.BinOp(op=ast.MatMult()):
                    left = parent.left is node
                    other = parent.right if left else parent.left
                    outcome = self._product(parent, left, self._is_data(other), value, names)
                case ast.BinOp():
                    if self._is_data(parent.right if parent.left is node else parent.left):
                        outcome = {"added" if isinstance(parent.op, (ast.Add, ast.Sub)) else "elementwise"}
                case ast.UnaryOp() | ast.IfExp() | ast.NamedExpr():
                    pass
                case ast.Subscript() if parent.value is node:
                    indices = parent.slice.elts if isinstance(parent.slice, ast.Tuple) else [parent.slice]
                    kept = [_keeps_rows(index) for index in indices]
                    one_of_stack = value.stack and not kept[0] and all(kept[1:])
                    outcome = value if all(kept) or one_of_stack else set() if kept[0] or value.stack else {"table"}
                case ast.List() | ast.Tuple():
                    call = self.parents[parent]
                    outcome = {"table"} if isinstance(call, ast.Call) and _called(call) in _CONCATENATIONS else set()
                case ast.Call():
                    outcome = self._argument(parent, node, value)
                case ast.Assign(targets=[ast.Name(id=name)]) if name not in names | self.data:
                    reads = self._reads(name)
                    outcome = {use for read in reads for use in self._follow(read, value, names | {name})}
                case _:
                    outcome = set()
            if isinstance(outcome, set):
                return outcome or ({"elementwise"} if value.changed else set())
            node, value = parent, outcome

    def _attribute(self, node: ast.Attribute, value: _Value, names: set[str]) -> set[Use] | _Value:
        """Return the use of a parameter by one of its methods or attributes, or the value that this one gives."""
        name, parent = node.attr, self.parents[node]
        if name in _METADATA:
            return set()
        arguments: Sequence[ast.AST] = ()
        if isinstance(parent, ast.Call) and parent.func is node:
            arguments = parent.args
            with_data = any(map(self._is_data, arguments))
            if name in _PRODUCTS:
                return self._product(parent, True, with_data, value, names)
            if with_data and name not in _IDENTITIES:
                return _entry_by_entry(name)
        if value.stack and name not in _IDENTITIES | _TRANSPOSES:
            return set()
        return _transformed(name, arguments, value)

    def _product(self, parent: ast.AST, left: bool, with_data: bool, value: _Value, names: set[str]) -> set[Use]:
        """Return the use of a parameter as a factor: of data here, or of the data that the product meets later."""
        use = value.as_factor(left)
        if with_data:
            return {use}
        uses = self._follow(parent, _Value(in_product=True, stack=value.stack), names) & {"linear", "transposed"}
        return uses or (set() if value.in_product else {use})

    def _argument(self, call: ast.Call, node: ast.AST, value: _Value) -> set[Use] | _Value:
        """Return a function's use of its argument, or the value if the result still stands for the parameter."""
        name = _called(call)
        position = next((i for i, argument in enumerate(call.args) if argument is node), None)
        others = [argument for argument in call.args if argument is not node]
        # The object of a method counts as an argument too.
        with_data = any(map(self._is_data, [call.func, *others, *(keyword.value for keyword in call.keywords)]))
        if name == "linear" and position == 1:
            return {value.as_factor(left=True)}
        if name == "embedding" and position == 1:
            return {"table"}
        if name in _PRODUCTS and position in (0, 1):
            return {value.as_factor(left=position == 0 and len(call.args) == 2)}
        if name in ("addmm", "baddbmm") and position in (1, 2):
            return {value.as_factor(left=position == 1)}
        if name == "einsum" and position is not None and isinstance(call.args[0], ast.Constant):
            uses = _einsum(str(call.args[0].value), position - 1, value)
            return uses if uses or with_data else value
        if with_data:
            return _entry_by_entry(name)
        is_library = isinstance(call.func, ast.Attribute) and not self._is_own(call.func)
        return _transformed(name, call.args[1:], value) if is_library and position is not None else set()


def _entry_by_entry(name: str) -> set[Use]:
    """Return the use of a parameter by a function that combines it with data entry by entry; none by others."""
    if name in {"add", "sub"}:
        return {"added"}
    return {"elementwise"} if name in {"mul", "div"} else set()


def _transformed(name: str, arguments: Sequence[ast.AST], value: _Value) -> set[Use] | _Value:
    """Return the value that a function without data, or an attribute, gives; an empty set if it is not known."""
    if name in _PERMUTATIONS or (value.stack and name in _RESHAPES):
        return set()
    if name in _ENTRYWISE:
        return replace(value, changed=True)
    if name not in _TRANSPOSES:
        return value
    swaps_last = name == "transpose" and {ast.unparse(argument) for argument in arguments} in _LAST_TWO
    if value.stack and name != "mT" and not swaps_last:
        return set()
    return replace(value, transposed=not value.transposed)


def _called(call: ast.Call) -> str:
    """Return the last part of a function's name."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _keeps_rows(index: ast.AST) -> bool:
    """Return whether an index is a slice, an ellipsis or a new axis."""
    return isinstance(index, ast.Slice) or (isinstance(index, ast.Constant) and index.value in (None, ...))


def _einsum(equation: str, position: int, value: _Value) -> set[Use]:
    """Return the use of the operand at a position of an equation such as ``"bi,io->bo"``; of a stack, its last axes."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if not arrow or not 0 <= position < len(operands):
        return set()
    operand, others = operands[position], set("".join(operands[:position] + operands[position + 1 :]))
    if len(operand) != 2 + value.stack or "." in operand:
        return set()
    if value.stack and not (operand[0] in others and operand[0] in output):
        return set()
    summed = [axis in others and axis not in output for axis in operand[-2:]]
    kept = [axis in output and axis not in others for axis in operand[-2:]]
    if summed[1] and kept[0]:
        return {value.as_factor(left=True)}
    if summed[0] and kept[1]:
        return {value.as_factor(left=False)}
    return {"elementwise"} if not any(summed) and not any(kept) else set()
