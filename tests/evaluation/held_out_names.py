"""Names of people that no text has of which the embedded model was trained; records use no others."""

HELD_OUT = (
    "Tess Iris Anya Paula Wilma Sonja Brigid Marta Helga Celia Bertha Camilla Daphne Eunice Fiona Gudrun Hilda "
    "Imogen Josie Kirsten Linda Monica Noelle Odette Pamela Rachel Silvia Tamara Vivian Xenia Hans Simon Viktor "
    "Gus Ralph Bruno Colin Pavel Rufus Dieter Aaron Bernard Casper Derek Eugene Fabian Gordon Hubert Ismael "
    "Jerome Klaus Lionel Marvin Nestor Osman Percy Rupert Stanley Tristan Wolfgang"
)
HELD_OUT_NAMES = frozenset(HELD_OUT.split())
TRAINING_NAMES = frozenset(("Mara", "Ann", "Lily", "Rosa", "Nina", "Tom", "Ben", "Max", "Leo", "Sam"))  # some of them
