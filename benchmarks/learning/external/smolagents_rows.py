"""The calculator's rows as smolagents' ToolCallingAgent asks them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.configs.tasks.agent_task import agent_task_splits
from jaxrl_llm.data.rows import Written, write_splits

SYSTEM = {"role": "system", "content": "Multiply."}
CALL = re.compile(r"\[calculator\(expression='(.*)'\)\]")


def smolagents_rows(out: str | Path, *, sft_episodes: int = 4000, seed: int = 0) -> Written:
    """Write calculator's rows, and its teacher's turns as smolagents has them.

    smolagents has an answer given by a call of `final_answer`, and tells the model its own calls
    and their results as plain text.

    Args:
        out: directory for train.parquet, validation.parquet and sft.parquet.
        sft_episodes: of the teacher.
        seed: of all draws.

    Returns:
        The files and their rows.
    """
    counts = {"train": 4096, "validation": 256}
    splits = agent_task_splits("calculator", {}, rows=counts, sft_episodes=sft_episodes, seed=seed)
    taught = [
        {
            "prompt": [SYSTEM, *as_told(row["prompt"], number)],
            "response": row["response"]
            if CALL.fullmatch(row["response"])
            else f"[final_answer(answer='{row['response']}')]",
        }
        for number, row in enumerate(splits["sft"])
    ]
    return write_splits(Path(out), splits | {"sft": taught})


def as_told(messages: Sequence[Mapping[str, Any]], number: int) -> list[dict[str, str]]:
    """Return a chat as smolagents tells it.

    Args:
        messages: a problem, or that with a call and its result.
        number: of the row, from which ids of calls are made.
    """
    told = list[dict[str, str]]()
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "assistant":
            call = CALL.fullmatch(content)
            assert call is not None, f"expected a call, got {content!r}"
            function = {"name": "calculator", "arguments": {"expression": call[1]}}
            identity = f"call_{number * 0x9E3779B97F4A7C15 % 2**96:024x}"
            calls = [{"id": identity, "type": "function", "function": function}]
            told.append({"role": "assistant", "content": f"Calling tools:\n{calls}"})
        else:
            what = "Observation" if role == "tool" else "New task"
            told.append({"role": "user", "content": f"{what}:\n{content}"})
    return told
