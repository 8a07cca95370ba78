"""The models of `test_oracle` that do not simply agree, each with its reason.

They are those of transformers 5.19 and 5.24; a version need not know all of them.
"""

from __future__ import annotations

__all__ = ["DIFFERENT", "REFUSED", "UNBUILT", "UNREAD"]

_SEQ2SEQ = "the decoder of an encoder-decoder model: each sequence also caches the encoder's output"
_ENCODER = "an encoder by default; with is_decoder it is read"
_CONVOLVED = "keys, values and feed-forward parts pass short convolutions, each with a state of its own"

REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        (
            "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "musicgen",
            "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "udop", "whisper",
        ),
        ("is_encoder_decoder", _SEQ2SEQ),
    ),
    **dict.fromkeys(
        (
            "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie",
            "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm",
            "xlm-roberta", "xlm-roberta-xl", "xmod",
        ),
        ("model_type", _ENCODER),
    ),
    **dict.fromkeys(
        ("inkling2_loop_text", "inkling2_text", "inkling_text", "zaya"), ("model_type", _CONVOLVED)
    ),
    "blt": ("model_type", "four models that run at different rates over bytes"),
    "cpmant": ("intermediate_size", "names its width dim_ff, and caches a prompt of its own"),
    "ctrl": ("intermediate_size", "names its width dff; nobody serves it"),
    "dbrx": ("attn_config", "its attention and experts are in nested objects"),
    "doge": ("keep_window_size", "drops tokens of the context by a learned mask"),
    "dory": ("model_type", "runs a block of layers several times, and caches each run"),
    "evolla": ("resampler_num_latents", "a protein encoder feeds cross-attention"),
    "gemma4_assistant": ("architectures", "a draft model that reads its target's K/V"),
    "gemma4_unified_assistant": ("architectures", "a draft model that reads its target's K/V"),
    "gpt_neo": ("attention_layers", "local layers, whose caches transformers does not cut"),
    "hrm_text": ("model_type", "two stacks of layers that run in nested loops"),
    "idefics": ("cross_layer_interval", "cross-attention to images between the layers"),
    "jetmoe": ("model_type", "each token chooses its attention heads"),
    "mllama": ("cross_attention_layers", "cross-attention layers cache the image, not the text"),
    "moshi": ("model_type", "a second decoder runs for each step of the first"),
    "mpt": ("attn_config", "its attention is in a nested object"),
    "muse_glimmer_assistant": ("architectures", "a draft model that reads its target's K/V"),
    "openai-gpt": ("intermediate_size", "has no field for its width; nobody serves it"),
    "pi0": ("num_hidden_layers", "a robot's policy around a language model"),
    "recurrent_gemma": ("block_types", "RG-LRU layers"),
    "reformer": ("model_type", "hashed attention"),
    "rwkv": ("model_type", "recurrent WKV states"),
    "trocr": ("num_hidden_layers", "reads images, and names its layers decoder_layers"),
    "xlnet": ("model_type", "two attention streams"),
    "xlstm": ("model_type", "matrix memories with normalisers"),
}  # fmt: skip

DIFFERENT: dict[str, str] = {}
"""Models that are read otherwise than their classes cache them."""

UNREAD: dict[str, str] = {
    "gemma3n_text": "its classes look at values while they run: the meta device has none",
    "glm4v_text": "the default widths of its rotary sections do not fit its heads",
    "glm5_next_text": "its indexer picks tokens by value: the meta device has none",
    "hunyuan_vl_text": "its default config lacks the rotary sections that its classes need",
    "longcat_flash": "its experts look at values while they run: the meta device has none",
    "qwen4_exp_text": "its indexer picks tokens by value: the meta device has none",
}
"""Models whose classes cannot run on the meta device: only their parameters are compared."""

UNBUILT: dict[str, str] = {
    "chameleon": "the default config has no vocabulary map",
    "cohere_compass_text": "the default config lacks the rotary settings of its own layers",
    "gemma4_assistant": "its default config is refused by its own class in 5.24",
    "musicgen": "its default config is refused by its own class in 5.19",
    "musicgen_melody": "its default config is refused by its own class in 5.19",
}
"""Models that cannot be built from any default config."""
