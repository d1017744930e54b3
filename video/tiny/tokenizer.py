"""A word-level tokenizer that diffusers' Wan pipelines accept.

Text is lower-cased, punctuation becomes space, and each word of the closed list is one token; `</s>` ends the
sequence. A word outside the list becomes `<unk>`, so any prompt is accepted.

Invariants: ids are `<pad>` 0, `</s>` 1, `<unk>` 2, then the words in the order given; token i of an encoding is word i
of `split_words(text)`.
"""

import re
from collections.abc import Sequence

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
MAX_TOKENS = 64
_NOT_A_WORD = "[^a-z0-9]+"


def build_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Build the tokenizer for a closed list of lower-case words.

    Raises:
        ValueError: if a word is repeated or holds anything but letters and digits.
    """
    for word in words:
        if re.search(_NOT_A_WORD, word) or not word:
            raise ValueError(f"build_tokenizer: a word holds only a-z and 0-9, got {word!r}")
    if len(set(words)) != len(words):
        raise ValueError("build_tokenizer: words must be distinct")
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNK, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(_NOT_A_WORD), " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, vocabulary[EOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=MAX_TOKENS,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
    )


def split_words(text: str) -> list[str]:
    """Split a text as the tokenizer does, one entry a token, without `</s>`."""
    return re.sub(_NOT_A_WORD, " ", text.lower()).split()


def token_ids(texts: Sequence[str], word_ids: dict[str, int], max_tokens: int = MAX_TOKENS) -> Tensor:
    """Encode texts without the tokenizer object, for worker processes.

    Args:
        texts: B captions.
        word_ids: the tokenizer's vocabulary.
        max_tokens: length of each row, `</s>` included.

    Returns:
        `[B, max_tokens]` int64, padded with 0; equal to the tokenizer's `input_ids` with `padding="max_length"`.
    """
    ids = torch.zeros(len(texts), max_tokens, dtype=torch.int64)
    for row, text in enumerate(texts):
        words = [word_ids.get(word, word_ids[UNK]) for word in split_words(text)[: max_tokens - 1]]
        ids[row, : len(words) + 1] = torch.tensor([*words, word_ids[EOS]])
    return ids
