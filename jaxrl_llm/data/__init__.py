"""From files on disk to token ids, and from sequences to packed rows."""

from typing import TYPE_CHECKING

from jaxrl_llm.lazy import attach

if TYPE_CHECKING:
    from jaxrl_llm.data.chat import (
        ChatTemplate,
        encode_prompt,
        load_tokenizer,
        render_prompt,
        stop_ids,
    )
    from jaxrl_llm.data.dataset import Example, Prompt, batches, tokenize_examples, tokenize_prompts
    from jaxrl_llm.data.rows import read_rows, sft_rows, verl_rows, write_rows

attach(__name__)
