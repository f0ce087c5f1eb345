"""Models of images, sound and series: configurations so small that a step takes milliseconds."""

from __future__ import annotations

from tests.zoo.batches import CLASSES, captioned, images, maps, series, sound, spectrograms
from tests.zoo.case import Row
from tests.zoo.language import SEQ2SEQ, SPECIAL, TEXT

IMAGE = {"image_size": 32, "patch_size": 8, "num_labels": CLASSES}
VIT = {
    **IMAGE,
    "hidden_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
STAGES = {"hidden_sizes": [16, 72], "depths": [1, 1], "num_labels": CLASSES}
SPEECH = {
    **SPECIAL,
    "vocab_size": 32,
    "hidden_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 4],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 2,
    "mask_time_length": 2,
}


PICTURE, CTC = "AutoModelForImageClassification", "AutoModelForCTC"

FAMILIES: dict[str, list[Row]] = {
    "vision": [
        ("ViT", PICTURE, "vit", VIT, images),
        ("DeiT", "DeiTForImageClassification", "deit", VIT, images),
        ("BEiT", PICTURE, "beit", {**VIT, "use_relative_position_bias": True, "use_mask_token": True}, images),
        ("DINOv2", PICTURE, "dinov2", {**VIT, "mlp_ratio": 2, "drop_path_rate": 0.2}, images),
        (
            "Swin",
            PICTURE,
            "swin",
            {**IMAGE, "patch_size": 2, "embed_dim": 40, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4},
            images,
        ),
        ("ConvNeXt", PICTURE, "convnext", {**STAGES, "num_stages": 2, "drop_path_rate": 0.2}, images),
        ("ConvNeXt V2", PICTURE, "convnextv2", {**STAGES, "num_stages": 2, "drop_path_rate": 0.2}, images),
        ("ResNet", PICTURE, "resnet", {**STAGES, "embedding_size": 16, "layer_type": "basic"}, images),
        ("RegNet", PICTURE, "regnet", {**STAGES, "embedding_size": 16, "groups_width": 8}, images),
        (
            "EfficientNet",
            PICTURE,
            "efficientnet",
            {
                "image_size": 32,
                "width_coefficient": 0.25,
                "depth_coefficient": 0.2,
                "num_labels": CLASSES,
                "hidden_dim": 320,
            },
            images,
        ),
        (
            "MobileNetV2",
            PICTURE,
            "mobilenet_v2",
            {"image_size": 32, "depth_multiplier": 0.25, "num_labels": CLASSES},
            images,
        ),
        (
            "PoolFormer",
            PICTURE,
            "poolformer",
            {
                "hidden_sizes": [16, 72],
                "depths": [1, 1],
                "num_encoder_blocks": 2,
                "patch_sizes": [7, 3],
                "strides": [4, 2],
                "padding": [2, 1],
                "drop_path_rate": 0.2,
                "num_labels": CLASSES,
            },
            images,
        ),
        (
            "SegFormer",
            "AutoModelForSemanticSegmentation",
            "segformer",
            {
                "num_encoder_blocks": 2,
                "depths": [1, 1],
                "sr_ratios": [4, 2],
                "hidden_sizes": [16, 72],
                "patch_sizes": [7, 3],
                "strides": [4, 2],
                "num_attention_heads": [1, 2],
                "mlp_ratios": [2, 2],
                "decoder_hidden_size": 32,
                "num_labels": CLASSES,
            },
            maps,
        ),
        (
            "CLIP",
            "AutoModel",
            "clip",
            {"text_config": {**TEXT}, "vision_config": {**VIT}, "projection_dim": 72},
            captioned,
        ),
        ("SigLIP", "AutoModel", "siglip", {"text_config": {**TEXT}, "vision_config": {**VIT}}, captioned),
    ],
    "speech and series": [
        ("Wav2Vec2", CTC, "wav2vec2", {**SPEECH, "mask_time_prob": 0.2}, sound),
        ("HuBERT", CTC, "hubert", {**SPEECH, "mask_time_prob": 0.2}, sound),
        ("WavLM", CTC, "wavlm", {**SPEECH, "mask_time_prob": 0.2}, sound),
        ("SEW", CTC, "sew", {**SPEECH, "mask_time_prob": 0.2}, sound),
        (
            "Whisper",
            "AutoModelForSpeechSeq2Seq",
            "whisper",
            {**SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 16, "dropout": 0.1},
            spectrograms,
        ),
        (
            "PatchTST",
            "PatchTSTForPrediction",
            "patchtst",
            {
                "num_input_channels": 3,
                "context_length": 32,
                "prediction_length": 8,
                "patch_length": 4,
                "patch_stride": 4,
                "d_model": 72,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "ffn_dim": 96,
                "loss": "mse",
                "attention_dropout": 0.1,
            },
            series,
        ),
    ],
}
