"""The plots; each turns a scene into sentences that agree with it and with one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .scene import article, capital, friends, meeting, thanks
from .world import APPLAUSE, CRY_FOR_HELP, FEARS, FOODS, LIGHT, NEXT_DOOR, OBSTACLES, OFFERS, RECIPES, SEEDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from .scene import Scene


def lost(s: Scene) -> list[str]:
    """The hero loses the thing and finds it where the helper has seen it."""
    name, he, his, thing = s.hero.name, s.hero.pronouns.subject, s.hero.pronouns.possessive, s.thing
    wrong, also_wrong, right = s.rng.sample(s.place.spots, 3)
    return [
        s.pick(
            (
                f"{name} loved {his} {thing.full}.",
                f"More than anything, {name} loved {his} {thing.full}.",
                f"{name} had {article(thing.full)} and loved it very much.",
            )
        ),
        s.pick(
            (
                f"{s.season.morning}, the {thing.noun} was gone.",
                f"{s.season.morning}, {name} could not find the {thing.noun}.",
            )
        ),
        f"{capital(he)} looked {wrong}, but it was not there.",
        f"{capital(he)} looked {also_wrong}, but it was not there either.",
        meeting(s),
        s.pick((f'"Why are you so sad?" asked {s.helper.name}.', f'"What is wrong?" asked {s.helper.name}.')),
        f'"I have lost my {thing.full}," said {name}.',
        f'"I saw {article(thing.full)} {right}," said {s.helper.name}. "Come with me!"',
        s.pick(
            (
                f"They ran there together — and there it was, {right}!",
                f"And there, {right}, was the {thing.full}!",
            )
        ),
        thanks(s),
        friends(s),
    ]


def stuck(s: Scene) -> list[str]:
    """The thing gets stuck where only the helper can reach it."""
    name, he, thing = s.hero.name, s.hero.pronouns.subject, s.thing
    obstacle = OBSTACLES[s.helper.creature.ability]
    return [
        s.pick(
            (
                f"{s.season.morning}, {name} was playing with {article(thing.full)}.",
                f"{name} had {article(thing.full)}. {s.season.morning}, {he} was playing with it.",
            )
        ),
        f"Suddenly, {obstacle.happened.format(thing=thing.noun)}.",
        s.pick(
            (
                f'"Oh no! My {thing.noun}!" cried {name}.',
                f'"My {thing.full}!" cried {name}. "{CRY_FOR_HELP}"',
            )
        ),
        f"{capital(he)} {obstacle.failed}.",
        meeting(s),
        f'"My {thing.noun} is {obstacle.stuck}," said {name}.',
        f'"{OFFERS[s.helper.creature.ability]}," said {s.helper.name}. "{s.pick(("Let me help you", "Do not cry"))}."',
        f"{s.helper.name} {obstacle.rescue.format(thing=thing.noun)}.",
        thanks(s),
        s.pick((f"Then they played with the {thing.full} until the sun went down.", friends(s))),
    ]


def shared(s: Scene) -> list[str]:
    """The hero shares food with two hungry characters and receives the thing."""
    name, he, food = s.hero.name, s.hero.pronouns.subject, s.pick(FOODS)
    a, b = s.helper, s.third
    return [
        f"{s.season.morning}, {name} filled a basket with {food}.",
        f"On the way home, {he} met {article(a.trait)} {a.creature.noun} named {a.name}.",
        f'"I am so hungry," {s.pick(("said", "sighed"))} {a.name}. {name} gave {a.pronouns.object} some {food}.',
        f"A little later, {he} met {article(b.trait)} {b.creature.noun} named {b.name}.",
        f'"I am hungry too," said {b.name}. {name} gave {b.pronouns.object} the rest of the {food}.',
        f"Now the basket was empty, but {name} was not sad.",
        f"In the evening, there was a knock at the door. It was {a.name} and {b.name}!",
        f'"You were kind to us," they said, "so we brought you {article(s.thing.full)}."',
        s.pick(
            (
                f"{name} loved the {s.thing.noun}, and they all laughed together.",
                f"{name} kept the {s.thing.full} for ever.",
            )
        ),
    ]


def way_home(s: Scene) -> list[str]:
    """The hero gets lost in the weather of the season; the light or sound of the thing brings the helper."""
    name, he, thing = s.hero.name, s.hero.pronouns.subject, s.thing
    seen, noticed = (
        (", and it shone like a star", "saw the light")
        if thing.signal == LIGHT
        else (f" as loud as {he} could", "heard the sound")
    )
    return [
        f"{s.season.morning}, {name} went for a long walk and took {article(thing.full)} along.",
        f"Later that day, {s.season.trouble}, and {name} could not see the path.",
        s.pick((f'"I am lost," said {name}. "What can I do?"', f'"How will I get home?" whispered {name}.')),
        f"Then {name} remembered the {thing.full}.",
        f"{capital(he)} {thing.signal} the {thing.noun}{seen}.",
        f"{capital(article(s.helper.trait))} {s.helper.creature.noun} named {s.helper.name} {noticed} from far away "
        "and came at once.",
        s.pick(
            (
                f'"Follow me," said {s.helper.name}. "I know the way."',
                f'"Do not worry," said {s.helper.name}. "I will bring you home."',
            )
        ),
        "Step by step, they walked all the way home.",
        thanks(s),
        s.pick((f"Since then, {name} has never gone out without the {thing.full}.", friends(s))),
    ]


def afraid(s: Scene) -> list[str]:
    """The hero overcomes a fear with the help of the helper."""
    name, he, his, fear = s.hero.name, s.hero.pronouns.subject, s.hero.pronouns.possessive, s.pick(FEARS)
    return [
        f"{name} was afraid of only one thing: {fear.of}.",
        f"{s.season.morning}, {article(s.helper.trait)} {s.helper.creature.noun} named {s.helper.name} came to visit "
        f"and brought {article(s.thing.full)}.",
        f"They played with the {s.thing.noun} for a long time.",
        f"Then {fear.scene}. {name} began to shake.",
        f'"I am afraid of {fear.of}," said {name}.',
        f'"Stay close to me," said {s.helper.name}. "{fear.lesson}."',
        f"{name} took a deep breath and opened {his} eyes. Now {fear.wonder}!",
        f'"How beautiful!" {s.pick(("said", "whispered"))} {name}.',
        s.pick(
            (
                f"{capital(he)} was not afraid of {fear.of} any more.",
                f"Now {name} was as brave as {article(s.pick(('lion', 'tiger')))}.",
            )
        ),
    ]


def made(s: Scene) -> list[str]:
    """The hero makes something of three parts; the helper brings the missing one."""
    name, he, recipe = s.hero.name, s.hero.pronouns.subject, s.pick(RECIPES)
    first, second, missing = s.rng.sample(recipe.parts, 3)
    return [
        f"{s.season.morning}, {name} wanted to make {recipe.result}.",
        f'"I need {recipe.parts[0]}, {recipe.parts[1]} and {recipe.parts[2]}," said {name}.',
        f"{capital(he)} found {first} at home and {second} {s.pick(s.place.spots)}.",
        f"Only one thing was missing: {missing}.",
        meeting(s),
        f'"I have {missing}," said {s.helper.name}. "May I help you?"',
        f"So they worked side by side until {recipe.result} was ready.",
        f"{recipe.done}.",
        f"To say thank you, {name} gave {s.helper.name} {article(s.thing.full)}.",
        s.pick((f'"We did it!" said {name}.', f'"It is better with two," said {name}.')),
        friends(s),
    ]


def gift(s: Scene) -> list[str]:
    """The hero finds the thing and gives it to the helper, whose birthday it is."""
    name, he, friend, thing = s.hero.name, s.hero.pronouns.subject, s.helper, s.thing
    his, spot = s.hero.pronouns.possessive, s.pick(s.place.spots)
    return [
        f"{capital(his)} best friend was {friend.name}, {article(friend.trait)} {friend.creature.noun}.",
        f"{s.season.morning}, it was {friend.name}'s birthday, but {name} had no gift.",
        f"{name} looked everywhere. At last {he} saw something {spot}.",
        f"It was {article(thing.full)}!",
        s.pick(
            (
                f"{name} cleaned the {thing.noun} and tied a ribbon around it.",
                f"{name} put the {thing.noun} into a box and ran to {friend.name}.",
            )
        ),
        f'"Happy birthday, {friend.name}!" said {name}.',
        f"{friend.name} opened the gift and found the {thing.full}.",
        s.pick(
            (
                f'"I have always wanted {article(thing.noun)}!" said {friend.name}.',
                f'"This is the best gift of all!" said {friend.name}.',
            )
        ),
        f"{capital(friend.pronouns.subject)} danced for joy, and {name} danced too.",
    ]


def race(s: Scene) -> list[str]:
    """Hero and helper race for the thing; the helper falls, and the hero stops to help."""
    name, he, friend, thing = s.hero.name, s.hero.pronouns.subject, s.helper, s.thing
    start, goal = s.rng.sample(s.place.spots, 2)
    return [
        f"{s.season.morning}, there was a big race. The prize was {article(thing.full)}.",
        f"{name} ran against {friend.name}, {article(friend.trait)} {friend.creature.noun}.",
        f"The race began {start} and ended {goal}.",
        f"{name} was in front. But then {friend.name} fell and hurt {friend.pronouns.possessive} foot.",
        s.pick((f'"A friend is more than a prize," thought {name}.', f"{name} heard {friend.name} cry.")),
        f"{capital(he)} stopped, went back and helped {friend.pronouns.object} up.",
        f"Together, they walked to the end {goal}.",
        s.pick(
            (
                f"{APPLAUSE}, and both of them won the {thing.full}.",
                f"A fast goose won the {thing.full}, but {name} did not mind.",
            )
        ),
        friends(s),
    ]


def sleepless(s: Scene) -> list[str]:
    """The hero cannot sleep until the helper lends the thing."""
    name, he, his, helper = s.hero.name, s.hero.pronouns.subject, s.hero.pronouns.possessive, s.helper
    return [
        f"One {s.season.name} night, {name} could not sleep.",
        s.pick(
            (
                f"{capital(he)} counted to one hundred, but {he} was still awake.",
                f"{capital(he)} drank warm milk, but {he} was still awake.",
            )
        ),
        f"So {name} went to see {helper.name}, {article(helper.trait)} {helper.creature.noun} {NEXT_DOOR}.",
        f'"I cannot sleep," said {name}.',
        f'"Take my {s.thing.full}," said {helper.name}. '
        f'"{s.pick(("It always brings me good dreams", "It will keep you company"))}."',
        f"{name} put the {s.thing.noun} {s.pick(('next to', 'under'))} {his} pillow and closed {his} eyes.",
        f"Soon {he} was fast asleep and dreamed of {s.pick(('the sea', 'the moon', 'a big cake', 'a flying ship'))}.",
        f"In the morning, {name} gave the {s.thing.full} back and thanked {helper.name}.",
    ]


def planted(s: Scene) -> list[str]:
    """The hero plants a seed and learns to wait; the seasons pass in order."""
    name, he, his, helper = s.hero.name, s.hero.pronouns.subject, s.hero.pronouns.possessive, s.helper
    seed, grown = s.pick(SEEDS)
    spot = s.pick(s.place.spots)
    return [
        f"In spring, {name} found {article(seed)} seed under {his} {s.thing.full}.",
        f"{capital(he)} planted the seed {spot} and gave it water.",
        "The next day, nothing had grown.",
        f'"{s.pick(("It does not work", "I have done something wrong"))}," said {name}.',
        meeting(s),
        f'"Be patient," said {helper.name}. "{s.pick(("Good things take time", "Even the oak was small once"))}."',
        f"All summer, {name} gave the seed water, and {helper.name} pulled the weeds.",
        f"In autumn, {grown} stood {spot}!",
        f'"You were right, {helper.name}," said {name}. "It was worth the wait."',
        friends(s),
    ]


PLOTS: dict[str, Callable[[Scene], list[str]]] = {
    plot.__name__: plot for plot in (lost, stuck, shared, way_home, afraid, made, gift, race, sleepless, planted)
}
