"""The world of the little stories: characters, things, places, seasons, obstacles, and fixed phrases."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pronouns:
    """The forms of one pronoun: `she` walks, we see `her`, it is `her` hat."""

    subject: str
    object: str
    possessive: str


SHE = Pronouns("she", "her", "her")
HE = Pronouns("he", "him", "his")


@dataclass(frozen=True, slots=True)
class Creature:
    """A kind of character; `ability` names the obstacle that it can overcome, "" for none.

    `pronouns` is None for a kind that can be either.
    """

    noun: str
    ability: str
    emoji: str
    pronouns: Pronouns | None = None


ANIMALS = (
    Creature("fox", "", "🦊"),
    Creature("hedgehog", "", "🦔"),
    Creature("deer", "", "🦌"),
    Creature("wolf", "", "🐺"),
    Creature("rabbit", "dig", "🐰"),
    Creature("dog", "dig", "🐶"),
    Creature("squirrel", "climb", "🐿"),
    Creature("cat", "climb", "🐱"),
    Creature("owl", "fly", "🦉"),
    Creature("dragon", "fly", "🐉"),
    Creature("otter", "swim", "🦦"),
    Creature("duck", "swim", "🦆"),
    Creature("frog", "swim", "🐸"),
    Creature("bear", "lift", "🐻"),
    Creature("horse", "lift", "🐴"),
    Creature("elephant", "lift", "🐘"),
    Creature("mouse", "squeeze", "🐭"),
    Creature("lizard", "squeeze", "🦎"),
)
PEOPLE = (
    Creature("girl", "", "👧", SHE),
    Creature("boy", "", "👦", HE),
    Creature("princess", "", "👸", SHE),
    Creature("prince", "", "🤴", HE),
    Creature("knight", "", "🛡"),
    Creature("robot", "", "🤖"),
)

# No name begins with a character outside ASCII: such names share the token of their first byte, and the sum of
# their chances would make one of them the likeliest name of all.
NAMES_SHE = (
    *("Lily", "Mia", "Nora", "Ruby", "Anna", "Ella", "Luna", "Alice"),
    *("Clara", "Emma", "Hazel", "Ivy", "Zoë", "Chloé", "Inés", "Märta"),
)
NAMES_HE = (
    *("Tom", "Ben", "Max", "Oscar", "Leo", "Finn", "Sam", "Hugo"),
    *("Felix", "Henry", "Jack", "Noah", "Björn", "André", "Søren", "Jürgen"),
)


@dataclass(frozen=True, slots=True)
class Character:
    """A character in a story; `trait` is an adjective."""

    name: str
    creature: Creature
    pronouns: Pronouns
    trait: str


TRAITS = (
    *("kind", "brave", "clever", "gentle", "curious", "cheerful"),
    *("shy", "patient", "quiet", "friendly", "wise", "playful"),
)


@dataclass(frozen=True, slots=True)
class Thing:
    """Something to own; `signal` is the verb for calling help with it, "" if that is impossible."""

    colour: str
    noun: str
    signal: str = ""

    @property
    def full(self) -> str:
        """The noun with its adjective, without an article: `red kite`."""
        return f"{self.colour} {self.noun}"


COLOURS = ("red", "blue", "green", "yellow", "silver", "golden", "old", "tiny")
LIGHT = "held up"
# noun -> signal
THING_SIGNALS = {
    "lantern": LIGHT,
    "torch": LIGHT,
    "bell": "rang",
    "drum": "beat",
    "flute": "played",
    "trumpet": "blew",
    "kite": "",
    "ball": "",
    "hat": "",
    "scarf": "",
    "key": "",
    "boat": "",
    "book": "",
    "ring": "",
    "umbrella": "",
    "mirror": "",
    "map": "",
    "crown": "",
    "feather": "",
    "shell": "",
}


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a story; its phrases include their prepositions."""

    noun: str
    where: str
    home: str
    spots: tuple[str, str, str]


PLACES = (
    Place(
        "forest",
        "in the forest",
        "a cosy den",
        ("under the old oak", "behind the mossy stone", "next to the ferns"),
    ),
    Place(
        "meadow",
        "in the meadow",
        "a little hut",
        ("in the tall grass", "among the daisies", "beside the fence"),
    ),
    Place("village", "in the village", "a small house", ("by the well", "behind the bakery", "under the bridge")),
    Place(
        "mountain",
        "on the mountain",
        "a warm cave",
        ("on the high rock", "near the waterfall", "under the pine"),
    ),
    Place("lake", "by the lake", "a wooden cabin", ("among the reeds", "on the sandy shore", "under the willow")),
    Place(
        "garden",
        "in the garden",
        "a snug shed",
        ("behind the roses", "under the apple tree", "near the gate"),
    ),
    Place(
        "island",
        "on the island",
        "a straw hut",
        ("under the palm tree", "in the cove", "beside the lighthouse"),
    ),
    Place("castle", "in the castle", "a high tower", ("in the great hall", "behind the throne", "near the moat")),
    Place(
        "beach",
        "on the beach",
        "a blue cottage",
        ("between two rocks", "next to the pier", "behind the dune"),
    ),
    Place(
        "hill",
        "on the hill",
        "a round burrow",
        ("beside the old mill", "under the hedge", "on the stone wall"),
    ),
)


@dataclass(frozen=True, slots=True)
class Season:
    """A time of year with its weather; `trouble` hides the way home."""

    name: str
    morning: str
    trouble: str


SEASONS = (
    Season("spring", "One bright spring morning", "heavy rain began to fall"),
    Season("summer", "One warm summer day", "the sun went down and it grew dark"),
    Season("autumn", "One windy autumn day", "a thick fog came up"),
    Season("winter", "One cold winter morning", "the snow began to fall fast"),
)


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The phrases for how a thing gets stuck, why its owner cannot reach it, and how the helper gets it back."""

    happened: str
    stuck: str
    failed: str
    rescue: str


# ability -> the obstacles it overcomes. {thing} is the thing, {helper} the helper's name.
OBSTACLES: dict[str, Obstacle] = {
    "climb": Obstacle(
        "a strong wind blew the {thing} up into a tall tree",
        "at the top of a tall tree",
        "jumped and jumped, but the branch was too high",
        "climbed the tree, branch by branch, and brought the {thing} down",
    ),
    "fly": Obstacle(
        "a strong wind blew the {thing} onto a high roof",
        "on a high roof",
        "looked for a ladder, but there was none",
        "flew up to the roof and brought the {thing} down",
    ),
    "swim": Obstacle(
        "the {thing} rolled into the deep pond",
        "at the bottom of the deep pond",
        "tried with a long stick, but the water was too deep",
        "dived into the pond and came up with the {thing}",
    ),
    "dig": Obstacle(
        "a pile of earth slid down and buried the {thing}",
        "under a pile of earth",
        "scratched at the earth, but it was too hard",
        "dug and dug until the {thing} came out of the earth",
    ),
    "lift": Obstacle(
        "a heavy log rolled over the {thing}",
        "under a heavy log",
        "pushed and pushed, but the log was too heavy",
        "lifted the log with one push, and the {thing} was free",
    ),
    "squeeze": Obstacle(
        "the {thing} fell through a narrow crack in the wall",
        "behind a crack in the wall",
        "reached into the crack, but it was too narrow",
        "slipped through the crack and pushed the {thing} out",
    ),
}

# ability -> what a helper with it says
OFFERS = {
    "climb": "I can climb very well",
    "fly": "I can fly very high",
    "swim": "I can swim very well",
    "dig": "I can dig very fast",
    "lift": "I am very strong",
    "squeeze": "I am very small",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Something to make of three parts, and the sentence about the result."""

    result: str
    parts: tuple[str, str, str]
    done: str


RECIPES = (
    Recipe("a pot of soup", ("a carrot", "an onion", "a pinch of salt"), "The soup was hot and tasted wonderful"),
    Recipe("an apple pie", ("three apples", "some flour", "a spoon of honey"), "The pie smelled sweet and warm"),
    Recipe("a small raft", ("four logs", "a long rope", "a white sail"), "The raft floated like a leaf"),
    Recipe("a cake", ("two eggs", "some butter", "a cup of sugar"), "The cake was soft and sweet"),
    Recipe("a jug of lemonade", ("five lemons", "cold water", "some ice"), "The lemonade was fresh and cool"),
    Recipe("a swing", ("a flat board", "two ropes", "a strong branch"), "The swing went high into the air"),
    Recipe(
        "a birdhouse",
        ("some planks", "a few nails", "a tin of paint"),
        "The birdhouse looked neat and bright",
    ),
)


@dataclass(frozen=True, slots=True)
class Fear:
    """The phrases for a fear, for how a friend shows that it is harmless, and for what is seen in the end."""

    of: str
    scene: str
    lesson: str
    wonder: str


FEARS = (
    Fear(
        "the dark",
        "the candle went out",
        "The dark is only the night's blanket",
        "a thousand stars shone above them",
    ),
    Fear(
        "thunder",
        "thunder rolled over the roof",
        "Thunder is only the clouds clapping",
        "a rainbow stood in the sky",
    ),
    Fear(
        "deep water",
        "they came to the deep stream",
        "Water carries those who stay calm",
        "tiny fish danced around them",
    ),
    Fear(
        "high places",
        "they came to the high bridge",
        "Look ahead, and take one step at a time",
        "the whole valley lay before them",
    ),
)

FOODS = ("berries", "nuts", "apples", "buns", "pears", "cookies")
SEEDS = (
    ("sunflower", "a tall sunflower"),
    ("apple", "a little apple tree"),
    ("pumpkin", "a big round pumpkin"),
    ("tomato", "a plant full of tomatoes"),
)

# {character} is the hero with trait, kind and name; {lived} is a sentence about the home.
OPENINGS = (
    ("Once upon a time, there was {character}.", "{lived}"),
    ("Once upon a time, {where}, there lived {character}.",),
    ("Once upon a time there was {character} who lived {where}.",),
    ("There once was {character}.", "{lived}"),
    ("A little {noun} named {name} lived {where}.",),
    ("This is the story of {name}, {trait} {noun}.", "{lived}"),
    ("Long ago, {character} lived {where}.",),
    ("{name} was {trait} {noun} who lived {where}.",),
    ("{name} the {noun} lived in {home} {where}.",),
    ("{Where}, in {home}, lived {character}.",),
)
CRY_FOR_HELP = "Who can help me?"
APPLAUSE = "Everybody clapped"
NEXT_DOOR = "who lived next door"
