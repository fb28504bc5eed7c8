"""The forms in which checkpoints have routed experts: each matrix apart, or a layer's together.

Most families have a matrix for each expert and projection. Some, such as Qwen 3.5, have two arrays
for a layer, `gate_up_proj` [E 2·F D] and `down_proj` [E D F], in which transformers 5 holds those
of the others, too; tools that save its arrays as they are leave them in files. In published files
of Qwen3-VL-MoE these are transposed, [E D 2·F] and [E F D]; transformers takes and saves either.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax

from jaxrl_llm.models.arrays import ArrayDecl, Declarations, HfPart

APART = re.compile(r"(.*\.experts)\.\{experts\}\.\w+\.weight")
TOGETHER = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")


def experts_as_stored(
    declarations: Declarations, shapes: Mapping[str, tuple[int, ...]]
) -> Declarations:
    """Declare routed experts in that form which a checkpoint has.

    Args:
        declarations: Of a model.
        shapes: Of the checkpoint's arrays, by name.

    Returns:
        The declarations; arrays whose other form is not there either are as they were.
    """

    def stored(path: tuple[Any, ...], declaration: ArrayDecl) -> ArrayDecl:
        other = _other_form(jax.tree_util.keystr(path[-1:], simple=True), declaration)
        if other is None or shapes.get(_first(declaration)) == declaration.hf_shape:
            return declaration
        return other if shapes.get(_first(other)) == other.hf_shape else declaration

    return jax.tree_util.tree_map_with_path(stored, declarations)


def _first(declaration: ArrayDecl) -> str:
    return next(declaration.hf_indices())[0]


def _other_form(name: str, declaration: ArrayDecl) -> ArrayDecl | None:
    """Return the other form of an array of experts; None for other arrays, and other forms."""
    kind = name.removeprefix("expert_")
    if kind not in ("gate", "up", "down"):
        return None
    outputs = "expert_embed" if kind == "down" else "expert_ff"
    axes = declaration.hf_axes
    if apart := APART.fullmatch(declaration.hf_name):
        width = declaration.hf_shape[0]
        start = {"gate": 0, "up": width}
        return dataclasses.replace(
            declaration,
            hf_name=f"{apart[1]}.{'gate_up' if kind in start else 'down'}_proj",
            hf_axes=(("experts",), *axes),
            hf_part=HfPart((outputs,), start[kind], 2 * width) if kind in start else None,
        )
    together = TOGETHER.fullmatch(declaration.hf_name)
    if together is None:
        return None
    if axes[:2] != (("experts",), (outputs,)):
        turns = declaration.hf_part is not None and declaration.hf_part.step > 1
        is_bias = len(axes) < 3
        swapped = (("experts",), *reversed(axes[1:]))
        return None if turns or is_bias else dataclasses.replace(declaration, hf_axes=swapped)
    return dataclasses.replace(
        declaration,
        hf_name=f"{together[1]}.{{experts}}.{kind}_proj.weight",
        hf_axes=axes[1:],
        hf_part=None,
    )
