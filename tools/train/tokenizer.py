"""The tokenizer: byte-level BPE, every digit a token of its own, trained on the corpus generator's own text.

It knows nothing of the model but the size of the vocabulary.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from server.evaluation.corpus.generator import DocumentGenerator, text_of
from server.evaluation.corpus.packing import BOS_ID

VOCABULARY = 2048
BOS, EOS = "<s>", "</s>"


def train_tokenizer(texts: Iterable[str], size: int = VOCABULARY) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=size, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return tokenizer


def sample_texts(seed: int, rounds: int = 600) -> Iterator[str]:
    """Some of everything that training will show."""
    teller = DocumentGenerator(seed)
    for _ in range(rounds):
        for document in (*(teller.story() for _ in range(4)), teller.chat(), teller.record(3000)):
            yield text_of(document)


def load_or_train(path: Path, seed: int) -> Tokenizer:
    """The tokenizer at `path`; made and saved there first if there is none."""
    if not path.exists():
        train_tokenizer(sample_texts(seed)).save(str(path))
    return Tokenizer.from_file(str(path))
