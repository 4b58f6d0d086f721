"""Trains the embedded model's tokenizer on generated text: a byte-level BPE that splits off every digit."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.train.corpus.generator import DocumentGenerator, join_text
from tools.train.corpus.packing import BOS_ID

VOCAB_SIZE = 2048
BOS, EOS = "<s>", "</s>"


def train_tokenizer(texts: Iterable[str], size: int = VOCAB_SIZE) -> Tokenizer:
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
    """Yield texts of all kinds that the training corpus has: stories, chats and records."""
    generator = DocumentGenerator(seed)
    for _ in range(rounds):
        for document in (
            *(generator.make_story() for _ in range(4)),
            generator.make_chat(),
            generator.make_record(3000),
        ):
            yield join_text(document)


def load_or_train(path: Path, seed: int) -> Tokenizer:
    """Return the tokenizer in the file `path`, which is trained and saved first if it does not exist."""
    if not path.exists():
        train_tokenizer(sample_texts(seed)).save(str(path))
    return Tokenizer.from_file(str(path))
