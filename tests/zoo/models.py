"""The zoo: every architecture the monitor is tried on."""

from __future__ import annotations

from tests.zoo.case import Case
from tests.zoo.pretrained import PRETRAINED
from tests.zoo.written import WRITTEN

MODELS: dict[str, Case] = {case.name: case for case in (*PRETRAINED, *WRITTEN)}

FAST = (
    "BERT",
    "GPT-2",
    "T5",
    "ViT",
    "Wav2Vec2",
    "Mamba",
    "Mixtral",
    "convolutional, BatchNorm",
    "U-Net with time embedding",
    "GAN, spectral norm",
    "LSTM, tied",
)
"""One of each family, for the fast suite."""
