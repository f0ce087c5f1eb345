"""The development half: recipes on which rules may be found, and their faults."""

from __future__ import annotations

from benchmarks.recipes.development.faults import FAULTS
from benchmarks.recipes.development.generative import autoencoder, diffusion, vae
from benchmarks.recipes.development.language import gpt2, gpt_lion, gpt_muon, gpt_untied, llama, lstm
from benchmarks.recipes.development.science import actor_critic, audio, gcn, recommender
from benchmarks.recipes.development.tuning import frozen, layerwise, lora
from benchmarks.recipes.development.vision import (
    convnext,
    mlp_adam,
    mlp_sam,
    mlp_schedule_free,
    mlp_sgd,
    mlp_tanh,
    plain_conv,
    resnet,
    vit,
)
from benchmarks.recipes.recipe import Recipe

__all__ = ["FAULTS", "RECIPES"]

RECIPES: tuple[Recipe, ...] = (
    Recipe("MLP, Adam", mlp_adam, "development", "scikit-learn digits, PyTorch defaults"),
    Recipe("MLP, SGD", mlp_sgd, "development", "momentum 0.9, cosine"),
    Recipe("tanh MLP, SGD", mlp_tanh, "development", "Glorot and Bengio, 2010"),
    Recipe("MLP, SAM", mlp_sam, "development", "Foret et al., 2021: rho 0.05 around SGD"),
    Recipe("MLP, schedule-free AdamW", mlp_schedule_free, "development", "Defazio et al., 2024: lr 0.0025"),
    Recipe("plain CNN, SGD", plain_conv, "development", "AlexNet-like; momentum 0.9, wd 5e-4, cosine"),
    Recipe("ResNet, SGD nesterov", resnet, "development", "CIFAR ResNets: lr 0.1, wd 5e-4, not on norms"),
    Recipe("ConvNeXt, AdamW", convnext, "development", "Liu et al., 2022: lr 4e-3, wd 0.05, smoothing 0.1"),
    Recipe("ViT, AdamW", vit, "development", "DeiT and timm: lr 1e-3, wd 0.05, clip 1"),
    Recipe("GPT-2, AdamW", gpt2, "development", "nanoGPT: tied, std 0.02, betas (0.9, 0.95), wd 0.1, clip 1"),
    Recipe("GPT untied, AdamW", gpt_untied, "development", "PyTorch's initialization and defaults"),
    Recipe("LLaMA, AdamW", llama, "development", "Touvron et al., 2023: betas (0.9, 0.95), wd 0.1, clip 1"),
    Recipe("LSTM, SGD", lstm, "development", "PyTorch's word language model: lr 20, clip 0.25, dropout 0.2"),
    Recipe("GPT, Muon", gpt_muon, "development", "Jordan et al., 2024: Muon for hidden layers, AdamW for the rest"),
    Recipe("GPT, Lion", gpt_lion, "development", "Chen et al., 2023: betas (0.95, 0.98), wd 10 times AdamW's"),
    Recipe("GCN, Adam", gcn, "development", "Kipf and Welling, 2017: lr 1e-2, wd 5e-4, dropout 0.5"),
    Recipe("audio CNN, Adam", audio, "development", "PyTorch's M5 tutorial: lr 1e-2, wd 1e-4, steps by 0.1"),
    Recipe("DLRM, Adagrad", recommender, "development", "Naumov et al., 2019"),
    Recipe("autoencoder, Adam", autoencoder, "development", "lr 1e-3"),
    Recipe("VAE, Adam", vae, "development", "Kingma and Welling, 2014; PyTorch's example: lr 1e-3"),
    Recipe("diffusion, AdamW", diffusion, "development", "Ho et al., 2020: warm-up, clip 1, averaged weights"),
    Recipe("actor-critic, Adam", actor_critic, "development", "A2C: eps 1e-5, clip 0.5, orthogonal"),
    Recipe("LoRA, AdamW", lora, "development", "Hu et al., 2022: rank 8, alpha 16, no weight decay"),
    Recipe(
        "ViT, layer-wise rates",
        layerwise,
        "development",
        "BEiT and MAE: 0.75 per layer",
        deliberate="the first layers' rates are a quarter of the last's on purpose",
    ),
    Recipe(
        "frozen backbone, SGD",
        frozen,
        "development",
        "fine-tuning tutorials: head at ten times the rate",
        deliberate="the head's rate is ten times the backbone's on purpose",
    ),
)
