"""The stories of the embedded suite ``micro``: a small grammar, and the words it is made of.

Every story has a hero, a friend, a lost thing with a colour, two places and six to nine scenes.
What is drawn once is said again: names, pronouns, the kind of animal, the thing and its colour
and the places come back all through the story, so the next token is often certain to a reader who
remembers and a guess to one who does not. Between the draws stand fixed phrases of three to six
words, which is where long drafts can be accepted.

A story depends on (stream, seed, index) only, on every platform: stories(10, s) opens
stories(1000, s). The streams ``train`` and ``held-out`` never share their draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Literal, TypeVar

from driftlab.data.prompts import Prompt
from driftlab.errors import DataError

Stream = Literal["train", "held-out"]
T = TypeVar("T")

BOS = "<bos>"
EOS = "<eos>"

_SHE = ("anna", "clara", "ella", "greta", "mira")
_HE = ("bruno", "felix", "hugo", "otto", "tom")
_ANIMALS = ("bear", "cat", "duck", "fox", "frog", "goat", "hare", "owl")
_TRAITS = ("brave", "clever", "gentle", "little", "merry", "shy")
_COLOURS = ("blue", "golden", "green", "red", "silver", "white")
_THINGS = (
    ("ball", "balls"), ("bell", "bells"), ("boat", "boats"), ("coin", "coins"),
    ("drum", "drums"), ("hat", "hats"), ("kite", "kites"), ("lamp", "lamps"),
)  # fmt: skip
# A place with the words that always lead there and the thing that always stands there.
_PLACES = (
    ("barn", "behind", "a heap of warm hay"),
    ("bridge", "under", "a row of flat stones"),
    ("castle", "inside", "a long stair of marble"),
    ("forest", "deep in", "a hollow tree full of leaves"),
    ("hill", "on top of", "a ring of soft grass"),
    ("lake", "beside", "a raft without any oars"),
    ("market", "at", "a stall with sweet bread"),
    ("river", "down by", "a bank of cool sand"),
)
_WEATHER = (
    ("sunny", "the sun was high and warm"),
    ("rainy", "the rain fell on the roof"),
    ("windy", "the wind sang in the trees"),
    ("snowy", "the snow lay all around"),
)
_NUMBERS = ("two", "three", "four", "five")
_SEARCHES = ("looked", "searched", "called", "waited")


def _pick(rng: Random, options: Sequence[T]) -> T:
    # Only Random.random() is promised to give the same numbers in every Python release.
    return options[int(rng.random() * len(options))]


def _two(rng: Random, options: Sequence[T]) -> tuple[T, T]:
    first = int(rng.random() * len(options))
    second = (first + 1 + int(rng.random() * (len(options) - 1))) % len(options)
    return options[first], options[second]


def _story(rng: Random) -> str:
    """One story as words and full stops, without BOS and EOS."""
    hero_is_she, friend_is_she = rng.random() < 0.5, rng.random() < 0.5
    (she_a, she_b), (he_a, he_b) = _two(rng, _SHE), _two(rng, _HE)
    hero = she_a if hero_is_she else he_a
    friend = she_b if friend_is_she else he_b
    subject, owner = ("she", "her") if hero_is_she else ("he", "his")
    animal, other = _two(rng, _ANIMALS)
    trait = _pick(rng, _TRAITS)
    colour = _pick(rng, _COLOURS)
    one, many = _pick(rng, _THINGS)
    (place, to, detail), (far, far_to, far_detail) = _two(rng, _PLACES)
    weather, sky = _pick(rng, _WEATHER)
    number = _pick(rng, _NUMBERS)

    opening = _pick(
        rng,
        (
            f"once upon a time there was a {trait} {animal} named {hero} .",
            f"one {weather} morning {hero} the {animal} woke up very early . {sky} .",
            f"far away and long ago {hero} the {animal} lived {to} the {place} .",
        ),
    )
    treasure = _pick(
        rng,
        (
            f"{hero} had a {colour} {one} and loved the {one} more than anything .",
            f"{hero} got a {colour} {one} from {owner} grandmother . {hero} was very proud .",
            f"more than anything {hero} the {animal} wanted a {colour} {one} .",
        ),
    )
    loss = _pick(
        rng,
        (
            f"but one day the {colour} {one} was gone and {hero} the {animal} was sad .",
            f"then {hero} lost the {colour} {one} {to} the {place} .",
            f"then the wind took the {colour} {one} away from {hero} .",
        ),
    )
    verb = _pick(rng, _SEARCHES)
    search = _pick(
        rng,
        (
            f"{hero} {verb} {to} the {place} and saw {detail} .",
            f"{hero} {verb} high and low but {subject} found nothing at all .",
            f"{hero} {verb} {far_to} the {far} and saw {far_detail} .",
        ),
    )
    meeting = _pick(
        rng,
        (
            f"there {hero} met {friend} the {other} . hello {hero} said {friend} .",
            f"{friend} the {other} came by and said hello to {hero} the {animal} .",
        ),
    )
    asking = _pick(
        rng,
        (
            f"please help me find my {one} said {hero} . of course said {friend} .",
            f"do not be sad {hero} said {friend} . i have seen a {one} {far_to} the {far} .",
            f"why are you crying said {friend} . {hero} told {friend} about the {colour} {one} .",
        ),
    )
    finding = _pick(
        rng,
        (
            f"as quick as a flash {friend} ran {far_to} the {far} . {far_detail} hid the {one} .",
            f"{hero} and {friend} went side by side {far_to} the {far} ."
            f" {hero} found {number} {many} and one was {colour} .",
            f"at last {friend} found the {colour} {one} {far_to} the {far} .",
        ),
    )
    thanks = _pick(
        rng,
        (
            f"thank you so much {friend} said {hero} with a big smile .",
            f"{hero} hugged {friend} with all {owner} heart .",
            f"{hero} gave {friend} {number} {many} to say thank you .",
        ),
    )
    ending = _pick(
        rng,
        (
            f"from that day on {hero} and {friend} were the best of friends .",
            f"{hero} and {friend} went home and lived happily ever after .",
            f"that night {hero} the {animal} slept well with the {colour} {one} by {owner} side .",
        ),
    )
    scenes = [opening, treasure, loss, meeting, finding, ending]
    if rng.random() < 0.5:
        scenes.insert(5, thanks)
    if rng.random() < 0.5:
        scenes.insert(4, asking)
    if rng.random() < 0.4:
        scenes.insert(3, search)
    return " ".join(scenes)


def _all_words() -> tuple[str, ...]:
    """Every word the grammar can say: the closed lists and, by many draws, the phrases."""
    words = {BOS, EOS, *_SHE, *_HE, *_ANIMALS, *_TRAITS, *_COLOURS, *_NUMBERS, *_SEARCHES}
    words.update(word for thing in _THINGS for word in thing)
    words.update(word for place in _PLACES for part in place for word in part.split())
    words.update(word for weather in _WEATHER for part in weather for word in part.split())
    for index in range(200):
        words.update(_story(Random(f"vocabulary/{index}")).split())
    return (BOS, EOS, *sorted(words - {BOS, EOS}))


VOCABULARY: tuple[str, ...] = _all_words()
"""All tokens; the id of a token is its index. BOS is 0, EOS 1, the rest is sorted."""

BOS_ID, EOS_ID = 0, 1
_ID = {word: index for index, word in enumerate(VOCABULARY)}


def encode(text: str) -> list[int]:
    """Ids of words separated by blanks, no BOS or EOS added.

    Raises
    ------
    DataError: a word that is not in ``VOCABULARY``.
    """
    try:
        return [_ID[word] for word in text.split()]
    except KeyError as error:
        raise DataError(
            "the micro suite does not know a word",
            got=error.args[0],
            remedy="Use the prompts 'micro', or only the "
            f"{len(VOCABULARY)} words of driftlab.data.grammar.VOCABULARY.",
        ) from None


def decode(ids: Iterable[int]) -> str:
    """Words of ``ids`` joined by blanks."""
    return " ".join(VOCABULARY[i] for i in ids)


def stories(n: int, seed: int, *, stream: Stream = "train") -> list[tuple[int, ...]]:
    """``n`` stories as ids, each opened by BOS and closed by EOS."""
    return [_ids(stream, seed, index) for index in range(n)]


def _ids(stream: Stream, seed: int, index: int) -> tuple[int, ...]:
    words = _story(Random(f"{stream}/{seed}/{index}"))
    return (BOS_ID, *encode(words), EOS_ID)


def micro_prompts(n: int, seed: int, *, stream: Stream = "held-out") -> list[Prompt]:
    """The openings of ``n`` stories, all different: 12 to 16 tokens with the BOS.

    The category is the story's setting: ``named``, ``morning`` or ``long-ago``. Render them with
    :class:`WordTokenizer`, which adds the BOS.
    """
    prompts: list[Prompt] = []
    seen: set[tuple[int, ...]] = set()
    index = 0
    while len(prompts) < n:
        rng = Random(f"cut/{stream}/{seed}/{index}")
        opening = _ids(stream, seed, index)[1 : 12 + int(rng.random() * 5)]
        index += 1
        if opening in seen:
            continue
        seen.add(opening)
        first = VOCABULARY[opening[0]]
        category = {"once": "named", "one": "morning", "far": "long-ago"}[first]
        prompts.append(Prompt(f"micro-{len(prompts):04d}", category, decode(opening)))
    return prompts


class WordTokenizer:
    """The part of a HuggingFace tokenizer that driftlab uses, for the words of the grammar."""

    bos_token_id = BOS_ID
    eos_token_id = EOS_ID
    chat_template = None

    def __len__(self) -> int:
        return len(VOCABULARY)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]:
        """Ids of ``text``, with a BOS in front when special tokens are added."""
        return [BOS_ID, *encode(text)] if add_special_tokens else encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Words of ``ids`` joined by blanks."""
        return decode(ids)
