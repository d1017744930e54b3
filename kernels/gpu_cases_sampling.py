"""What `gpu_check` runs of sampling: distributions against fp64, tokens by their race, beside torch's own steps."""

from typing import Any

import torch

from kernels.gpu_case import Case, Inputs
from kernels.sampling import sample_triton
from kernels.sampling_params import SamplingContext, SamplingParams
from kernels.sampling_torch import sample_reference
from kernels.spec_accept import spec_accept_reference, spec_accept_triton


def sampling_case(name: str, batch: int, vocab: int, top_k: int | None, top_p: float | None) -> Case:
    """Check distribution, token and logprob of two rows against the reference; torch's peer draws by its own steps."""
    def make(device: torch.device, filled: bool) -> Inputs:
        rows = torch.arange(batch, device=device)
        params = SamplingParams(
            torch.full((batch,), 0.8, device=device), rows + 5, rows * 7,
            None if top_k is None else torch.full((batch,), top_k, dtype=torch.int32, device=device),
            None if top_p is None else torch.full((batch,), top_p, device=device))
        return {"logits": torch.randn(batch, vocab, device=device) * 3, "params": params}

    def launch(x: Inputs, c: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        got = sample_triton(x["logits"], x["params"], SamplingContext(), num_logprobs=5, with_probabilities=True)
        assert got.probabilities is not None and got.logprobs is not None
        return got.probabilities, got.token_ids, got.logprobs

    def torch_steps(x: Inputs) -> torch.Tensor:
        scores = x["logits"] / 0.8
        ordered, order = scores.sort(-1, descending=True)
        probabilities = torch.softmax(ordered, -1)
        if top_k is not None:
            probabilities[:, top_k:] = 0
            probabilities /= probabilities.sum(-1, keepdim=True)
        if top_p is not None:
            probabilities[probabilities.cumsum(-1) - probabilities >= top_p] = 0
            probabilities /= probabilities.sum(-1, keepdim=True)
        probabilities = torch.zeros_like(scores).scatter_(1, order, probabilities)
        torch.multinomial(probabilities, 1)
        return probabilities

    def reference(x: Inputs) -> torch.Tensor:
        p = {n: v[:2].cpu() for n, v in vars(x["params"]).items() if v is not None}
        want = sample_reference(x["logits"][:2].cpu(), SamplingParams(**p), SamplingContext(), num_logprobs=0,
                                with_probabilities=True)
        assert want.probabilities is not None and want.logprobs is not None
        return _sampled(want.probabilities, want.token_ids, want.logprobs).to(x["logits"].device)

    def sample(x: Inputs, out: Any) -> torch.Tensor:
        # torch's own steps draw other tokens: their distribution is what can be compared
        return _sampled(out[0][:2], out[1][:2], out[2][:2]) if isinstance(out, tuple) else torch.cat(
            [out[:2].double(), reference(x)[:, vocab:]], 1)

    return Case(name, f"B{batch} V{vocab} top-k {top_k} top-p {top_p}", make, launch, (None,), reference, sample,
                {"sort, multinomial": torch_steps}, 0.0, 4.0 * batch * vocab)


def _sampled(probabilities: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Join distribution, token as its own probability's place (scaled to weigh little) and logprob in one row."""
    place = tokens.double() / probabilities.shape[1]
    return torch.cat([probabilities.double(), place[:, None], logprobs.double()[:, None]], 1)


def spec_accept_case(name: str, batch: int, places: int, vocab: int) -> Case:
    """Check accepted drafts and the token behind them against the reference, to the last id."""
    def make(device: torch.device, filled: bool) -> Inputs:
        if not filled:
            target = torch.empty(batch, places + 1, vocab, device=device)
            draft, drafts = target[:, :places], torch.empty(batch, places, dtype=torch.int64, device=device)
        else:
            scores = torch.randn(batch, places + 1, vocab, device=device) * 3
            target = torch.softmax(scores, -1)
            draft = torch.softmax(scores[:, :places] + 0.3 * torch.randn(batch, places, vocab, device=device), -1)
            drafts = torch.multinomial(draft.flatten(0, 1), 1).view(batch, places)
        rows = torch.arange(batch, device=device)
        return {"arguments": (drafts, torch.full((batch,), places, dtype=torch.int32, device=device), target, draft,
                              rows + 3, rows * 11)}

    def joined(x: Inputs, out: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.cat([out[0], out[1][:, None].long()], 1).double()

    return Case(
        name, f"B{batch} K{places} V{vocab}", make, lambda x, c: spec_accept_triton(*x["arguments"]), (None,),
        lambda x: joined(x, spec_accept_reference(*x["arguments"])), joined,
        {"torch": lambda x: spec_accept_reference(*x["arguments"])}, 0.0, 8.0 * batch * vocab)


SAMPLING_CASES: tuple[Case, ...] = (
    sampling_case("sampling B64 top-k, top-p", 64, 128_256, 50, 0.95),
    sampling_case("sampling B1 top-p", 1, 128_256, None, 0.95),
    sampling_case("sampling B64, no cut", 64, 128_256, None, None),
    spec_accept_case("spec_accept B16 K4", 16, 4, 128_256),
)
