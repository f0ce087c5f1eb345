"""Third-party models at the rates of their examples: no layer is named, from the first step on."""

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch.nn import functional

from tests.thirdparty.running import fit, run
from tests.thirdparty.test_language import VOCABULARY, WIDTH, HeadFirst, entropy, tokens
from tests.thirdparty.test_selfsupervised import Byol, LitAutoEncoder
from tests.thirdparty.vision import like_timm, pictures

STEPS = 33
SCHEDULE = "1, 2, 4, ..., every 100"


def verdicts(ran):
    """Every verdict of a run with its step."""
    return [(m.step, v.layer, v.cause, v.sentence) for m in ran.measurements for v in m.verdicts]


@pytest.mark.few(1)
@pytest.mark.parametrize("size", ["tiny", "small"])
def test_timms_vision_transformers(size):
    model = like_timm(size)
    x, y = pictures()
    ran = run(model, lambda: functional.cross_entropy(model(x), y), STEPS, every_n_steps=SCHEDULE)
    assert verdicts(ran) == []


def test_a_head_registered_first():
    model, (x, y) = HeadFirst(), tokens()
    ran = run(model, lambda: entropy(model(x), y), STEPS, every_n_steps=SCHEDULE)
    assert verdicts(ran) == []


def test_adapters():
    sizes = {"n_embd": 4 * WIDTH, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 8}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    x, y = tokens()
    ran = run(model, lambda: entropy(model(x).logits, y), STEPS, every_n_steps=SCHEDULE)
    assert verdicts(ran) == []


@pytest.mark.parametrize("layer", ["GCNConv", "GATConv"])
def test_graph_networks(layer):
    geometric = pytest.importorskip("torch_geometric.nn")
    from tests.thirdparty.test_graphs import CLASSES, FEATURES, NODES, Net

    model = Net(getattr(geometric, layer))
    x, y = torch.randn(NODES, FEATURES), torch.randint(CLASSES, (NODES,))
    edges = torch.randint(NODES, (2, 60))
    ran = run(model, lambda: functional.cross_entropy(model(x, edges), y), STEPS, lr=1e-2, every_n_steps=SCHEDULE)
    assert verdicts(ran) == []


@pytest.mark.slow
def test_a_frozen_target(tmp_path):
    views = torch.utils.data.TensorDataset(torch.randn(4 * STEPS, 3, 8, 8), torch.randn(4 * STEPS, 3, 8, 8))
    ran = fit(Byol(True), torch.utils.data.DataLoader(views, batch_size=4), tmp_path)
    assert verdicts(ran) == []
    states = ran.measurements[-1].states
    assert all((state.state, state.reason) == ("not judged", "frozen") for n, state in states.items() if "target" in n)
    assert all(state.state == "healthy" for name, state in states.items() if "target" not in name)


@pytest.mark.slow
def test_lightnings_autoencoder(tmp_path):
    images = torch.utils.data.TensorDataset(torch.rand(8 * STEPS, 1, 28, 28), torch.zeros(8 * STEPS))
    ran = fit(LitAutoEncoder(), torch.utils.data.DataLoader(images, batch_size=8), tmp_path)
    assert verdicts(ran) == []
