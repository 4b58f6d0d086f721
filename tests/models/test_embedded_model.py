"""The embedded model is an ordinary Hugging Face Llama, whose files say what a server needs."""

from functools import cache

from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, PreTrainedTokenizerBase

from server.models.files.directory import EMBEDDED

DIRECTORY = EMBEDDED["tiny"]
BOS_ID, EOS_ID = 0, 1


@cache
def load_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(DIRECTORY)
    return tokenizer


def test_config_says_what_a_server_needs() -> None:
    config = LlamaConfig.from_pretrained(DIRECTORY)
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.bos_token_id, config.eos_token_id) == (BOS_ID, EOS_ID)
    assert config.tie_word_embeddings
    assert config.max_position_embeddings == 2048
    assert len(load_tokenizer()) == config.vocab_size
    assert GenerationConfig.from_pretrained(DIRECTORY).eos_token_id == EOS_ID


def test_tokenizer_goes_there_and_back() -> None:
    text = "Mara keeps the blue key in the barn. Number 4821!"
    ids = load_tokenizer()(text).input_ids
    assert ids[0] == BOS_ID
    assert load_tokenizer().decode(ids, skip_special_tokens=True) == text


def test_chat_template_writes_what_training_showed() -> None:
    messages = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! Shall I tell you a story?"},
        {"role": "user", "content": "Yes."},
    ]
    text = load_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<s>Q: Hello!\nA: Hello! Shall I tell you a story?</s>Q: Yes.\nA:"


def test_files_are_small() -> None:
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) < 12_000_000
