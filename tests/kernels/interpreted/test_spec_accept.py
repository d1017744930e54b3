import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.spec_accept import SpecAcceptConfig, spec_accept_reference, spec_accept_triton


def inputs(batch: int, places: int, vocab: int, likeness: float) -> tuple[torch.Tensor, ...]:
    scores = torch.randn(batch, places + 1, vocab)
    target = torch.softmax(scores * 2, -1)
    draft = torch.softmax(scores[:, :places] * 2 + torch.randn(batch, places, vocab) / likeness, -1)
    tokens = (torch.multinomial(draft.flatten(0, 1), 1).view(batch, places) if batch * places
              else torch.zeros(batch, places, dtype=torch.int64))
    counts = torch.randint(0, places + 1, (batch,), dtype=torch.int32)
    return tokens, counts, target, draft, torch.arange(batch) * 2**40, torch.arange(batch) + 5


@pytest.mark.parametrize("has_draft_probs", [False, True])
@pytest.mark.parametrize(("vocab", "block"), [(1, 4), (63, 64), (128, 32), (1000, 256)])
def test_matches_the_reference(vocab: int, block: int, has_draft_probs: bool) -> None:
    accepted = []
    for likeness in (0.5, 4.0):
        tokens, counts, target, draft, seeds, positions = inputs(6, 4, vocab, likeness)
        drafts = draft if has_draft_probs else None
        got = spec_accept_triton(tokens, counts, target, drafts, seeds, positions, config=SpecAcceptConfig(block))
        want = spec_accept_reference(tokens, counts, target, drafts, seeds, positions)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        accepted.append(int(got[1].sum()))
    assert vocab == 1 or not has_draft_probs or accepted[1] > 6  # beside the last token of each row


def test_rows_without_mass_end_early() -> None:
    tokens, counts, target, _, seeds, positions = inputs(2, 3, 20, 1.0)
    counts[:] = 0
    target[0, 0] = 0
    got = spec_accept_triton(tokens, counts, target, None, seeds, positions)
    assert got[1].tolist() == [0, 1] and not got[0][0].any()


def test_a_refused_draft_without_residual_falls_back_to_the_target() -> None:
    # p below q everywhere: what rounding can make of two equal distributions
    target = torch.full((1, 2, 8), 1e-9)
    draft = torch.full((1, 1, 8), 0.125)
    arguments = (torch.tensor([[3]]), torch.ones(1, dtype=torch.int32), target, draft, torch.tensor([1]),
                 torch.tensor([0]))
    got, want = spec_accept_triton(*arguments), spec_accept_reference(*arguments)
    assert got[1].tolist() == [1] and torch.equal(got[0], want[0])


@settings(max_examples=10, deadline=None)
@given(batch=st.integers(0, 4), places=st.integers(0, 5), vocab=st.integers(2, 40), has_draft_probs=st.booleans())
def test_any_shape(batch: int, places: int, vocab: int, has_draft_probs: bool) -> None:
    tokens, counts, target, draft, seeds, positions = inputs(batch, places, vocab, 2.0)
    # views of larger tensors, as a padded batch has them
    target = torch.cat([target, target], 2)[..., :vocab]
    drafts = draft if has_draft_probs else None
    got = spec_accept_triton(tokens, counts, target, drafts, seeds, positions)
    want = spec_accept_reference(tokens, counts, target, drafts, seeds, positions)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
