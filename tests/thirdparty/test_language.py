"""Language models: heads that are registered first, and adapters on frozen ones."""

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional

from tests.thirdparty.running import run

VOCABULARY, WIDTH = 17, 8


class Block(nn.Module):
    """As in Lit-GPT: ``norm_1``, ``attn.attn``, ``attn.proj``, ``norm_2``, ``mlp.fc``, ``mlp.proj``."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.ModuleDict({"attn": nn.Linear(WIDTH, 3 * WIDTH), "proj": nn.Linear(WIDTH, WIDTH)})
        self.mlp = nn.ModuleDict({"fc": nn.Linear(WIDTH, 4 * WIDTH), "proj": nn.Linear(4 * WIDTH, WIDTH)})

    def forward(self, x):
        q, k, v = self.attn["attn"](self.norm_1(x)).chunk(3, -1)
        x = x + self.attn["proj"](functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp["proj"](functional.gelu(self.mlp["fc"](self.norm_2(x))))


class HeadFirst(nn.Module):
    """Stands for ``litgpt.model.GPT``: ``lm_head`` is registered before ``transformer``."""

    def __init__(self, head="lm_head"):
        super().__init__()
        self.head = head
        setattr(self, head, nn.Linear(WIDTH, VOCABULARY, bias=False))
        blocks = nn.ModuleList(Block() for _ in range(2))
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(VOCABULARY, WIDTH), "h": blocks, "ln_f": nn.LayerNorm(WIDTH)}
        )

    def forward(self, ids):
        x = self.transformer["wte"](ids)
        for block in self.transformer["h"]:
            x = block(x)
        return getattr(self, self.head)(self.transformer["ln_f"](x))


def tokens():
    ids = torch.randint(VOCABULARY, (4, 7))
    return ids[:, :-1], ids[:, 1:]


def entropy(logits, y):
    return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def test_a_head_registered_first_is_the_readout():
    model, (x, y) = HeadFirst(), tokens()
    ran = run(model, lambda: entropy(model(x), y))
    assert ran.guess == ran.readouts == {"lm_head"}
    assert (ran.bare, ran.unmeasured()) == ([], {})
    last = ran.measurements[0]
    assert last.summary["final_layer_alignment"] == last.value("alignment", "lm_head")


def test_a_head_of_another_name_is_found_by_the_first_step():
    model, (x, y) = HeadFirst("unembed"), tokens()
    ran = run(model, lambda: entropy(model(x), y))
    assert (ran.guess, ran.readouts) == ({"transformer.h.1.mlp.proj"}, {"unembed"})


@pytest.mark.parametrize("quantities", ["light", "standard"])
def test_adapters_leave_the_head_what_it_is(quantities):
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 8}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    x, y = tokens()
    ran = run(model, lambda: entropy(model(x).logits, y), quantities=quantities)
    assert {name.rpartition(".")[2] for name in ran.guess} == {"lm_head"}
    assert ran.readouts == ran.guess
    assert ran.bare == []
    if quantities == "standard":
        frozen = {layer.info.name for layer in ran.anatomy.layers if "frozen" in layer.note}
        missing = {(name, why) for (name, _), why in ran.unmeasured().items() if "rounding" not in why}
        # Below the first adapter nothing gets a gradient.
        assert all(name in frozen and "h.0." in name and "no gradient arrived" in why for name, why in missing)
