"""Draws little stories and chats about them from a seed.

`python -m models.tiny.stories --seed 7 --count 3` prints some.
"""

from __future__ import annotations

import argparse
import random
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .plots import PLOTS
from .scene import Scene, article, capital, opening
from .world import (
    ANIMALS,
    COLOURS,
    HE,
    NAMES_HE,
    NAMES_SHE,
    OBSTACLES,
    PEOPLE,
    PLACES,
    SEASONS,
    SHE,
    THING_SIGNALS,
    TRAITS,
    Character,
    Creature,
    Thing,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .world import Pronouns

CHAT_SHARE = 0.35
PEOPLE_SHARE = 0.25
USUAL_SHARE = 0.35
TITLE_SHARE = 0.08
CURLY_SHARE = 0.12
EMOJI_SHARE = 0.12


@dataclass(frozen=True, slots=True)
class Story:
    """A story: its text, its plot and its scene."""

    text: str
    plot: str
    scene: Scene


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a user and the answer to it."""

    user: str
    assistant: str


Document = Story | tuple[Turn, ...]


def draw_character(rng: random.Random, creature: Creature, taken: tuple[str, ...] = ()) -> Character:
    """Draws a character of the given kind whose name is not taken."""
    pronouns = creature.pronouns or rng.choice((SHE, HE))
    names = [name for name in (NAMES_SHE if pronouns is SHE else NAMES_HE) if name not in taken]
    return Character(rng.choice(names), creature, pronouns, rng.choice(TRAITS))


def usual_companion(character: Character) -> tuple[str, Pronouns, Creature]:
    """Returns the name, pronouns and kind of the character that this one meets more often than others."""
    names = (*NAMES_SHE, *NAMES_HE)
    index = (names.index(character.name) + 11) % len(names)
    kinds = (*ANIMALS, *PEOPLE)
    kind = ANIMALS[(kinds.index(character.creature) + 7) % len(ANIMALS)]
    return names[index], SHE if index < len(NAMES_SHE) else HE, kind


def draw_companion(rng: random.Random, other: Character, kinds: list[Creature], taken: tuple[str, ...]) -> Character:
    """Draws a character of one of the kinds for `other` to meet.

    If all were equally likely, the slightly most likely one could be equal to `other`, and a greedy completion would
    tell of two characters that cannot be distinguished.
    """
    name, pronouns, kind = usual_companion(other)
    drawn = draw_character(rng, rng.choice(kinds), taken)
    if kind in kinds and rng.random() < USUAL_SHARE:
        drawn = replace(drawn, creature=kind)
    if name not in taken and rng.random() < USUAL_SHARE:
        drawn = replace(drawn, name=name, pronouns=pronouns)
    return drawn


def draw_scene(rng: random.Random, plot: str) -> Scene:
    """Draws a scene in which the plot is possible: for example, the helper can overcome the obstacle."""
    hero = draw_character(rng, rng.choice(PEOPLE if rng.random() < PEOPLE_SHARE else ANIMALS))
    others = [kind for kind in ANIMALS if kind != hero.creature]
    able = [kind for kind in others if kind.ability in OBSTACLES and kind.ability != hero.creature.ability]
    helper = draw_companion(rng, hero, able if plot == "stuck" else others, (hero.name,))
    rest = [kind for kind in others if kind != helper.creature]
    third = draw_companion(rng, helper, rest, (hero.name, helper.name))
    nouns = [noun for noun, signal in THING_SIGNALS.items() if signal or plot != "way_home"]
    noun = rng.choice(nouns)
    thing = Thing(rng.choice(COLOURS), noun, THING_SIGNALS[noun])
    return Scene(rng, hero, helper, third, thing, rng.choice(PLACES), rng.choice(SEASONS))


def curly(text: str) -> str:
    """Returns the text with typographic quotes and apostrophes."""
    return re.sub(r'"([^"]*)"', "“\\1”", text).replace("'", "\u2019")


def closing(rng: random.Random, scene: Scene) -> str:
    """Returns the last words after the plot's own ending; empty for some stories."""
    if rng.random() < EMOJI_SHARE:
        return f" The end. {scene.hero.creature.emoji}"
    return rng.choice((" The end.", ""))


def tell(rng: random.Random, titles: bool = True) -> Story:
    """Draws one story; `titles` allows some to begin with a line `The Fox and the Red Kite`."""
    plot = rng.choice(tuple(PLOTS))
    scene = draw_scene(rng, plot)
    text = " ".join([*opening(scene), *PLOTS[plot](scene)]) + closing(rng, scene)
    if titles and rng.random() < TITLE_SHARE:
        text = f"The {capital(scene.hero.creature.noun)} and the {scene.thing.full.title()}\n\n{text}"
    if rng.random() < CURLY_SHARE:
        text = curly(text)
    return Story(text, plot, scene)


def request(rng: random.Random, story: Story) -> str:
    """Draws a user's message that this story answers."""
    hero, thing = story.scene.hero, story.scene.thing
    kind = hero.creature.noun
    subject = rng.choice(
        (
            f"{article(kind)} and {article(thing.noun)}",
            f"{article(kind)} and {article(thing.full)}",
            f"{article(kind)}",
            f"{article(kind)} named {hero.name}",
            f"{hero.name} the {kind}",
            f"{article(kind)} who lives {story.scene.place.where}",
            f"{hero.name} and {story.scene.helper.name}",
        )
    )
    return rng.choice(
        (
            f"Tell me a story about {subject}.",
            f"Tell me a story about {subject}.",
            f"Please tell me a story about {subject}.",
            f"Can you tell me a story about {subject}?",
            f"Write a story about {subject}.",
            f"Write a short story about {subject}.",
            f"I would like a story about {subject}, please.",
        )
    )


SMALL_TALK = (
    Turn("Hello!", "Hello! I tell little stories. Who shall the story be about?"),
    Turn("Hi", "Hello! I tell little stories. Who shall the story be about?"),
    Turn("Who are you?", "I am a very small model. I know nothing but little stories."),
    Turn("What can you do?", "I can tell you a little story about an animal or a child."),
    Turn("Thank you!", "You are welcome! Shall I tell you one more?"),
)


def chat(rng: random.Random) -> tuple[Turn, ...]:
    """Draws a chat of one to three turns, most of which ask for stories."""
    turns = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.1:
            turns.append(rng.choice(SMALL_TALK))
            continue
        story = tell(rng, titles=False)
        bare = rng.random() < 0.1
        turns.append(Turn("Tell me a story." if bare else request(rng, story), story.text))
    return tuple(turns)


def documents(seed: int) -> Iterator[Document]:
    """Yields stories and chats without end; equal seeds give equal streams."""
    rng = random.Random(seed)
    while True:
        yield chat(rng) if rng.random() < CHAT_SHARE else tell(rng)


def texts(document: Document) -> list[str]:
    """Returns all texts of a document without the special tokens of a chat."""
    if isinstance(document, Story):
        return [document.text]
    return [text for turn in document for text in (turn.user, turn.assistant)]


def vocabulary(seed: int = 0, count: int = 4000) -> set[str]:
    """Returns the words of the grammar that occur in `count` documents."""
    stream = documents(seed)
    return {word for _ in range(count) for text in texts(next(stream)) for word in words(text)}


def words(text: str) -> list[str]:
    """Returns the words of a text: letters only, with their case."""
    return re.findall(r"[^\W\d_]+", text)


def main() -> None:
    """Prints stories."""
    parser = argparse.ArgumentParser(description="print little stories")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=3)
    arguments = parser.parse_args()
    stream = documents(arguments.seed)
    for _ in range(arguments.count):
        print("\n\n".join(texts(next(stream))), end="\n\n---\n\n")


if __name__ == "__main__":
    main()
