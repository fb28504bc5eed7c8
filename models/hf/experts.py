"""The two forms in which checkpoints have routed experts: each matrix apart, or a layer's together.

Most families have a matrix for each expert and projection. Some, such as Qwen 3.5, have two arrays
for a layer, `gate_up_proj` [E 2·F D] and `down_proj` [E D F], in which transformers 5 holds those
of the others, too; tools that save its arrays as they are leave them in files.
"""

import dataclasses
import re
from collections.abc import Container
from typing import Any

import jax

from jaxrl_llm.models.arrays import ArrayDecl, Declarations, HfPart

APART = re.compile(r"(.*\.experts)\.\{experts\}\.\w+\.weight")
TOGETHER = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")


def experts_as_stored(declarations: Declarations, names: Container[str]) -> Declarations:
    """Declare routed experts in that of the two forms which a checkpoint has.

    Args:
        declarations: Of a model.
        names: Of the checkpoint's arrays.

    Returns:
        The declarations; arrays whose other form is not there either are as they were.
    """

    def stored(path: tuple[Any, ...], declaration: ArrayDecl) -> ArrayDecl:
        other = _other_form(jax.tree_util.keystr(path[-1:], simple=True), declaration)
        if other is None or next(declaration.hf_indices())[0] in names:
            return declaration
        return other if next(other.hf_indices())[0] in names else declaration

    return jax.tree_util.tree_map_with_path(stored, declarations)


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
    if together is None or axes[:2] != (("experts",), (outputs,)):
        return None
    return dataclasses.replace(
        declaration,
        hf_name=f"{together[1]}.{{experts}}.{kind}_proj.weight",
        hf_axes=axes[1:],
        hf_part=None,
    )
