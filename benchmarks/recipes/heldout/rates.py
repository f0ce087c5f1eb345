"""Learning rates of single layers, multiplied, in the held-out recipes."""

from __future__ import annotations

from benchmarks.recipes.heldout.plants import rates
from benchmarks.recipes.recipe import Fault

SMALL = ("lr_too_small",)
LARGE = ("lr_too_large",)
HUGE = ("lr_too_large", "exploding")


def one_layer(recipe: str, layer: str, factor: float, causes: tuple[str, ...] = ()) -> Fault:
    """A single layer's learning rate, multiplied."""
    typical_causes = SMALL if factor < 1 else HUGE if factor >= 30 else LARGE
    rate = f"x{factor:g}" if factor > 1 else f"/{1 / factor:g}"
    plant = rates(factor, f"{layer}.*")
    return Fault(f"{recipe}: {layer} {rate}", recipe, "held out", plant, causes or typical_causes, (layer,), factor)


SINGLE = (
    one_layer("VGG, SGD", "features.10", 3),
    one_layer("GPT, AdamW", "h.1.c_fc", 3),
    one_layer("tanh MLP, NAdam", "layers.1", 3),
    one_layer("MLP-Mixer, AdamW", "blocks.2.channel_mix.0", 1 / 3),
    one_layer("wide ResNet, SGD one cycle", "fc", 10),
    one_layer("contrastive encoder, AdamW", "convs.0", 10),
    one_layer("dilated conv text, schedule-free", "mixes.2", 10),
    one_layer("LLaMA tied, AdamW", "layers.0.self_attn.v_proj", 10),
    one_layer("diffusion MLP, AdamW", "time.0", 10),
    one_layer("MobileNet, RMSprop", "blocks.1.project", 0.1),
    one_layer("DeiT, AdamW", "head", 0.1),
    one_layer("post-norm encoder, Adam", "layers.0.linear1", 0.1),
    one_layer("SELU MLP, SGD", "inner.3", 0.1),
    one_layer("variational autoencoder, Adam", "conv2", 0.1),
    one_layer("keyword spotting, Adam", "blocks.2.pointwise", 30),
    one_layer("nanoGPT tied, AdamW", "h.0.attn.qkv", 30),
    one_layer("tabular regression, Adam", "fc2", 30),
    one_layer("LSTM, SGD", "decoder", 30),
    one_layer("GroupNorm conv net, Adam", "convs.0", 1 / 30),
    one_layer("encoder-decoder, Adafactor", "encoder.1.wo", 1 / 30),
    one_layer("two towers, SparseAdam", "item_embedding", 1 / 30),
    one_layer("mixture of experts, AdamW", "blocks.0.attention.o_proj", 1 / 30),
    one_layer("ConvNeXt, Muon", "blocks.1.pwconv1", 100),
    one_layer("graph isomorphism net, Adam", "layers.1.0", 100),
    one_layer("distilled student, Adam", "fc1", 100, (*HUGE, "dead")),
    one_layer("deep Q-learning, Adam", "online.2", 100, (*HUGE, "dead")),
    one_layer("sparse autoencoder, Adam", "encoder", 0.01),
    one_layer("ViT, Lion", "blocks.1.fc2", 0.01),
    one_layer("VGG, SGD", "classifier.3", 0.01),
)
