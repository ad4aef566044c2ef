"""The scene of a story, and the sentences that several plots share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from .world import OPENINGS

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from .world import Character, Place, Season, Thing

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scene:
    """The facts that a story must not contradict; they are drawn before its first word is written."""

    rng: random.Random
    hero: Character
    helper: Character
    third: Character
    thing: Thing
    place: Place
    season: Season

    def pick(self, options: Sequence[T]) -> T:
        """Draws one of the options with equal chances."""
        return options[self.rng.randrange(len(options))]


def article(phrase: str) -> str:
    """Returns the phrase after `a` or `an`: `an old hat`, `a red kite`."""
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def capital(text: str) -> str:
    """Returns the text with its first letter in upper case."""
    return text[0].upper() + text[1:]


def opening(s: Scene) -> list[str]:
    """Introduces the hero and the place."""
    hero, place = s.hero, s.place
    words = {
        "character": f"{article(hero.trait)} {hero.creature.noun} named {hero.name}",
        "lived": f"{capital(hero.pronouns.subject)} lived in {place.home} {place.where}.",
        "name": hero.name,
        "noun": hero.creature.noun,
        "trait": article(hero.trait),
        "home": place.home,
        "where": place.where,
        "Where": capital(place.where),
    }
    return [sentence.format(**words) for sentence in s.pick(OPENINGS)]


def meeting(s: Scene) -> str:
    """Introduces the helper."""
    helper = f"{article(s.helper.trait)} {s.helper.creature.noun} named {s.helper.name}"
    return s.pick(
        (f"Just then, {helper} came by.", f"Soon {helper} came along the path.", f"Then {s.hero.name} met {helper}.")
    )


def thanks(s: Scene) -> str:
    """Returns a sentence in which the hero thanks the helper."""
    return s.pick(
        (
            f'"Thank you, {s.helper.name}!" said {s.hero.name}.',
            f'"Thank you so much, {s.helper.name}!" cried {s.hero.name} with a big smile.',
            f'{s.hero.name} hugged {s.helper.name} and said, "Thank you!"',
        )
    )


def friends(s: Scene) -> str:
    """Returns an ending in which the two become friends."""
    return s.pick(
        (
            f"From that day on, {s.hero.name} and {s.helper.name} were best friends.",
            f"After that, {s.hero.name} and {s.helper.name} met {s.place.where} every day.",
            f"That evening, {s.hero.name} and {s.helper.name} walked home together, happy and tired.",
        )
    )
