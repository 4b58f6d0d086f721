"""Word lists of the training corpus, in two lexicons that share no name and no object.

`TRAIN` is all that training text may use; `HELD_OUT` is for evaluation only. Words that carry no identity
(places, foods, weather) are common to both. This file knows nothing about templates, tokens or models.
"""

from dataclasses import dataclass
from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split("|"))


@dataclass(frozen=True)
class Person:
    name: str
    female: bool


@dataclass(frozen=True)
class Lexicon:
    """The words that identify somebody or something, and whether the held-out phrasings go with them."""

    girls: tuple[str, ...]
    boys: tuple[str, ...]
    objects: tuple[str, ...]
    held_out: bool = False

    @property
    def people(self) -> tuple[Person, ...]:
        return tuple(Person(n, True) for n in self.girls) + tuple(Person(n, False) for n in self.boys)


TRAIN = Lexicon(
    girls=_words(
        "Mara Ann Lily Rosa Nina Ivy Clara Hana Ella Zoe Ruth Maya Sara Nora June Olga Wren Dora Kate Alma Vera Edith "
        "Lena Mina Pia Greta Freya Hazel Lucy Emma Mia Sophie Jane Amy Molly Rose Tilda Bella Leila Yuki"
    ),
    boys=_words(
        "Tom Ben Max Leo Sam Finn Otto Jack Hugo Omar Karl Peter Noah Luke Emil Ravi Theo Abel Paul Ned Ivan Dan Felix "
        "Oscar Milo Kofi Amir Walt John Bob Tim Henry Oliver Arthur Adam David Anton Erik Hassan Liam"
    ),
    objects=_words(
        "key lamp book cup drum kite rope map coin bell basket box hat coat boat ball spoon ring clock flute mirror "
        "hammer knife bottle shell letter candle whistle brush blanket pot jar scarf doll sword bag button stone "
        "feather ladder shovel wheel saw picture chair needle pencil comb bowl umbrella"
    ),
)

HELD_OUT = Lexicon(
    girls=_words("Tess Iris Anya Paula Wilma Sonja Brigid Marta Helga Celia"),
    boys=_words("Hans Simon Viktor Gus Ralph Bruno Colin Pavel Rufus Dieter"),
    objects=_words("lantern compass bucket violin crown trumpet sled kettle medal helmet"),
    held_out=True,
)

ADJECTIVES = _words(
    "blue red green old new small big golden silver wooden broken shiny round heavy little yellow black white striped "
    "dusty painted strange long soft purple gray brown pink orange"
)
COLORS = _words("blue red green yellow black white purple gray brown pink orange golden silver")
ANIMALS = _words(
    "fox owl cat dog goat hen duck mouse pony rabbit bear frog crow goose sheep turtle hedgehog squirrel donkey otter"
)
BUILDINGS = _words(  # each one takes "in the" and "to the", and has a roof and a door
    "barn kitchen cellar attic school mill shop church tower stable bakery library cabin castle station shed hall "
    "cottage boathouse chapel greenhouse workshop inn palace hut lighthouse pantry museum"
)
PLACES = (*BUILDINGS, "garden", "cave", "forest", "harbor", "tent", "market", "orchard")
FOODS = _words(  # each one takes "some" and can be eaten
    "bread soup cheese honey fruit cake rice beans nuts plums pancakes cherries carrots porridge butter jam corn "
    "grapes onions figs fish peas cookies lemons melons pears"
)
JOBS = _words(
    "baker farmer miller teacher doctor sailor painter tailor smith hunter singer cook gardener carpenter guard "
    "driver writer fisher nurse potter"
)
MATERIALS = _words("wood string paper glue straw clay cloth wire wax leather wool rope")
TEMPERS = _words("young kind clever brave poor quiet old happy shy patient")
COATS = _words("small gray brown hungry friendly wild young white clever tired")
SPOTS = _phrases(
    "near the river|behind the hill|at the edge of the woods|by the sea|next to the old road|under the tall trees|"
    "beside the lake|in a quiet valley|on a green hill|not far from the town"
)
WEATHER = _phrases(
    "the sun was bright|the sun was warm|the moon was full|it was raining softly|it was raining hard|"
    "the wind was cold|the wind was strong|snow was falling|the sky was gray|the sky was clear|"
    "the sky was full of clouds|a thick fog lay over the fields|the air smelled of rain|the air smelled of flowers"
)

SYLLABLES = _words(
    "ba be bi bo bu da de di do du ka ke ki ko ku la le li lo lu ma me mi mo mu na ne ni no nu ra re ri ro ru "
    "sa se si so su ta te ti to tu va ve vi vo za zo"
)
ENDINGS = ("", "n", "r", "l", "s", "k", "m", "th", "x")
_RESERVED = frozenset(word.lower() for word in HELD_OUT.girls + HELD_OUT.boys + HELD_OUT.objects)


def invented_word(rng: Random) -> str:
    """A word nobody has seen, so that recall of it cannot rest on having learnt it; never a held-out one."""
    while True:
        word = "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3)))) + rng.choice(ENDINGS)
        if word not in _RESERVED:
            return word
