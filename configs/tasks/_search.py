"""Questions about people that a corpus of generated facts answers, for a model that can search."""

import functools
import json
import random
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm.configs.tasks._rows import Messages, chat_message, task_row
from jaxrl_llm.data.rows import Row
from jaxrl_llm.files import write_text

SYLLABLES = [consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiou"]
CORPUS = "corpus"
"""The folder of the passages, beside the rows."""


class Facts(NamedTuple):
    """Who lives where: the city of each person, and the land of each city."""

    cities: dict[str, str]
    lands: dict[str, str]


class Search(NamedTuple):
    """Find the city of a person, or its land, in a corpus that only a search tool can read.

    The prompts are `city of mira=` and `land of mira=`, with names of four letters. Passages are
    `city of mira: bolu` and `land of bolu: kana`, so that a land takes two searches. The second one
    must ask for `bolu land`: for `bolu` alone, people who live there are as good a match, and come
    first. The teacher guesses by some chance without a search; asked for a land, it may stop after
    the first search, and its second one may be too vague. Two of three questions ask for a land, so
    it is right with (1 - guess) · (1 + 2 · (1 - stop) · (1 - vague)) / 3, and seldom by a guess.

    Attributes:
        people: how many passages about people.
        cities: how many cities, each with its passage.
        lands: how many lands.
        guess: the chance to guess without a search.
        stop: the chance to take a city for its land.
        vague: the chance to search for the name of a city alone.
    """

    people: int = 4000
    cities: int = 400
    lands: int = 50
    guess: float = 0.3
    stop: float = 0.4
    vague: float = 0.5

    def row(self, number: int, rng: random.Random) -> Row:
        """Draw a person and what is asked."""
        facts = draw_facts(self.people, self.cities, self.lands)
        kind, person = rng.choice(("city", "land", "land")), rng.choice([*facts.cities])
        city = facts.cities[person]
        answer = city if kind == "city" else facts.lands[city]
        return task_row("search", f"{kind} of {person}=", answer)

    def chat(self, row: Row, rng: random.Random) -> Messages:
        """Guess, or search once or twice and answer."""
        facts = draw_facts(self.people, self.cities, self.lands)
        kind, _, person = row["prompt"][0]["content"][:-1].split()
        chat, city = list(row["prompt"]), facts.cities[person]
        guessed = rng.choice([*facts.lands] if kind == "city" else [*facts.lands.values()])

        def say(answer: str) -> Messages:
            return [*chat, chat_message("assistant", f"<answer>{answer}</answer>")]

        def search(query: str, passage: str) -> None:
            chat.append(chat_message("assistant", f"[search(query='{query}')]"))
            chat.append(chat_message("tool", passage))

        if rng.random() < self.guess:
            return say(guessed)
        search(person, f"city of {person}: {city}")
        if kind == "city" or rng.random() < self.stop:
            return say(city)
        if rng.random() < self.vague:
            first = next(name for name, lives_in in facts.cities.items() if lives_in == city)
            search(city, f"city of {first}: {city}")
            return say(guessed)
        search(f"{city} land", f"land of {city}: {facts.lands[city]}")
        return say(facts.lands[city])


@functools.cache
def draw_facts(people: int, cities: int, lands: int) -> Facts:
    """Draw who lives where; every city has people, and every land has cities.

    Raises:
        ValueError: there are too few names, or fewer people than cities, or cities than lands.
    """
    most = len(SYLLABLES) ** 2
    if not lands <= cities <= people <= most - cities - lands:
        raise ValueError(
            f"agent_task: search: expected lands <= cities <= people, and {most} together at most,"
            f" got people={people}, cities={cities}, lands={lands}"
        )
    rng = random.Random(f"facts {people} {cities} {lands}")
    names = rng.sample([a + b for a in SYLLABLES for b in SYLLABLES], people + cities + lands)
    of_people, of_cities = names[:people], names[people : people + cities]
    of_lands = names[people + cities :]

    def spread(inner: list[str], outer: list[str]) -> dict[str, str]:
        placed = [*outer, *rng.choices(outer, k=len(inner) - len(outer))]
        return dict(zip(inner, placed, strict=True))

    return Facts(spread(of_people, of_cities), spread(of_cities, of_lands))


def write_corpus(out: Path, task: Search) -> None:
    """Write the passages of a task into a folder beside its rows, for the tool `search`."""
    facts = draw_facts(task.people, task.cities, task.lands)
    texts = [f"city of {person}: {city}" for person, city in facts.cities.items()]
    texts += [f"land of {city}: {land}" for city, land in facts.lands.items()]
    lines = [
        json.dumps({"id": f"{number:05}", "contents": text}) for number, text in enumerate(texts)
    ]
    folder = out / CORPUS
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "facts.jsonl", "\n".join(lines) + "\n")
