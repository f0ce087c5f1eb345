"""A GPT of twelve blocks and 75 matrices, small enough for a minute: the deep network of pictures and counts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, HEADS, VOCABULARY, CONTEXT = 64, 4, 256, 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(nn.functional.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h, self.ln_f = nn.ModuleList(Block() for _ in range(blocks)), nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class GPT(L.LightningModule):
    """Learns the bytes of this package's source; the layers of ``faulty`` have 100 times the others' learning rate."""

    def __init__(self, faulty: Sequence[str] = (), blocks: int = 12) -> None:
        super().__init__()
        self.transformer, self.lm_head = Transformer(blocks), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.faulty = list(faulty)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = batch
        logits = self.lm_head(self.transformer(tokens[:, :-1]))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        fast = [p for name in self.faulty for p in self.get_submodule(name).parameters()]
        others = [p for p in self.parameters() if all(p is not q for q in fast)]
        groups = [{"params": others}, *([{"params": fast, "lr": 0.1}] if fast else [])]
        return torch.optim.AdamW(groups, lr=1e-3)


def batches(steps: int) -> DataLoader[tuple[Tensor, ...]]:
    """Eight pieces of source a step."""
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[2].glob("spectral_monitor/*.py")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(len(tokens) - CONTEXT - 1, (8 * steps,), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(torch.stack([tokens[k : k + CONTEXT + 1] for k in starts.tolist()])), 8)
