"""A tokenizer whose tokens are bytes: text without a vocabulary, and without torch."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 259
EOS = 256


def byte_tokenizer() -> Tokenizer:
    """One token a byte, ids equal to the byte-level alphabet's order, and three specials from 256 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ("<|end|>", "<|begin|>", "<|pad|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer
