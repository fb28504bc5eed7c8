import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import SftConfig, TrainConfig
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.parameters import parameter_count

VISION = Path(__file__).parents[2] / "configs/vision"


def test_the_warm_start_is_of_the_same_data_and_model():
    warm_start = load(SftConfig, VISION / "pictures_sft.yaml")
    config = load(TrainConfig, VISION / "pictures.yaml")
    assert config.data.prepare == warm_start.data.prepare
    assert config.model.path == warm_start.export_to
    assert (config.model.vision, warm_start.model.vision) == ("trained", "trained")


def test_the_small_model_is_one_of_transformers():
    tokenizer = AutoTokenizer.from_pretrained(VISION / "model")
    parts = [{"type": "image"}, {"type": "text", "text": "How many dots?"}, {"type": "video"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "3"}]
    written = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert written == (
        "<|user|><|vision_start|><|image_pad|><|vision_end|>How many dots?"
        "<|vision_start|><|video_pad|><|vision_end|><|end|><|assistant|>3<|end|><|assistant|>"
    )
    config = json.loads((VISION / "model/config.json").read_text())
    for name in ("image", "video"):
        pad = tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>")
        assert config[f"{name}_token_id"] == pad
    processor = AutoImageProcessor.from_pretrained(VISION / "model", backend="pil")
    image = Image.fromarray(np.zeros((32, 32, 3), np.uint8))
    assert processor(image, return_tensors="np")["image_grid_thw"].tolist() == [[1, 4, 4]]
    spec = read_spec(VISION / "model", vision=True)
    assert parameter_count(spec) == 423_040  # as transformers counts them


def test_the_large_model_has_its_published_size():
    plan = VISION.parent / "plan/Qwen3-VL-8B"
    assert parameter_count(read_spec(plan, vision=True)) == 8_767_123_696  # of transformers' model
    assert parameter_count(read_spec(plan)) / 1e9 == pytest.approx(8.19, rel=1e-3)
