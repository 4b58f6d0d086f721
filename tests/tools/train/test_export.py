"""The shipped model is an ordinary Hugging Face Llama, and says the same as the lean model that was trained."""

from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from tools.train.corpus.packing import BOS_ID, EOS_ID
from tools.train.export import export_model, load_exported

DIRECTORY = Path(__file__).parents[3] / "server" / "models" / "tiny"


@cache
def _reference() -> LlamaForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    return model


@cache
def _tokenizer() -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(DIRECTORY)
    return tokenizer


@torch.no_grad()
def test_lean_model_agrees_with_transformers() -> None:
    lean, _ = load_exported(DIRECTORY)
    ids = torch.randint(0, lean.shape.vocabulary, (2, 300), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(lean(ids), _reference()(ids).logits, atol=1e-4, rtol=0)


def test_config_says_what_a_server_needs() -> None:
    config = _reference().config
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.bos_token_id, config.eos_token_id) == (BOS_ID, EOS_ID)
    assert config.tie_word_embeddings
    assert config.max_position_embeddings == 2048
    assert _reference().generation_config.eos_token_id == EOS_ID


def test_tokenizer_goes_there_and_back() -> None:
    text = "Mara keeps the blue key in the barn. Number 4821!"
    ids = _tokenizer()(text).input_ids
    assert ids[0] == BOS_ID
    assert _tokenizer().decode(ids, skip_special_tokens=True) == text
    assert len(_tokenizer()) == _reference().config.vocab_size


def test_chat_template_writes_what_training_showed() -> None:
    messages = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! Shall I tell you a story?"},
        {"role": "user", "content": "Yes."},
    ]
    text = _tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<s>Q: Hello!\nA: Hello! Shall I tell you a story?</s>Q: Yes.\nA:"


def test_directory_is_small_and_can_be_written_again(tmp_path: Path) -> None:
    lean, _ = load_exported(DIRECTORY)
    export_model(lean, DIRECTORY / "tokenizer.json", tmp_path)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (DIRECTORY / name).read_bytes(), name
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) < 12_000_000
