import math
from typing import Any

import pytest
import torch

from kernels.sampling import sample
from kernels.sampling_params import SamplingParams
from kernels.spec_accept import spec_accept, spec_accept_greedy


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return the p-value of Pearson's test by Wilson and Hilferty's normal form."""
    expected = probabilities.double() * counts.sum()
    freedom = len(expected) - 1
    statistic = float(((counts.double() - expected) ** 2 / expected).sum())
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def test_what_comes_out_is_the_targets_own_distribution() -> None:
    # a target that depends on the token before: what follows must be distributed as if it had run alone
    rows, places, vocab = 6000, 2, 4
    target = torch.softmax(torch.randn(vocab + 1, vocab), -1)
    draft = torch.softmax(torch.randn(vocab + 1, vocab), -1)
    first = torch.multinomial(draft[vocab].expand(rows, -1), 1).squeeze(1)
    second = torch.multinomial(draft[first], 1).squeeze(1)
    drafts = torch.stack([first, second], 1)
    target_probs = torch.stack([target[vocab].expand(rows, -1), target[first], target[second]], 1)
    draft_probs = torch.stack([draft[vocab].expand(rows, -1), draft[first]], 1)
    tokens, counts = spec_accept(drafts, torch.full((rows,), places, dtype=torch.int32), target_probs, draft_probs,
                                 torch.arange(rows), torch.full((rows,), 11))
    assert 0 < int((counts == 3).sum()) < rows and int((counts == 1).sum()) > 0
    assert p_value(torch.bincount(tokens[:, 0], minlength=vocab), target[vocab]) > 1e-4
    # given the first token, and that there is a second, it is drawn as the target draws after it
    for token in range(vocab):
        after = tokens[(tokens[:, 0] == token) & (counts >= 2), 1]
        assert p_value(torch.bincount(after, minlength=vocab), target[token]) > 1e-4
        third = tokens[(tokens[:, 1] == token) & (counts == 3), 2]
        assert p_value(torch.bincount(third, minlength=vocab), target[token]) > 1e-4
    # as many are accepted as theory says: the sum of min(p, q)
    share = float(torch.minimum(target[vocab], draft[vocab]).sum())
    assert abs(float((counts >= 2).float().mean()) - share) < 5 * (share * (1 - share) / rows) ** 0.5


def test_certain_drafts_lose_nothing_either() -> None:
    rows, target = 6000, torch.softmax(torch.randn(5), 0)
    for token in (int(target.argmax()), int(target.argmin())):
        tokens, counts = spec_accept(
            torch.full((rows, 1), token), torch.ones(rows, dtype=torch.int32), target.expand(rows, 2, -1).clone(), None,
            torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
        assert p_value(torch.bincount(tokens[:, 0], minlength=5), target) > 1e-4
        assert abs(float((counts == 2).float().mean()) - float(target[token])) < 0.04


def test_the_statistic_sees_drafts_that_were_taken_unasked() -> None:
    rows, target, draft = 6000, torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.35, 0.25])
    drafted = torch.multinomial(draft.expand(rows, -1), 1).squeeze(1)
    assert p_value(torch.bincount(drafted, minlength=3), target) < 1e-6


def test_without_drafts_it_draws_what_sample_draws() -> None:
    logits = torch.randn(50, 30) * 2
    params = SamplingParams(torch.full((50,), 0.8), torch.arange(50), torch.arange(50) + 9,
                            top_p=torch.full((50,), 0.9))
    sampled = sample(logits, params, with_probabilities=True)
    assert sampled.probabilities is not None
    tokens, counts = spec_accept(torch.zeros(50, 0, dtype=torch.int64), torch.zeros(50, dtype=torch.int32),
                                 sampled.probabilities[:, None], None, params.seeds, params.positions)
    assert torch.equal(tokens[:, 0], sampled.token_ids) and counts.tolist() == [1] * 50


def test_greedy_rows_accept_what_the_target_would_say() -> None:
    target_tokens = torch.tensor([[4, 2, 7, 1], [4, 2, 7, 1], [4, 2, 7, 1], [4, 2, 7, 1]])
    drafts = torch.tensor([[4, 2, 7], [4, 9, 7], [9, 2, 7], [4, 2, 7]])
    counts = torch.tensor([3, 3, 3, 1], dtype=torch.int32)
    tokens, num_tokens = spec_accept_greedy(drafts, counts, target_tokens)
    assert num_tokens.tolist() == [4, 2, 1, 2]
    assert tokens.tolist() == [[4, 2, 7, 1], [4, 2, 0, 0], [4, 0, 0, 0], [4, 2, 0, 0]]
    one_hot = torch.nn.functional.one_hot(target_tokens, 10).float()
    same = spec_accept(drafts, counts, one_hot, None, torch.arange(4), torch.arange(4))
    assert torch.equal(same[0], tokens) and torch.equal(same[1], num_tokens)


def test_a_row_depends_on_itself_alone() -> None:
    target = torch.softmax(torch.randn(8, 4, 20), -1)
    drafts, counts = torch.randint(0, 20, (8, 3)), torch.randint(0, 4, (8,), dtype=torch.int32)
    seeds, positions = torch.arange(8), torch.arange(8)
    tokens, num_tokens = spec_accept(drafts, counts, target, None, seeds, positions)
    one = spec_accept(drafts[5:6], counts[5:6], target[5:6], None, seeds[5:6], positions[5:6])
    assert torch.equal(one[0][0], tokens[5]) and int(one[1]) == int(num_tokens[5])


@pytest.mark.parametrize(("change", "rule"), [
    ({"draft_tokens": torch.zeros(2, 70, dtype=torch.int64)}, r"draft_tokens must be \[B, K\] with K up to 64, got"),
    ({"draft_tokens": torch.zeros(2, 3, dtype=torch.int32)}, r"draft_tokens must be \[2, 3\] torch.int64, got"),
    ({"target_probs": torch.zeros(2, 3, 9)}, r"target_probs must be \[2, 4, 9\] torch.float32, got \(\[2, 3, 9\]"),
    ({"target_probs": torch.zeros(2, 4)}, r"target_probs must be \[B, K \+ 1, V\] .* got \[2, 4\]"),
    ({"draft_probs": torch.zeros(2, 3, 8)}, r"draft_probs must be \[2, 3, 9\] torch.float32, got"),
    ({"num_drafts": torch.zeros(2)}, r"spec_accept: num_drafts must be \[2\] torch.int32, got"),
    ({"seeds": torch.zeros(3, dtype=torch.int64)}, r"spec_accept: seeds must be \[2\] torch.int64, got \(\[3\]"),
    ({"positions": torch.zeros(2)}, r"spec_accept: positions must be \[2\] torch.int64, got"),
])
def test_bad_input_is_named(change: dict[str, Any], rule: str) -> None:
    ids = torch.zeros(2, dtype=torch.int64)
    arguments = {"draft_tokens": torch.zeros(2, 3, dtype=torch.int64), "num_drafts": ids.int(), "draft_probs": None,
                 "target_probs": torch.zeros(2, 4, 9), "seeds": ids, "positions": ids, **change}
    with pytest.raises(ValueError, match=rule):
        spec_accept(**arguments)


def test_bad_target_tokens_are_named() -> None:
    with pytest.raises(ValueError, match=r"spec_accept_greedy: target_tokens must be \[1, 3\] torch.int64, got"):
        spec_accept_greedy(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32),
                           torch.zeros(1, 2, dtype=torch.int64))
