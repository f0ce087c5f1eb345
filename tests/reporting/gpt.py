"""A GPT of 75 matrices, made up of numbers: healthy, but for what a test changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from spectral_monitor import LayerInfo, Measurement, Verdict
from spectral_monitor.measurement import LayerState

ROOTS = ("model.transformer.h.7.mlp.c_fc", "model.transformer.h.3.attn.v_proj")
SENTENCE = "its learning rate is 0.1, that of the other layers is 0.001: use 0.001"
SIZES = {"attn.q_proj": (64, 64), "attn.k_proj": (64, 64), "attn.v_proj": (64, 64), "attn.out_proj": (64, 64)}
SIZES |= {"mlp.c_fc": (256, 64), "mlp.c_proj": (64, 256)}
KEYS = ("weight_natural", "update_natural", "update_ratio", "feature_change")


def layers() -> tuple[LayerInfo, ...]:
    """Two embeddings, twelve blocks of six matrices and a gain, and a readout."""
    found = [LayerInfo(f"model.transformer.{name}", "embedding", 64, 1, (256, 64)) for name in ("wte", "wpe")]
    for block in range(12):
        at = f"model.transformer.h.{block}"
        found += [LayerInfo(f"{at}.{name}", "operator", *size, size) for name, size in SIZES.items()]
        found.append(LayerInfo(f"{at}.ln_1", "vector", 1, 1, (64,)))
    return (*found, LayerInfo("model.lm_head", "readout", 256, 64, (256, 64)))


LAYERS = layers()
MATRICES = tuple(info.name for info in LAYERS if info.role != "vector")
FOLLOWERS = (*[name for name in MATRICES if name.endswith(("q_proj", "k_proj"))][:18], "model.lm_head")
"""Queries and keys of the first nine blocks, and the readout."""


def measured(
    step: int = 60,
    roots: Sequence[Verdict] = (),
    followers: Sequence[str] = (),
    not_judged: Mapping[str, str] | None = None,
) -> Measurement:
    """Return a measurement in which ``followers`` follow from the first root, one of them by ``consequences`` alone."""
    generator = torch.Generator().manual_seed(0)
    values = {key: torch.rand(len(LAYERS), generator=generator) * 0.1 + 0.05 for key in KEYS}
    states = dict.fromkeys(MATRICES, LayerState("healthy"))
    for root in roots:
        for name in root.layers:
            states[name] = LayerState("off", root.cause)
            values["update_natural"][[info.name for info in LAYERS].index(name)] = root.value
    states |= {name: LayerState("off", "disturbed") for name in followers}
    states |= {name: LayerState("not judged", reason) for name, reason in (not_judged or {}).items()}
    told = list(roots)
    for name in followers[:-1]:
        band = (0.0, 0.3)
        told.append(Verdict(name, "feature_change", 0.5, band, 5.0, 20, 3, "follows", "", (name,), root=roots[0].layer))
    bands = {"update_natural": torch.tensor([[0.1 / 8, 0.8, 0.1]] * len(LAYERS))}
    summary = {"violations": float(len(roots))}
    return Measurement(step, LAYERS, values, summary, tuple(told), bands=bands, states=states)


def root(layer: str = ROOTS[0], *mates: str, value: float = 9.0, consequences: Sequence[str] = ()) -> Verdict:
    """Return a root verdict on a layer, and others of the same cause."""
    band, names = (0.0125, 0.8), (layer, *mates)
    place = (value / 0.1, 45, 3, "lr_too_large", SENTENCE)
    return Verdict(layer, "update_natural", value, band, *place, names, consequences=tuple(consequences))


def of_network(cause: str = "diverged", sentence: str = "diverged at step 40: the loss is NaN") -> Verdict:
    """Return a verdict on the network as a whole."""
    return Verdict("network", "", math.nan, (0.0, math.inf), math.nan, 20, 2, cause, sentence)
