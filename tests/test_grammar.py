"""The micro suite's stories: repeatable, prefix-stable, and worth learning."""

from __future__ import annotations

import hashlib

import pytest

from driftlab.data import grammar
from driftlab.data.grammar import (
    BOS_ID,
    EOS_ID,
    VOCABULARY,
    WordTokenizer,
    decode,
    encode,
    micro_prompts,
    stories,
)
from driftlab.data.prompts import render
from driftlab.errors import DataError


def test_vocabulary_is_sorted_small_and_without_repeats() -> None:
    assert VOCABULARY[:2] == ("<bos>", "<eos>")
    assert list(VOCABULARY[2:]) == sorted(set(VOCABULARY[2:]))
    assert 150 <= len(VOCABULARY) <= 250
    # Ids are part of every stored table: a change of the grammar must be seen, and meant.
    digest = hashlib.sha256(" ".join(VOCABULARY).encode()).hexdigest()
    assert digest[:16] == "3a084e8e0ae8d16b"


def test_stories_depend_on_seed_and_index_only() -> None:
    few, many = stories(5, seed=7), stories(50, seed=7)
    assert many[:5] == few
    assert stories(5, seed=8) != few
    digest = hashlib.sha256("|".join(decode(s) for s in few).encode()).hexdigest()
    assert digest[:16] == "db5d27bd4bd669fd"


def test_stories_are_closed_long_enough_and_use_every_word() -> None:
    made = stories(3000, seed=0)
    lengths = sorted(len(s) for s in made)
    assert lengths[0] >= 60
    assert lengths[-1] <= 150
    assert 80 <= lengths[len(made) // 2] <= 110
    for story in made:
        assert story[0] == BOS_ID
        assert story[-1] == EOS_ID
        assert not {BOS_ID, EOS_ID} & set(story[1:-1])
    assert {i for story in made for i in story} == set(range(len(VOCABULARY)))
    assert len(set(made)) == len(made)


def test_streams_do_not_share_stories() -> None:
    assert not set(stories(2000, 0)) & set(stories(2000, 0, stream="held-out"))


def test_a_story_repeats_its_two_names_and_no_other() -> None:
    names = {*grammar._SHE, *grammar._HE}
    for story in stories(200, seed=3):
        said = [w for w in decode(story).split() if w in names]
        assert len(set(said)) == 2
        assert len(said) >= 5


def test_pronouns_agree_with_the_hero() -> None:
    he, she = {"he", "his"}, {"she", "her"}
    seen = set()
    for story in stories(300, seed=4):
        words = decode(story).split()
        hero = next(w for w in words if w in {*grammar._SHE, *grammar._HE})
        said = set(words) & (he | she)
        seen |= said
        assert said <= (she if hero in grammar._SHE else he)
    assert seen == he | she


def test_encode_and_decode_are_inverse_and_unknown_words_are_named() -> None:
    story = stories(1, 0)[0]
    assert tuple(encode(decode(story))) == story
    with pytest.raises(DataError, match="zeppelin"):
        encode("the zeppelin .")


def test_prompts_are_different_openings_of_held_out_stories() -> None:
    prompts = micro_prompts(64, seed=1)
    assert prompts[:10] == micro_prompts(10, seed=1)
    assert len({p.text for p in prompts}) == len({p.id for p in prompts}) == 64
    assert {p.category for p in prompts} == {"named", "morning", "long-ago"}
    held_out = [decode(s[1:]) for s in stories(200, 1, stream="held-out")]
    for prompt in prompts:
        rendered = render(prompt, WordTokenizer())
        assert 12 <= len(rendered.tokens) <= 16
        assert (rendered.first_token, rendered.bos, rendered.template_used) == (BOS_ID, True, False)
        assert any(story.startswith(prompt.text) for story in held_out)


def test_more_prompts_than_openings_is_not_asked_of_small_suites() -> None:
    assert len(micro_prompts(500, seed=0)) == 500


def test_word_tokenizer_is_the_functions_with_a_bos() -> None:
    tokenizer = WordTokenizer()
    assert len(tokenizer) == len(VOCABULARY)
    assert tokenizer.encode("the hat .") == [BOS_ID, *encode("the hat .")]
    assert tokenizer.encode("the hat .", add_special_tokens=False) == encode("the hat .")
    assert tokenizer.decode(encode("the hat .")) == "the hat ."
