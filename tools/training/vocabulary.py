"""The words of the retrieval model, one token each, and its tokenizer.

Token ids: the 256 bytes, the words, the special tokens. A word of the vocabulary is one token together with
the space before it, a number is cut into pairs of digits from the left, and any other text falls back to
bytes, so that every text round-trips. ``ignore_merges`` of the BPE model makes this work without merges.

" is" and the pair of digits after it are one token, so that the tokens of a fact, " amber", " falcon",
" is 58", "21", "3", each point to the next: what follows an earlier mention of the last token or two is all
that has to be found. With " is" on its own, a small model takes many times longer to learn the task.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tools.checkpoints.files import NUM_BYTES, SPECIAL_TOKENS, byte_characters, save_tokenizer


def _listed(words: str) -> tuple[str, ...]:
    return tuple(words.split())


ADJECTIVES = _listed(
    "amber azure brave bright bronze calm clever copper coral crimson curious dusty eager emerald faint "
    "fierce frosty gentle gilded golden green grey hidden hollow humble indigo ivory jade jolly keen lively "
    "lofty lucky marble mellow merry misty noble olive pale patient plain proud quick quiet rapid rosy royal "
    "rusty scarlet silent silver sleepy solemn spotted stormy sunny swift tawny velvet violet wild wise "
    "young"
)
ANIMALS = _listed(
    "badger bear beaver bison bobcat camel crane cricket crow deer dingo dolphin donkey eagle egret falcon "
    "ferret finch fox gecko goose hare hawk hedgehog heron hornet ibis jackal jaguar koala lemur leopard "
    "lizard llama lynx magpie marten mole moose newt ocelot osprey otter owl panda parrot pelican penguin "
    "puffin python rabbit raven salmon seal sparrow stork swan tapir tiger toad turtle walrus weasel "
    "wolf"
)
ATTRIBUTES = _listed("badge code ticket locker parcel room desk phone permit crate ledger seat")

PEOPLE = _listed(
    "clerk captain gardener baker teacher doctor miller painter sailor porter farmer judge writer driver "
    "keeper mayor nurse pilot singer tailor"
)
VERBS = _listed(
    "opened carried painted repaired found cleaned moved counted sold bought watched left closed borrowed "
    "measured hung washed followed praised forgot"
)
THINGS = _listed(
    "window lantern table letter basket wagon bridge garden kettle mirror ladder blanket bottle fence "
    "hammer jacket kitchen market needle pillow piano river saddle teapot trumpet violin wheel "
    "chimney"
)
QUALITIES = _listed("old new narrow broken heavy small large wooden empty clean round long")
PLACES = _listed("harbor orchard station mill church school tower valley village forest square")
TIMES = _listed("noon dawn dusk winter summer supper midnight breakfast")
NAMES = _listed("Marlow Quentin Brisby Oakham Tolland Vesper Yarrow Zimbel")
"""Names that filler text spells in bytes: they are no tokens."""

_GLUE = _listed(
    "the a The A Every No This and of was near behind before after in at from with who then that it"
)
_HEADINGS = ("Notes", "Question", "Answer", "The", "the")
"""Words that begin a line, and so have no space before them."""


def _words() -> tuple[str, ...]:
    spaced = (*_GLUE, *ADJECTIVES, *ANIMALS, *ATTRIBUTES, *PEOPLE, *VERBS, *THINGS, *QUALITIES, *PLACES)
    pairs = [f"{number:02d}" for number in range(100)]
    found = [f" {word}" for word in (*spaced, *TIMES)] + [f" is {pair}" for pair in pairs]
    found += [*_HEADINGS, *pairs]
    assert len(set(found)) == len(found)
    return tuple(found)


WORDS = _words()
WORD_IDS = {word: NUM_BYTES + number for number, word in enumerate(WORDS)}
VOCAB_SIZE = NUM_BYTES + len(WORDS) + len(SPECIAL_TOKENS)
# Last, because the tokenizers library numbers added tokens after the others.
PAD_ID, BOS_ID, EOS_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID = range(VOCAB_SIZE - len(SPECIAL_TOKENS), VOCAB_SIZE)


def token_ids(pieces: str) -> list[int]:
    """Ids of a text without special tokens, word by word; the tokenizer gives the same ones."""
    found: list[int] = []
    at = 0
    while at < len(pieces):
        stop = at + 1
        while stop < len(pieces) and pieces[stop].isalpha() and (pieces[at] == " " or pieces[at].isalpha()):
            stop += 1
        word = pieces[at:stop]
        found += [WORD_IDS[word]] if word in WORD_IDS else list(word.encode())
        at = stop
    return found


def text_of(ids: Iterable[int]) -> str:
    """The text of tokens, special ones left out."""
    words = (WORDS[i - NUM_BYTES].encode() if i >= NUM_BYTES else bytes([i]) for i in ids if i < PAD_ID)
    return b"".join(words).decode(errors="replace")


def write_tokenizer(out_dir: Path, model_max_length: int) -> None:
    """Write the tokenizer's files with the chat template to ``out_dir``."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    characters = byte_characters()
    vocab = {character: byte for byte, character in enumerate(characters)}
    for word, token_id in WORD_IDS.items():
        vocab["".join(characters[byte] for byte in word.encode())] = token_id
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r" is \p{N}{1,2}| ?\p{L}+|\p{N}{1,2}|[^\p{L}\p{N}]"), behavior="isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    save_tokenizer(tokenizer, out_dir, model_max_length)
