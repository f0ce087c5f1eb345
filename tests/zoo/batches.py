"""Batches for the models of transformers, by kind."""

from __future__ import annotations

import torch
from torch import Generator

from tests.zoo.case import Batch

TOKENS, LENGTH, SAMPLES, CLASSES = 99, 12, 3, 5
END = 2
"""The last of the special tokens, which are left out of texts."""


def tokens(generator: Generator) -> Batch:
    ids = torch.randint(END + 1, TOKENS, (SAMPLES, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def padded(generator: Generator) -> Batch:
    batch = tokens(generator)
    mask = torch.ones(SAMPLES, LENGTH, dtype=torch.long)
    mask[0, -4:] = 0
    return {
        "input_ids": batch["input_ids"] * mask,
        "attention_mask": mask,
        "labels": batch["labels"].masked_fill(mask == 0, -100),
    }


def pairs(generator: Generator) -> Batch:
    source = torch.randint(END + 1, TOKENS, (SAMPLES, LENGTH), generator=generator)
    return {"input_ids": source, "labels": torch.randint(END + 1, TOKENS, (SAMPLES, LENGTH - 3), generator=generator)}


def images(generator: Generator, size: int = 32) -> Batch:
    pixels = torch.randn(SAMPLES, 3, size, size, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (SAMPLES,), generator=generator)}


def maps(generator: Generator) -> Batch:
    pixels = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (SAMPLES, 32, 32), generator=generator)}


def captioned(generator: Generator) -> Batch:
    ids = torch.randint(END + 1, TOKENS, (SAMPLES, LENGTH), generator=generator)
    ids[:, -1] = END
    pixels = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, "return_loss": True}


def sound(generator: Generator) -> Batch:
    return {
        "input_values": torch.randn(SAMPLES, 600, generator=generator),
        "labels": torch.randint(END + 1, 32, (SAMPLES, 4), generator=generator),
    }


def spectrograms(generator: Generator) -> Batch:
    return {
        "input_features": torch.randn(SAMPLES, 16, 40, generator=generator),
        "labels": torch.randint(END + 1, TOKENS, (SAMPLES, 6), generator=generator),
    }


def series(generator: Generator) -> Batch:
    return {
        "past_values": torch.randn(SAMPLES, 32, 3, generator=generator),
        "future_values": torch.randn(SAMPLES, 8, 3, generator=generator),
    }
