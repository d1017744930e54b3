"""Trains the tiny text encoder: `python -m video.tiny.train_text --device cpu --steps 500 --out runs/a --resume`.

Each token predicts what its phrase says: colour, kind, size, motion, backdrop, camera, relation. So the two things of a
caption stay apart, which joint training with the denoiser did not achieve. Afterwards the encoder is frozen.

Invariant: step n draws its rows from (seed, n), so a resumed run continues bit for bit on the CPU.
"""

import argparse
import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import UMT5EncoderModel

from video.tiny import bank, captions
from video.tiny.forward import training_dtype
from video.tiny.model import TEXT_ENCODER, build_text_encoder
from video.tiny.optim import Budget, Optimizer, learning_rate_scale
from video.tiny.runs import Log, load_state, save_state, save_weights

HIDDEN = (".q.weight", ".k.weight", ".v.weight", ".o.weight", ".wi_0.weight", ".wi_1.weight", ".wo.weight")
STATE_FILE = "text.state"
CLASS_COUNTS = tuple(len(captions.CLASSES[name]) for name in captions.ATTRIBUTES)
BATCH = 256


class Reader(nn.Module):
    """The text encoder with one linear head for all attributes; the head is dropped after training."""

    def __init__(self, vocab_size: int, d_model: int = TEXT_ENCODER["d_model"]) -> None:
        super().__init__()
        self.encoder: UMT5EncoderModel = build_text_encoder(vocab_size, d_model=d_model)
        self.head = nn.Linear(d_model, sum(CLASS_COUNTS))

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Score the classes of each attribute for ids `[B, L]`: one `[B, L, classes]` an attribute."""
        hidden = self.encoder(input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state
        scores: tuple[Tensor, ...] = self.head(hidden).split(CLASS_COUNTS, dim=-1)
        return scores


def train(
    reader: Reader,
    ids: Tensor,
    labels: Tensor,
    budget: Budget,
    out: Path,
    log: Log,
    *,
    check: tuple[Tensor, Tensor],
    seed: int = 0,
    batch: int = BATCH,
    learning_rate: float = 3e-3,
    log_every: int = 50,
    save_every: int | None = None,
    resume: bool = False,
) -> UMT5EncoderModel:
    """Train to the end of the budget and return the frozen encoder with averaged weights.

    Args:
        reader: encoder and head on their device.
        ids, labels: `[R, L]` and `[R, L, A]` int64 on the device, -1 where a token says nothing.
        budget: steps or seconds.
        out: folder of the state and the weights.
        log: gets a line every `log_every` steps.
        check: ids and labels of captions that are not trained on.
        seed, batch, learning_rate, log_every, save_every, resume: as their names say; rates are AdamW's kind.
    """
    device = ids.device
    longest = int((ids != 0).any(0).sum())  # padding is neither attended nor labelled
    ids, labels = ids[:, :longest], labels[:, :longest]
    optimizer = Optimizer(reader, HIDDEN, learning_rate, ema_decay=0.99)
    step = 0
    state = load_state(out / STATE_FILE, device) if resume else None
    if state is not None:
        reader.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    generator = torch.Generator(device)
    while (progress := budget.progress(step)) < 1:
        generator.manual_seed(seed * 1_000_003 + step)
        rows = torch.randint(len(ids), (batch,), generator=generator, device=device)
        with torch.autocast(device.type, training_dtype(device), enabled=training_dtype(device) != torch.float32):
            scores = reader(ids[rows])
        wanted = labels[rows]
        losses = [
            F.cross_entropy(score.flatten(0, 1).float(), wanted[..., index].flatten(), ignore_index=-1, reduction="sum")
            for index, score in enumerate(scores)
        ]
        loss = torch.stack(losses).sum() / (wanted >= 0).sum().clamp_min(1)
        loss.backward()
        scale = learning_rate_scale(progress, step, warm_up_steps=30)
        optimizer.step(scale)
        if step % log_every == 0:
            value = float(loss.detach())
            optimizer.keep_or_restore(value == value)
            log.write("text", step=step, loss=value, lr=learning_rate * scale)
        step += 1
        if save_every is not None and step % save_every == 0:
            model_state = {name: tensor.detach() for name, tensor in reader.state_dict().items()}
            save_state(out / STATE_FILE, {"model": model_state, "optimizer": optimizer.state_dict(), "step": step})
    reader.load_state_dict(optimizer.ema_state(), strict=False)
    reader.requires_grad_(False).eval()
    figures = accuracy(reader, *check)
    log.write("text", step=step, elapsed_s=budget.elapsed_s, **{f"accuracy_{k}": v for k, v in figures.items()})
    about = {"words": list(captions.WORDS), "steps": step, "accuracy": figures}
    save_weights(out, "text", reader.encoder.state_dict(), about)
    return reader.encoder


@torch.no_grad()
def accuracy(reader: Reader, ids: Tensor, labels: Tensor) -> dict[str, float]:
    """Measure the share of labelled tokens that are read right, by attribute."""
    right = torch.zeros(len(CLASS_COUNTS), device=ids.device)
    seen = torch.zeros(len(CLASS_COUNTS), device=ids.device)
    for part, wanted in zip(ids.split(512), labels.split(512), strict=True):
        for index, score in enumerate(reader(part)):
            is_labelled = wanted[..., index] >= 0
            right[index] += ((score.argmax(-1) == wanted[..., index]) & is_labelled).sum()
            seen[index] += is_labelled.sum()
    return dict(zip(captions.ATTRIBUTES, (right / seen.clamp_min(1)).tolist(), strict=True))


@torch.no_grad()
def embed(encoder: UMT5EncoderModel, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Encode ids `[R, L]` to `[R, L, d_model]` as the Wan pipelines do: zeros after `</s>`."""
    longest = int((ids != 0).any(0).sum())
    parts = []
    for part in ids[:, :longest].split(2048):
        mask = part != 0
        hidden = encoder(input_ids=part.long(), attention_mask=mask.long()).last_hidden_state
        parts.append((hidden * mask.unsqueeze(-1)).to(dtype))
    return F.pad(torch.cat(parts), (0, 0, 0, ids.shape[1] - longest))


def main() -> None:
    """Train on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--scenes", type=int, default=8192)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="processes that make captions")
    parser.add_argument("--save-every", type=int, default=100, help="steps between states")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    pool = bank.start_workers(args.workers)
    device = torch.device(args.device)
    ids, labels = (t.to(device) for t in bank.label_all(pool, bank.jobs("train", 90_000_000, args.scenes, 2, 0.3)))
    held_ids, held_labels = (t.to(device) for t in bank.label_all(pool, bank.jobs("unseen", 0, 256, 1)))
    torch.manual_seed(args.seed)
    reader = Reader(len(captions.WORDS) + 3).to(device)
    train(
        reader,
        ids,
        labels,
        Budget(steps=args.steps),
        args.out,
        Log(args.out / "log.jsonl"),
        check=(held_ids, held_labels),
        seed=args.seed,
        batch=args.batch,
        save_every=args.save_every,
        resume=args.resume,
    )


if __name__ == "__main__":
    main()
