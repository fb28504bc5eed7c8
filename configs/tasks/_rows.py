"""Rows of tasks in verl's schema, and of their teachers' turns."""

from collections.abc import Mapping, Sequence

from jaxrl_llm.data.rows import Row

Messages = list[dict[str, str]]


def chat_message(role: str, content: str) -> dict[str, str]:
    """Return a message of a chat."""
    return {"role": role, "content": content}


def task_row(task: str, prompt: str, answer: str, **more: str) -> Row:
    """Return a row of a task.

    Args:
        task: its name, the row's `data_source`.
        prompt: what the user says.
        answer: the reference answer.
        more: keys of `extra_info`.
    """
    return {
        "data_source": task,
        "prompt": [chat_message("user", prompt)],
        "ability": "agent",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": more,
    }


def turn_rows(chat: Sequence[Mapping[str, str]]) -> list[Row]:
    """Return a supervised row per turn of the assistant: what was before it is its prompt.

    >>> chat = [chat_message("user", "q1="), chat_message("assistant", "[f()]")]
    >>> chat += [chat_message("tool", "k"), chat_message("assistant", "k")]
    >>> [(len(row["prompt"]), row["response"]) for row in turn_rows(chat)]
    [(1, '[f()]'), (3, 'k')]
    """
    return [
        {"prompt": [dict(before) for before in chat[:place]], "response": message["content"]}
        for place, message in enumerate(chat)
        if message["role"] == "assistant"
    ]


def math_row(
    data_source: str, prompt: str, answer: str, split: str, index: int, **more: str
) -> Row:
    """Return a row of a problem with one right answer; `more` are keys of `extra_info`."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, **more},
    }
