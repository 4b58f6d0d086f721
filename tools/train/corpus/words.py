"""Word lists of the generated texts: lexicons for training and for evaluation, which share no name and no object.

Training texts use only `TRAIN`. `HELD_OUT_NAMES` is for evaluation only, and so is `HELD_OUT`, which also has the
held-out phrasings of facts. Words that do not identify anything (places, foods, weather) are common to all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split("|"))


@dataclass(frozen=True)
class Person:
    name: str
    female: bool


def _people(girls: Sequence[str], boys: Sequence[str]) -> tuple[Person, ...]:
    return tuple(Person(n, True) for n in girls) + tuple(Person(n, False) for n in boys)


STORY_NAMES = 15  # number of heroes of each sex, and of their friends of each sex


@dataclass(frozen=True)
class Lexicon:
    """The names of people and objects in texts, and whether facts use the phrasings that are held out from training."""

    girls: tuple[str, ...]
    boys: tuple[str, ...]
    objects: tuple[str, ...]
    new_phrasings: bool = False

    @property
    def people(self) -> tuple[Person, ...]:
        return _people(self.girls, self.boys)

    @property
    def heroes(self) -> tuple[Person, ...]:
        """The heroes of stories: few, so that a model learns soon which names are girls' and which boys'."""
        return _people(self.girls[:STORY_NAMES], self.boys[:STORY_NAMES])

    @property
    def friends(self) -> tuple[Person, ...]:
        """The friends of heroes; their names differ from those of heroes, so that a model cannot confuse the two."""
        later = slice(STORY_NAMES, 2 * STORY_NAMES)
        return _people(self.girls[later], self.boys[later])


TRAIN = Lexicon(
    girls=_words(
        "Mara Ann Lily Rosa Nina Ivy Clara Hana Ella Zoe Ruth Maya Sara Nora June Olga Wren Dora Kate Alma Vera Edith "
        "Lena Mina Pia Greta Freya Hazel Lucy Emma Mia Sophie Jane Amy Molly Rose Tilda Bella Leila Yuki Ada Agnes "
        "Alice Amina Anna Astrid Beth Birgit Bonnie Carla Carmen Cora Daisy Delia Diana Dina Elena Elsa Erika Esther "
        "Eva Fatima Fay Flora Frida Gerda Gina Gloria Grace Gwen Hanna Heidi Helen Ida Ilse Inga Irene Isabel Jasmin "
        "Jenny Joan Judith Julia Karin Kira Laura Lea Lisa Lotte Luna Lydia Mabel Maria Matilda Meg Melanie Nadia "
        "Naomi Nelly Olive Pearl Petra Phoebe Polly Priya Ramona Renata Rita Robin Sandra Selma Signe Sonia Stella "
        "Sybil Tania Thea Ulla Ursula Valerie Violet Wanda Yara Zelda"
    ),
    boys=_words(
        "Tom Ben Max Leo Sam Finn Otto Jack Hugo Omar Karl Peter Noah Luke Emil Ravi Theo Abel Paul Ned Ivan Dan Felix "
        "Oscar Milo Kofi Amir Walt John Bob Tim Henry Oliver Arthur Adam David Anton Erik Hassan Liam Alan Albert "
        "Alex Alfred Ali Andrew Axel Basil Boris Brian Bruce Carl Cedric Charles Chris Clark Conrad Cyril Daniel "
        "Dennis Diego Dirk Duncan Edgar Edmund Edward Elias Enzo Ernest Evan Frank Franz Fred Gabriel George Gilbert "
        "Gregor Harold Harry Harvey Hector Herman Howard Igor Isaac Jacob James Jan Jasper Jens Joel Jonas Jorge "
        "Joseph Julian Kenji Kurt Lars Leon Lewis Louis Lukas Magnus Marco Mark Martin Mateo Matthew Miles Moritz "
        "Nathan Nils Norman Oleg Olaf Pablo Patrick Pedro Philip Piet Quentin Ralf Raoul Rex Robert Roger Roman Samuel "
        "Stefan Sven Tobias Ulrich Victor Wendel William Yusuf"
    ),
    objects=_words(
        "key lamp book cup drum kite rope map coin bell basket box hat coat boat ball spoon ring clock flute mirror "
        "hammer knife bottle shell letter candle whistle brush blanket pot jar scarf doll sword bag button stone "
        "feather ladder shovel wheel saw picture chair needle pencil comb bowl umbrella anchor apron arrow axe badge "
        "banner barrel bead belt bench bicycle bonnet boot bracelet brick broom cage camera cane cannon cape card "
        "carpet cart chain chalk chest chisel cloak collar cord cradle crate crystal curtain cushion dagger desk dice "
        "dish dress fan fiddle file flag flask fork funnel glove goblet guitar hammock harp hook horn hose jacket jug "
        "jumper keyboard ladle lantern lens lid locket magnet marble mask mat mug nail napkin net oar oven paddle pan "
        "parasol pearl pen pillow pin pipe pitcher plate pouch puppet purse puzzle quilt racket rag razor ribbon robe "
        "rocket rug ruler sack saddle sandal saucer scale scissors screw shawl shield shirt shoe sickle skate ski "
        "skirt sock spade stamp statue stick stool stove suitcase sweater table tablet tape teapot telescope thimble "
        "tile torch towel toy tray tub tube vase vest wagon wallet watch wreath"
    ),
)

HELD_OUT_NAMES = Lexicon(
    girls=_words(
        "Tess Iris Anya Paula Wilma Sonja Brigid Marta Helga Celia Bertha Camilla Daphne Eunice Fiona Gudrun Hilda "
        "Imogen Josie Kirsten Linda Monica Noelle Odette Pamela Rachel Silvia Tamara Vivian Xenia"
    ),
    boys=_words(
        "Hans Simon Viktor Gus Ralph Bruno Colin Pavel Rufus Dieter Aaron Bernard Casper Derek Eugene Fabian Gordon "
        "Hubert Ismael Jerome Klaus Lionel Marvin Nestor Osman Percy Rupert Stanley Tristan Wolfgang"
    ),
    objects=_words(
        "compass bucket violin crown trumpet sled kettle medal helmet abacus bagpipe balloon bathtub binder briefcase "
        "buckle candelabra casket clarinet dresser earring engine folder gavel goggles hairpin harness incense kimono "
        "lasso mandolin mortar notebook organ padlock pendant pistol pliers rattle sponge syringe tambourine tripod "
        "typewriter walnut wardrobe windmill wrench xylophone zipper"
    ),
)
HELD_OUT = replace(HELD_OUT_NAMES, new_phrasings=True)

ADJECTIVES = _words(
    "blue red green old new small big golden silver wooden broken shiny round heavy little yellow black white striped "
    "dusty painted strange long soft purple gray brown pink orange"
)
COLORS = _words("blue red green yellow black white purple gray brown pink orange golden silver")
ANIMALS = _words(
    "fox owl cat dog goat hen duck mouse pony rabbit bear frog crow goose sheep turtle hedgehog squirrel donkey otter"
)
BUILDINGS = _words(  # each noun fits after "in the" and "to the", and means a thing with a roof and a door
    "barn kitchen cellar attic school mill shop church tower stable bakery library cabin castle station shed hall "
    "cottage boathouse chapel greenhouse workshop inn palace hut lighthouse pantry museum"
)
PLACES = (*BUILDINGS, "garden", "cave", "forest", "harbor", "tent", "market", "orchard")
FOODS = _words(  # each noun fits after "some", and means a thing that can be eaten
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
    "beside the lake|in a quiet valley|on a green hill|not far from the border"
)
WEATHER = _phrases(
    "the sun was bright|the sun was warm|the moon was full|it was raining softly|it was raining hard|"
    "the wind was cold|the wind was strong|snow was falling|the sky was gray|the sky was clear|"
    "the sky was full of clouds|a thick fog lay over the fields|the air smelled of rain|the air smelled of flowers"
)

# Parts of invented words; training texts contain so many combinations that few syllables of a new name are unseen.
_ONSETS = _words(
    "b bl br c ch cl cr d dr f fl fr g gl gr h j k kl kn kr l m n "
    "p ph pl pr r s sh sk sl sm sn sp st t th tr tw v w y z"
)
_VOWELS = _words("a e i o u a e i o u a e i o u ai au ea ee ei ia ie io oa oo ou")
_CODAS = (
    "",
    "",
    "",
    "",
    *_words("b ck d ft g k l l ld ll m mp n n nd ng nn nt p r r rd rk rn rt s s sk ss st t tt x z"),
)
_RESERVED = frozenset(word.lower() for word in HELD_OUT.girls + HELD_OUT.boys + HELD_OUT.objects)


def invent_word(rng: Random) -> str:
    """Return a random word of 1 to 3 syllables, never one of HELD_OUT, as no training text may contain those."""
    while True:
        syllables = rng.choice((1, 2, 2, 2, 3))
        word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables)) + rng.choice(_CODAS)
        if len(word) > 2 and word not in _RESERVED:
            return word
