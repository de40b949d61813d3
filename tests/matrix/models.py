"""Models: the tiny Llama that every row trains, its tokenizer, and text of its words."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(90)]


def llama(vocabulary: int = 96) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "vocab_size": vocabulary}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0))


def loaded(folder: str) -> LlamaForCausalLM:
    """The model as one that came from a folder: some trainers load it a second time, as the reference."""
    llama().save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


def tokenizer() -> PreTrainedTokenizerFast:
    ids = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(seed: int, words: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[int(number)] for number in torch.randint(0, len(WORDS), (words,), generator=generator))
