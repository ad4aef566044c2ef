"""The story grammar: equal seeds give equal stories, and no story contradicts itself."""

from __future__ import annotations

import random
import re
from itertools import islice

import pytest

from models.tiny.plots import PLOTS
from models.tiny.stories import Story, curly, documents, request, tell, texts, vocabulary, words
from models.tiny.world import HE, LIGHT, NAMES_HE, NAMES_SHE, OBSTACLES, OFFERS, SHE, THING_SIGNALS

NUM_STORIES = 1500


@pytest.fixture(scope="module")
def stories() -> list[Story]:
    rng = random.Random(11)
    return [tell(rng) for _ in range(NUM_STORIES)]


def test_equal_seeds_give_equal_documents() -> None:
    first = [texts(document) for document in islice(documents(5), 200)]
    again = [texts(document) for document in islice(documents(5), 200)]
    other = [texts(document) for document in islice(documents(6), 200)]
    assert first == again
    assert first != other


def test_stories_differ_and_every_plot_is_told(stories: list[Story]) -> None:
    assert len({story.text for story in stories}) == NUM_STORIES
    assert {story.plot for story in stories} == set(PLOTS)


def test_only_characters_of_the_scene_are_named(stories: list[Story]) -> None:
    for story in stories:
        scene = story.scene
        cast = {scene.hero.name, scene.helper.name, scene.third.name}
        named = set(words(story.text)) & {*NAMES_SHE, *NAMES_HE}
        assert scene.hero.name in named
        assert named <= cast
        assert len(cast) == 3


def test_only_the_thing_of_the_scene_is_named(stories: list[Story]) -> None:
    for story in stories:
        named = set(words(story.text.lower())) & set(THING_SIGNALS)
        assert named == {story.scene.thing.noun}


def test_pronouns_match_the_characters(stories: list[Story]) -> None:
    for story in stories:
        scene = story.scene
        people = [scene.hero, scene.helper, *([scene.third] if story.plot == "shared" else [])]
        assert all(person.name in (NAMES_SHE if person.pronouns is SHE else NAMES_HE) for person in people)
        allowed = {form for person in people for form in (person.pronouns.subject, person.pronouns.possessive)}
        told = set(words(story.text.lower()))
        assert told & {SHE.subject, SHE.possessive, HE.subject, HE.possessive} <= allowed


def test_articles_match_their_nouns(stories: list[Story]) -> None:
    for story in stories:
        assert not re.search(r"\ba [aeiou]|\ban [^aeiou]", story.text), story.text


def test_a_lost_thing_is_found_where_it_was_seen(stories: list[Story]) -> None:
    told = [story for story in stories if story.plot == "lost"]
    assert told
    for story in told:
        text = story.text.replace("“", '"').replace("”", '"')
        seen = re.search(rf'"I saw an? {story.scene.thing.full} ([^"]+)," said {story.scene.helper.name}', text)
        assert seen is not None, text
        spots = [text.count(spot) for spot in story.scene.place.spots if spot != seen[1]]
        assert spots == [1, 1], text
        assert text.count(seen[1]) == 2, text


def test_the_helper_is_able_to_help(stories: list[Story]) -> None:
    for story in stories:
        scene = story.scene
        if story.plot == "stuck":
            ability = scene.helper.creature.ability
            assert scene.hero.creature.ability != ability
            assert OFFERS[ability] in story.text
            assert OBSTACLES[ability].rescue.format(thing=scene.thing.noun) in story.text
        if story.plot == "way_home":
            assert scene.thing.signal
            assert ("saw the light" in story.text) == (scene.thing.signal == LIGHT)


def test_a_request_names_the_topic_of_the_story() -> None:
    rng = random.Random(3)
    for _ in range(300):
        story = tell(rng, titles=False)
        asked = words(request(rng, story))
        about = [
            word for word in asked if word in {*NAMES_SHE, *NAMES_HE, *THING_SIGNALS, story.scene.hero.creature.noun}
        ]
        assert about
        assert set(about) <= set(words(story.text))


def test_curly_quotes_come_in_pairs() -> None:
    assert curly('"Oh no!" said Zoë. "It\'s gone."') == "“Oh no!” said Zoë. “It\u2019s gone.”"


def test_vocabulary_holds_the_words_of_unseen_stories() -> None:
    known = vocabulary()
    unseen = {word for document in islice(documents(99), 300) for text in texts(document) for word in words(text)}
    assert unseen <= known
