"""The families of models that we read from and write to Hugging Face directories, as one table.

A family says which keys of `config.json` give which fields of a spec, what transformers takes for
a key that is absent, and what all its models have in common. Reading and writing are the same for
all of them (`models.hf.family`).
"""

from jaxrl_llm.models.hf.families.deepseek import DEEPSEEK_V3
from jaxrl_llm.models.hf.families.gemma import GEMMA_FAMILIES
from jaxrl_llm.models.hf.families.glm import GLM4_MOE, GLM4_MOE_LITE
from jaxrl_llm.models.hf.families.gpt_oss import GPT_OSS
from jaxrl_llm.models.hf.families.llama import LLAMA, OLMO3, PHI3, SMOLLM3
from jaxrl_llm.models.hf.families.minimax import MINIMAX_M2
from jaxrl_llm.models.hf.families.mistral import MISTRAL, MIXTRAL
from jaxrl_llm.models.hf.families.qwen import (
    QWEN2,
    QWEN3,
    QWEN3_5_FAMILIES,
    QWEN3_MOE,
    QWEN_VL_FAMILIES,
)
from jaxrl_llm.models.hf.family import Family

FAMILIES: tuple[Family, ...] = (
    *(QWEN3, QWEN2, LLAMA, MISTRAL, *GEMMA_FAMILIES, QWEN3_MOE, MIXTRAL),
    *(DEEPSEEK_V3, GLM4_MOE_LITE, GLM4_MOE, MINIMAX_M2, PHI3, OLMO3, SMOLLM3, GPT_OSS),
    *(*QWEN3_5_FAMILIES, *QWEN_VL_FAMILIES),
)
"""A spec is written as the first of these that has such models."""
