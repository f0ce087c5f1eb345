"""From live objects to lists, strings, numbers and CPU tensors, which any process can load, and back.

Every value becomes a list that begins with its kind. ``torch.load(..., weights_only=True)`` can read all of it.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from spectral_monitor.state import objects
from spectral_monitor.state.module_tables import TORCH_OWN
from spectral_monitor.state.snapshot import is_state

Packed = list[Any]

_UNCHANGED: Packed = ["left"]
"""Stands for values that a replay does not rewind (trainers, functions, weights): they stay as the model has them."""

_SCALARS = (type(None), bool, int, float, str)
_BUILTIN = {"list": list, "set": set, "tuple": tuple, "dict": dict}


class NotPlainError(TypeError):
    """A value that plain types cannot express, or that cannot be put back into the current model."""


def pack(value: Any, where: str) -> Packed:
    """Return a value made of numbers, strings, tensors, lists, tuples, sets and dicts.

    Raises:
        NotPlainError: naming a value of another type, and where it is.
    """
    kind = type(value)
    if kind in _SCALARS:
        return ["value", value]
    if isinstance(value, Tensor):
        return ["tensor", host_copy(value, where), value.device.type, value.requires_grad]
    if objects.is_array(value) and not value.dtype.hasobject:
        content = torch.tensor(bytearray(value.tobytes()), dtype=torch.uint8, device="cpu")
        return ["array", content, value.dtype.str, list(value.shape)]
    if kind in (list, tuple, set):
        return [kind.__name__, kind.__name__, [pack(item, f"{where}[{i}]") for i, item in enumerate(value)]]
    if kind is dict:
        return ["dict", "dict", [[pack(k, f"a key of {where}"), pack(v, f"{where}[{k!r}]")] for k, v in value.items()]]
    raise NotPlainError(f"{where} is a {kind.__name__}")


def unpack(packed: Packed, device: torch.device) -> Any:
    """Return the value that :func:`pack` packed; tensors that were not on the CPU go to ``device``."""
    return _put(None, packed, device, "")


def host_copy(tensor: Tensor, where: str) -> Tensor:
    """Return a plain copy in host memory.

    Raises:
        NotPlainError: the tensor is sparse, quantized, without values or of a class of its own.
    """
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout == torch.strided
    if not plain or tensor.is_quantized or tensor.is_meta or is_lazy(tensor):
        raise NotPlainError(f"{where} is a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}")
    # A new tensor, because a view would be saved with all of its base.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())


def pack_state(module: nn.Module) -> Packed:
    """Return the state that a :class:`~spectral_monitor.state.snapshot.Snapshot` without weights keeps of a module.

    Raises:
        NotPlainError: naming a value that plain types cannot express.
    """
    return _StatePacker().module(module, "the model")


@torch.no_grad()
def put_state(module: nn.Module, packed: Packed) -> None:
    """Give a module, built like the one that was packed, its state. Call it inside ``preserved(module)``.

    Raises:
        NotPlainError: the module lacks a part, or has something else in its place.
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    _put(module, packed, device, "the model")


class _StatePacker:
    """Packs each object once: it is restored in place, so all its owners see the restored state."""

    def __init__(self) -> None:
        self._packed: dict[int, object] = {}  # by id; holding the objects keeps the ids unique
        self._generators = objects.generator_types()

    def _is_new(self, value: object) -> bool:
        new = id(value) not in self._packed
        self._packed[id(value)] = value
        return new

    def module(self, module: nn.Module, where: str) -> Packed:
        """Pack the attributes and buffers of a module and its parts."""
        parts = []
        for name, part in module.named_modules():
            if self._is_new(part):
                path = f"{where}.{name}" if name else where
                attributes = {key: value for key, value in vars(part).items() if _is_users(key)}
                parts.append([name, self._items(attributes, path), self._items(part._buffers, path)])
        return ["module", parts]

    def _items(self, items: dict[str, Any], where: str) -> list[list[Any]]:
        return [[key, self.value(value, f"{where}.{key}")] for key, value in items.items()]

    def value(self, value: Any, where: str) -> Packed:
        """Pack the value of an attribute or of a container's item; ``_UNCHANGED`` if a replay does not rewind it."""
        kind = type(value)
        if kind in _SCALARS:
            return ["value", value]
        if isinstance(value, tuple):
            return ["tuple", kind.__name__, [self.value(item, f"{where}[{i}]") for i, item in enumerate(value)]]
        if isinstance(value, nn.Module):
            return self.module(value, where)
        if not self._is_new(value):
            return _UNCHANGED
        if isinstance(value, Tensor):
            return pack(value, where) if is_state(value, weights=False) else _UNCHANGED
        if isinstance(value, objects.CONTAINERS):
            return self._container(value, where)
        if issubclass(kind, self._generators):
            return ["generator", pack(objects.generator_state(value), where)]
        if objects.is_array(value):
            return pack(value, where)
        if objects.is_looked_into(kind) or objects.passed_on(value) or objects.is_data(value):
            return self._object(value, where)
        return _UNCHANGED

    def _object(self, value: Any, where: str) -> Packed:
        name = type(value).__name__
        if parts := objects.passed_on(value):
            return ["passed", name, [self.value(part, f"{where}[{i}]") for i, part in enumerate(parts)]]
        looked_into = objects.is_looked_into(type(value))
        return ["object", name, self._attributes(value, where) if looked_into else self._items(vars(value), where)]

    def _attributes(self, value: Any, where: str) -> list[list[Any]]:
        if not objects.is_looked_into(type(value)):
            return []
        items = objects.read(value)
        if objects.has_life(list(items.values())):
            items = {key: item for key, item in items.items() if isinstance(item, self._generators)}
        return self._items(items, where)

    def _container(self, container: Any, where: str) -> Packed:
        if isinstance(container, dict):
            kind = "dict"
            items = [[pack(k, f"a key of {where}"), self.value(v, f"{where}[{k!r}]")] for k, v in container.items()]
        else:
            kind = objects.base_of(container).__name__
            items = [self.value(item, f"{where}[{i}]") for i, item in enumerate(container)]
        attributes = self._attributes(container, where)
        return [kind, type(container).__name__, items, *([attributes] if attributes else [])]


def _put(live: Any, packed: Packed, device: torch.device, where: str) -> Any:
    """Return the packed value: the live one, changed in place, if it is of the same kind; else a new one."""
    kind, *content = packed
    if kind == "left":
        return live
    if kind == "value":
        return content[0]
    if kind == "tensor":
        return _put_tensor(live, content[0], content[1], content[2], device)
    if kind == "array":
        return _put_array(live, content[0], content[1], content[2])
    if kind == "module":
        return _put_module(live, content[0], device, where)
    if kind == "generator":
        if not isinstance(live, objects.generator_types()):
            raise NotPlainError(f"{where} is no longer a random generator")
        objects.set_generator_state(live, unpack(content[0], torch.device("cpu")))
        return live
    name, items, *attributes = content  # attributes: those of a container's own class
    same_class = type(live).__name__ == name
    if not same_class and (name not in _BUILTIN or name != kind):
        raise NotPlainError(f"{where} is a {type(live).__name__}, was a {name}")
    if kind == "object":
        if objects.is_looked_into(type(live)):
            _put_attributes(live, items, device, where)
        else:
            _put_items(vars(live), items, device, where)
        return live
    if kind == "passed":
        for i, (part, item) in enumerate(zip(objects.passed_on(live), items, strict=True)):
            _put(part, item, device, f"{where}[{i}]")
        return live
    if kind == "dict":
        live_items = live if same_class else {}
        keys = [unpack(key, device) for key, _ in items]
        values = [_put(live_items.get(k), v, device, f"{where}[{k!r}]") for k, (_, v) in zip(keys, items, strict=True)]
        contents = list(zip(keys, values, strict=True))
    else:
        live_values = list(live) if same_class and kind != "set" else []
        live_values += [None] * (len(items) - len(live_values))
        contents = [_put(live_values[i], item, device, f"{where}[{i}]") for i, item in enumerate(items)]
    if kind == "tuple":
        cls: Any = type(live) if same_class else tuple
        return cls(*contents) if hasattr(cls, "_fields") else cls(contents)
    container = live if same_class else _BUILTIN[name]()
    objects.refill(container, contents)
    if attributes:
        _put_attributes(container, attributes[0], device, where)
    return container


def _put_tensor(live: Any, stored: Tensor, device_type: str, requires_grad: bool, device: torch.device) -> Tensor:
    form = (stored.shape, stored.dtype, torch.strided)
    if isinstance(live, Tensor) and (live.shape, live.dtype, live.layout) == form:
        return live.copy_(stored)
    new = stored.to(torch.device("cpu") if device_type == "cpu" else device, copy=True)
    return new.requires_grad_(requires_grad)


def _put_array(live: Any, stored: Tensor, dtype: str, shape: list[int]) -> Any:
    numpy = sys.modules["numpy"]
    array = numpy.frombuffer(bytearray(stored.numpy().tobytes()), dtype=dtype).reshape(shape)
    if objects.is_array(live) and live.dtype == array.dtype and live.shape == array.shape and live.flags.writeable:
        live[...] = array
        return live
    return array


def _put_module(live: Any, parts: list[Any], device: torch.device, where: str) -> Any:
    modules = dict(live.named_modules()) if isinstance(live, nn.Module) else {}
    for name, stored, buffers in parts:
        if name not in modules:
            raise NotPlainError(f"{where} has no module {name!r}")
        path = f"{where}.{name}" if name else where
        part = modules[name]
        attributes = part.__dict__
        stored_keys = {key for key, _ in stored}
        if parameters := sorted(stored_keys & part._parameters.keys()):  # it was pruned then, but is not any more
            raise NotPlainError(f"{path}.{parameters[0]} is a parameter now")
        for key in [key for key in attributes if _is_users(key) and key not in stored_keys]:
            if _StatePacker().value(attributes[key], path) != _UNCHANGED:  # the packed module did not have it yet
                del attributes[key]
        _put_items(attributes, stored, device, path)
        _put_items(part._buffers, buffers, device, path)
    return live


def _is_users(key: str) -> bool:
    """Return whether an attribute of a module is the user's, and neither torch's nor FSDP2's."""
    return key not in TORCH_OWN and not key.startswith("__composable_api_state_key")


def _put_items(target: dict[str, Any], items: list[Any], device: torch.device, where: str) -> None:
    for key, packed in items:
        if packed != _UNCHANGED:
            target[key] = _put(target.get(key), packed, device, f"{where}.{key}")


def _put_attributes(live: Any, items: list[Any], device: torch.device, where: str) -> None:
    attributes = objects.read(live)
    for key, packed in items:
        if packed != _UNCHANGED:
            value = _put(attributes.get(key), packed, device, f"{where}.{key}")
            if key not in attributes or attributes[key] is not value:
                objects.write(live, key, value)


def fingerprint(tree: Any) -> str:
    """Return a hash of the contents of nested lists, dicts, numbers, strings and tensors."""
    digest = hashlib.sha256()
    _digest(tree, digest)
    return digest.hexdigest()


def _digest(tree: Any, digest: Any) -> None:
    if isinstance(tree, Tensor):
        digest.update(f"tensor {tree.dtype} {tuple(tree.shape)} {tree.requires_grad}".encode())
        if tree.numel():
            # A contiguous tensor of one entry may have any strides, and reshape() keeps them.
            flat = tree.detach().contiguous().as_strided((tree.numel(),), (1,))
            digest.update(flat.view(torch.uint8).numpy())
    elif isinstance(tree, dict):
        digest.update(f"dict {len(tree)}".encode())
        for key, value in tree.items():
            digest.update(f"{type(key).__name__} {key!r}".encode())
            _digest(value, digest)
    elif isinstance(tree, (list, tuple)):
        digest.update(f"list {len(tree)}".encode())
        for value in tree:
            _digest(value, digest)
    else:
        digest.update(f"{type(tree).__name__} {tree!r};".encode())
