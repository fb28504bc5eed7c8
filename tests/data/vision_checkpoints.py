"""Folders with the files of small checkpoints that read images, and a tokenizer for them."""

import json

QWEN = {f"{name}_token_id": f"<|{name}|>" for name in ("vision_start", "vision_end")}
QWEN |= {f"{name}_token_id": f"<|{name}_pad|>" for name in ("image", "video")}
GEMMA = {"image_token_index": "<image_soft_token>"}
GEMMA |= {"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"}
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073]}
CLIP |= {"image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
PAIRS = {"temporal_patch_size": 2, "merge_size": 2}
FAMILIES = {
    "qwen2_5_vl": {"patch_size": 14, "min_pixels": 3136, "max_pixels": 100_000, **PAIRS, **CLIP},
    "qwen3_vl": {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 200_000}},
    "qwen3_5": {"patch_size": 8, "size": {"shortest_edge": 256, "longest_edge": 40_000}},
    "gemma3": {"size": {"height": 896, "width": 896}, "resample": 2, **HALF},
}
FAMILIES["qwen3_vl"] |= PAIRS | HALF
FAMILIES["qwen3_5"] |= PAIRS | HALF
VIDEO = {"size": {"shortest_edge": 4096, "longest_edge": 250_000}}
"""Settings of videos, where a family has its own."""

QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif c.type == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
GEMMA_TEMPLATE = (
    "<bos>{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.content is string %}"
    "{{ m.content | trim }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}"
    "<start_of_image>{% else %}{{ c.text | trim }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def make_tokenizer(family):
    """Return a byte-level tokenizer whose line ends join, with a family's tokens and template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), (":", "<")]
    vocabulary = letters + ["".join(pair) for pair in merges]
    model = models.BPE(vocab={text: i for i, text in enumerate(vocabulary)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    is_gemma = family == "gemma3"
    marks = [*(GEMMA if is_gemma else QWEN).values()]
    marks += ["<bos>", "<start_of_turn>", "<end_of_turn>"] if is_gemma else []
    marks += ["<eos>"] if is_gemma else ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    if is_gemma:  # whose tokenizer begins with it, where it may
        begin = tokenizer.token_to_id("<bos>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", begin)]
        )
    extra = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>"}
    extra |= {"eoi_token": "<end_of_image>"}
    built = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>" if is_gemma else "<|im_end|>",
        extra_special_tokens=extra if is_gemma else {},
    )
    built.chat_template = GEMMA_TEMPLATE if is_gemma else QWEN_TEMPLATE
    return built


def write_checkpoint(folder, family, tokenizer):
    """Write the files from which a processor is read."""
    names = GEMMA if family == "gemma3" else QWEN
    ids = {name: tokenizer.convert_tokens_to_ids(text) for name, text in names.items()}
    config = {"model_type": family, "mm_tokens_per_image": 256, **ids}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(FAMILIES[family]))
    if family.startswith("qwen3"):
        (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEO))
    return folder
