"""The measurements under the Hugging Face Trainer.

    python examples/hf_trainer.py
    torchrun --nproc-per-node 2 examples/hf_trainer.py

A small GPT-2, made from its configuration, learns the characters of this project's LICENSE. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from spectral_monitor.integrations.hf import SpectralCallback

CONTEXT = 64


class Characters(Dataset[dict[str, Tensor]]):
    """Windows of a text, one character after the other."""

    def __init__(self, text: str) -> None:
        self.vocabulary = sorted(set(text))
        self.codes = torch.tensor([self.vocabulary.index(character) for character in text])

    def __len__(self) -> int:
        return len(self.codes) - CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.codes[index : index + CONTEXT]
        return {"input_ids": window, "labels": window}  # the model shifts the labels itself


def train(steps: int, width: int, *callbacks: TrainerCallback, **arguments: Any) -> Trainer:
    """Train on LICENSE, two micro-batches per step."""
    data = Characters(Path(__file__).parents[1].joinpath("LICENSE").read_text())
    set_seed(0)
    config = GPT2Config(
        vocab_size=len(data.vocabulary),
        n_positions=CONTEXT,
        n_embd=width,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            **{
                "output_dir": folder,
                "max_steps": steps,
                "per_device_train_batch_size": 8,
                "gradient_accumulation_steps": 2,
                "learning_rate": 1e-3,
                "report_to": "none",
                "save_strategy": "no",
                "logging_steps": max(1, steps // 4),
                "disable_tqdm": True,
                "dataloader_pin_memory": False,
                **arguments,
            }
        )
        trainer = Trainer(GPT2LMHeadModel(config), settings, train_dataset=data, callbacks=list(callbacks))
        trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--every", type=int, default=10, help="measure every n-th optimizer step")
    args = parser.parse_args()
    train(args.steps, args.width, SpectralCallback(every_n_steps=args.every))


if __name__ == "__main__":
    main()
