"""`python -m jaxrl_llm.from_gguf FILE.gguf OUT`: a GGUF file as a Hugging Face directory."""

import argparse
import sys
from collections.abc import Sequence

from jaxrl_llm.config.help import complete_words


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.from_gguf",
        description="Write a GGUF file's model and tokenizer as a Hugging Face directory, which "
        "model.path can name.",
    )
    parser.add_argument("path", help="the GGUF file: of a Llama, Mistral, Qwen 2 or Qwen 3 model")
    parser.add_argument("directory", help="directory to write; it must not exist")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16", "float16"],
        help="of the saved arrays",
    )
    parser.add_argument(
        "--tokenizer",
        help="directory or repository whose tokenizer is taken; without it that of the file, which "
        "needs torch",
    )
    complete_words(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _arguments(arguments)
    from jaxrl_llm.models.hf.gguf import convert_gguf  # jax is slow to import

    try:
        convert_gguf(**vars(options))
    except (OSError, ValueError, ImportError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"wrote {options.path} to {options.directory}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
