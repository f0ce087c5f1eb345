"""``attention_logit_max``, ``attention_entropy`` and ``attention_sink`` against attention that is written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from spectral_monitor import SpectralProbe
from tests.attention.families import COMMON, FAMILIES, HEADS, LENGTH, SIZE, TOKENS, WIDTH, Family, make
from tests.one_step import after_one_step

KEYS = ["attention_logit_max", "attention_entropy", "attention_entropy_lowest", "attention_sink"]


def measured(family, keys=KEYS, lr=0.05, **more):
    probe = after_one_step(family.model, family.loss, lr=lr, quantities=keys, **more)
    return probe.latest


def recorded(family):
    """The probabilities and logits of the first attention block: by the arguments of the kernel itself."""
    calls = []

    def kernel(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **more):
        turns = query.shape[-3] // key.shape[-3]  # x-transformers repeats them itself
        key, value = (x.repeat_interleave(turns, -3) for x in (key, value))
        logits = query.double() @ key.double().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        allowed = torch.ones(logits.shape[-2:], dtype=torch.bool)
        if is_causal:
            allowed = allowed.tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            allowed = allowed & attn_mask
        elif attn_mask is not None:
            allowed = allowed & (attn_mask > -1e4)
        calls.append((logits, allowed.expand_as(logits)))
        weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1).to(value)
        return weights @ value

    original = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = torch.nn.functional.scaled_dot_product_attention = kernel
    try:
        with torch.no_grad():
            family.loss()
    finally:
        functional.scaled_dot_product_attention = original
    return calls[0]


def naive(logits, allowed):
    """The four numbers, row by row; of the sampled rows of every sequence, in float64."""
    batch, heads, length, _ = logits.shape
    picked = [round(float(x)) for x in torch.linspace(0, batch - 1, min(4, batch))]
    count = min(length, 64 // len(picked))
    rows = [round(float(x)) for x in torch.linspace(0, length - 1, count)]
    largest, entropies, sinks = -math.inf, {h: [] for h in range(heads)}, []
    for b in picked:
        for h in range(heads):
            for r in rows:
                keys = allowed[b, h, r].nonzero().flatten().tolist()
                if not keys:
                    continue
                some = [float(logits[b, h, r, k]) for k in keys]
                largest = max(largest, *some)
                total = math.fsum(math.exp(x - max(some)) for x in some)
                p = [math.exp(x - max(some)) / total for x in some]
                sinks.append(p[keys.index(0)] if 0 in keys else 0.0)
                if len(keys) > 1:
                    entropies[h].append(-math.fsum(x * math.log(x) for x in p if x > 0) / math.log(len(keys)))
    means = [sum(some) / len(some) for some in entropies.values() if some]
    return [largest, sum(means) / len(means), min(means), sum(sinks) / len(sinks)]


ROTARY = {"x_transformers": {"rotary_pos_emb": True, "attn_flash": True}}


@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_are_those_of_attention_written_out(name):
    family = make(name, **ROTARY.get(name, {}))
    expected = naive(*recorded(family))
    found = measured(family)
    got = [found.value(key, family.layer) for key in KEYS]
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-6), found.why(KEYS[0], family.layer)


@pytest.mark.parametrize("name", ["gpt2", "llama", "neox", "bert"])
def test_eager_attention_gives_the_same(name):
    by_kernel = {}
    for kernel in ("sdpa", "eager"):
        family = make(name, attn_implementation=kernel)
        found = measured(family)
        by_kernel[kernel] = [found.value(key, family.layer) for key in KEYS]
    assert by_kernel["eager"] == pytest.approx(by_kernel["sdpa"], rel=1e-5)
    assert not any(map(math.isnan, by_kernel["eager"]))


def language(model):
    ids = torch.randint(TOKENS, (6, 40), generator=torch.Generator().manual_seed(4))
    model.train()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    mask[5, 30:] = 0
    return lambda: model(input_ids=ids, attention_mask=mask, labels=ids).loss


def hugging_face(kind, **more):
    """Longer sequences than are looked at, more of them, and padding at both ends."""
    import transformers as hf

    torch.manual_seed(1)
    if kind == "GPT2":
        drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0) | more
        own = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "vocab_size": TOKENS, "n_positions": 64}
        config = hf.GPT2Config(**own, **drops, bos_token_id=0, eos_token_id=0)
        model = hf.GPT2LMHeadModel(config)
        return Family(model, "transformer.h.0.attn.c_attn", None, language(model))
    config = getattr(hf, f"{kind}Config" if kind != "Gemma3" else "Gemma3TextConfig")(**COMMON, **more)
    model = getattr(hf, f"{kind}ForCausalLM")(config)
    return Family(model, "model.layers.0.self_attn.q_proj", None, language(model))


SHARED = {"num_key_value_heads": 2, "head_dim": SIZE}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("GPT2", {}),
        ("Llama", {"num_key_value_heads": 1}),
        ("Qwen3", SHARED),
        ("Olmo2", {}),
        ("Mistral", {"sliding_window": 7, **SHARED}),
        ("Gemma3", SHARED | {"query_pre_attn_scalar": 16}),
        ("Cohere", {"num_key_value_heads": 2}),
    ],
)
def test_padding_windows_norms_and_rotations_of_language_models(kind, more):
    family = hugging_face(kind, **more)
    expected = naive(*padded(recorded(family)))
    found = measured(family)
    got = [found.value(key, family.layer) for key in KEYS]
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-6), found.why(KEYS[0], family.layer)


def padded(pair):
    """Rows of padding that may look at nothing are given no keys."""
    logits, allowed = pair
    return logits, allowed.expand_as(logits).clone()


class Own(nn.Module):
    """A block of one's own, which says neither that it is causal nor that it does anything else."""

    def __init__(self, kind="causal", std=0.3, dropout=0.0):
        super().__init__()
        self.kind, self.n_head = kind, HEADS
        self.dropout = dropout
        if dropout:  # or else a wrong scale could hide behind what is dropped
            self.scale = SIZE**-0.5
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.c_attn.weight, std=std)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        length = x.shape[1]
        bias = torch.zeros(length, length, dtype=x.dtype)
        if self.kind == "causal":
            bias = bias.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        if self.kind == "alibi":
            bias = -0.3 * (torch.arange(length)[:, None] - torch.arange(length)).abs().float()
        if self.kind == "turned":
            angle = torch.arange(length, dtype=torch.float32)[:, None] / 3
            first, second = q.chunk(2, -1), k.chunk(2, -1)
            q = torch.cat([first[0] * angle.cos() - first[1] * angle.sin(), first[1] * angle.cos() + first[0] * angle.sin()], -1)  # fmt: skip  # noqa: E501
            k = torch.cat([second[0] * angle.cos() - second[1] * angle.sin(), second[1] * angle.cos() + second[0] * angle.sin()], -1)  # fmt: skip  # noqa: E501
        scale = 0.5 if self.kind == "scaled" else None
        mixed = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, scale=scale, dropout_p=self.dropout if self.training else 0.0
        )
        mixed = mixed * 2 if self.kind == "gated" else mixed
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


def own(kind, length=20, **more):
    torch.manual_seed(3)
    model = nn.Sequential(Own(kind, **more), nn.Linear(WIDTH, 4))
    x = torch.randn(6, length, WIDTH)
    return Family(model, "0.c_attn", None, lambda: model(x).square().mean())


@pytest.mark.parametrize("kind", ["causal", "full"])
def test_a_mask_that_nobody_states_is_found(kind):
    family = own(kind)
    expected = naive(*recorded(family))
    found = measured(family)
    assert [found.value(key, family.layer) for key in KEYS] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("std", [0.3, 0.02, 1e-3])
@pytest.mark.parametrize("kind", ["alibi", "turned", "scaled", "gated"])
def test_what_is_not_known_is_never_a_wrong_number(kind, std):
    family = own(kind, std=std)
    logits, allowed = recorded(family)
    found = measured(family)
    value = found.value("attention_logit_max", family.layer)
    if not math.isnan(value):
        assert abs(value - naive(logits, allowed)[0]) < 2e-3, "what cannot be told apart is next to nothing"
        assert std < 0.02
    else:
        assert "not known" in found.why("attention_logit_max", family.layer)
    assert math.isnan(value) or kind != "alibi"


@pytest.mark.parametrize("kind", ["causal", "full"])
def test_weights_that_are_dropped_do_not_hide_it(kind):
    family = own(kind, dropout=0.1, length=40)
    expected = naive(*recorded(family))
    found = measured(family)
    assert [found.value(key, family.layer) for key in KEYS] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["alibi", "gated"])
def test_nor_do_they_hide_what_is_not_known(kind):
    found = measured(own(kind, dropout=0.1, length=40))
    assert math.isnan(found.value("attention_logit_max", "0.c_attn"))


def test_gpt2_with_dropout():
    family = hugging_face("GPT2", attn_pdrop=0.1)
    expected = naive(*recorded(family))
    found = measured(family)
    assert [found.value(key, family.layer) for key in KEYS] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype):
    family = own("causal")
    expected = naive(*recorded(family))
    loss = family.loss
    if dtype == torch.float64:
        family.model.double()
        x = torch.randn(6, 20, WIDTH, dtype=dtype)
        family.loss = lambda: family.model(x).square().mean()
        expected = naive(*recorded(family))
    else:

        def halved():
            with torch.autocast("cpu", dtype):
                return loss()

        family.loss = halved
    found = measured(family)
    close = 1e-6 if dtype == torch.float64 else 3e-2
    assert [found.value(key, family.layer) for key in KEYS] == pytest.approx(expected, rel=close)


CALLS = {
    "boolean mask": lambda x, past: {"attn_mask": past},
    "numbers": lambda x, past: {"attn_mask": past.float().masked_fill(past, -torch.inf)},
    "a mask for each head": lambda x, past: {"attn_mask": past.expand(3 * HEADS, LENGTH, LENGTH)},
    "padding": lambda x, past: {"key_padding_mask": torch.arange(LENGTH) > torch.tensor([[4], [8], [20]])},
    "both": lambda x, past: {
        "attn_mask": past,
        "key_padding_mask": torch.arange(LENGTH) > torch.tensor([[4], [8], [20]]),
    },
    "weights": lambda x, past: {"need_weights": True},
}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_every_way_to_call_torchs_own(call, cross, dropout):
    torch.manual_seed(6)
    more = {"kdim": 20, "vdim": 24} if cross else {}
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dropout=dropout, **more)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    query, key = torch.randn(3, LENGTH, WIDTH), torch.randn(3, LENGTH, 20 if cross else WIDTH)
    value = torch.randn(3, LENGTH, 24) if cross else key
    kwargs = {"need_weights": False} | CALLS[call](query, torch.ones(LENGTH, LENGTH).triu(1).bool())
    given = (query, key, value) if cross else (query, query, query)
    loss = lambda: model(*given, **kwargs)[0].square().mean()  # noqa: E731
    with torch.no_grad():  # by hand
        parts = model.in_proj_weight.chunk(3) if not cross else (model.q_proj_weight, model.k_proj_weight)
        biases = model.in_proj_bias.chunk(3)
        q, k = (
            (x @ w.T + b).unflatten(-1, (HEADS, SIZE)).transpose(1, 2).double()
            for x, w, b in zip(given[:2], parts, biases, strict=False)
        )
        logits = q @ k.mT / math.sqrt(SIZE)
        allowed = torch.ones_like(logits, dtype=torch.bool)
        if "attn_mask" in kwargs:
            allowed &= ~torch.ones(LENGTH, LENGTH).triu(1).bool()
        if "key_padding_mask" in kwargs:
            allowed &= ~kwargs["key_padding_mask"][:, None, None]
    layer = "q_proj" if cross else "in_proj"
    found = measured(Family(model, layer, None, loss))
    assert [found.value(key, layer) for key in KEYS] == pytest.approx(naive(logits, allowed), rel=1e-5), found.why(
        KEYS[0], layer
    )


def apply_rope(x, cos, sin):
    """As beside Lit-GPT's attention."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class CausalSelfAttention(nn.Module):
    """Stands for Lit-GPT's: shared keys in one fused projection, half of each head rotated, a config for numbers.

    ``name``: ``qkv`` of now, one kind after the other; ``attn`` of before, heads together with the keys they share.
    """

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.config = type("Config", (), {"n_head": HEADS, "n_query_groups": 2, "head_size": SIZE})()
        setattr(self, name, nn.Linear(WIDTH, (HEADS + 4) * SIZE, bias=False))
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        qkv = getattr(self, self.name)(x)
        if self.name == "qkv":
            parts = qkv.split((HEADS * SIZE, 2 * SIZE, 2 * SIZE), -1)
            q, k, v = (part.unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in parts)
        else:
            q, k, v = qkv.unflatten(-1, (2, HEADS // 2 + 2, SIZE)).split((HEADS // 2, 1, 1), -2)
            q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))
        half = cos.shape[-1]
        q, k = (torch.cat([apply_rope(part[..., :half], cos, sin), part[..., half:]], -1) for part in (q, k))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class LitModel(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.attn, self.head = CausalSelfAttention(name), nn.Linear(WIDTH, 3)

    def forward(self, x):
        angle = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.3, 1.0, 0.3])
        return self.head(self.attn(x, angle.cos(), angle.sin()))


@pytest.mark.parametrize("name", ["qkv", "attn"])
def test_lit_gpts_way_to_lay_out_heads_and_to_rotate_them(name):
    torch.manual_seed(7)
    model = LitModel(name)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(3, 15, WIDTH)
    family = Family(model, f"attn.{name}", None, lambda: model(x).square().mean())
    expected = naive(*recorded(family))
    found = measured(family)
    assert [found.value(key, family.layer) for key in KEYS] == pytest.approx(expected, rel=1e-5), found.why(
        KEYS[0], family.layer
    )


class Switched(nn.Module):
    """Attention whose mask comes and goes."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.num_heads, self.head_dim, self.masked = 2, 8, False

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        return self.out(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.masked).transpose(1, 2).flatten(2)
        )


def test_a_mask_that_comes_and_goes_is_found_each_time():
    torch.manual_seed(0)
    model = Switched()
    with torch.no_grad():
        model.q_proj.weight.mul_(20)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    probe = SpectralProbe(model, optimizer, quantities=["attention_logit_max"], every_n_steps=1, mode="observe")
    for causal in (False, False, True, True, False, False):
        model.masked = causal
        x = torch.randn(4, 6, 16)
        with probe.step():
            model(x).square().mean().backward()
            optimizer.step()
        with torch.no_grad():  # the oracle: all logits written out, of those that may be looked at
            q, k = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (model.q_proj, model.k_proj))
            logits = q @ k.mT / 8**0.5
            largest = logits.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf) if causal else logits
        value = probe.latest.value("attention_logit_max", "q_proj")
        assert value == pytest.approx(float(largest.max()), rel=1e-3)
