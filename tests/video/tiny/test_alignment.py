"""What tokens show, and the probe that is held to it."""

import torch

from video.tiny.alignment import Probe, shown
from video.tiny.draw import covers
from video.tiny.vocabulary import BACKDROPS, COLORS, KINDS, MOTIONS
from video.tiny.world import compose, sample_scene

CPU = torch.device("cpu")


def test_tokens_show_what_is_drawn() -> None:
    one = compose([("star", "red", "large", "left")], "sea", seed=1)
    two = compose(
        [("ball", "blue", "small", "up"), ("car", "pink", "small", "still")], "night", relation="left of", seed=2
    )
    seen = shown([one, two], 9, 64, 96, CPU)
    assert seen.cover.shape == (2, 2, 3 * 4 * 6)
    star = [KINDS.index("star"), COLORS.index("red"), MOTIONS.index("left")]
    assert seen.things[0].tolist() == [star, [-1] * 3]
    assert seen.things[1, 1].tolist() == [KINDS.index("car"), COLORS.index("pink"), MOTIONS.index("still")]
    assert seen.backdrop.tolist() == [BACKDROPS.index("sea"), BACKDROPS.index("night")]
    pixels, _ = covers([one, two], 9, 64, 96)
    # the first latent frame is frame 0 alone, the second frames 1 to 4; tokens run along rows
    first, second = seen.cover.float().view(2, 2, 3, 4, 6)[:, :, :2].unbind(2)
    torch.testing.assert_close(first[0, 0, 2, 3], pixels[0, 0, 0, 32:48, 48:64].mean(), atol=1e-3, rtol=0)
    means = pixels[1, 1, 1:5].unflatten(1, (4, 16)).unflatten(3, (6, 16)).mean((0, 2, 4))
    torch.testing.assert_close(second[1, 1], means, atol=1e-3, rtol=0)
    rows = torch.tensor([1, 1, 0])
    assert torch.equal(seen[rows].things, seen.things[rows])


def test_the_probe_learns_what_the_hidden_states_say_and_no_more() -> None:
    torch.manual_seed(0)
    scenes = [sample_scene(seed, "train") for seed in range(16)]
    seen = shown(scenes, 5, 32, 48, CPU)
    # one column says how much is covered, the others which backdrop it is
    backdrop = torch.nn.functional.one_hot(seen.backdrop, len(BACKDROPS)).float()[:, None].expand(-1, 6 * 2, -1)
    telling = torch.cat([4 * seen.cover.float().sum(1)[..., None], 4 * backdrop, torch.zeros(16, 12, 2)], dim=2)
    losses = {}
    for name, hidden in (("telling", telling), ("silent", torch.ones_like(telling))):
        probe = Probe(telling.shape[-1])
        optimizer = torch.optim.Adam(probe.parameters(), lr=0.02)
        for _ in range(150):
            optimizer.zero_grad()
            loss = probe.loss(hidden, seen)
            loss.backward()
            optimizer.step()
        losses[name] = loss.item()
    assert losses["telling"] < 0.7 * losses["silent"]


def test_a_token_without_a_thing_says_nothing_of_things() -> None:
    seen = shown([compose([("ball", "red", "small", "still")], "day", seed=3)], 5, 64, 96, CPU)
    torch.manual_seed(0)
    probe = Probe(8)
    hidden = torch.randn(1, 48, 8, requires_grad=True)
    with torch.no_grad():
        # neither the cover nor the backdrop depends on the hidden state now
        probe.head.weight[0] = 0
        probe.head.weight[-len(BACKDROPS) :] = 0
    probe.loss(hidden, seen).backward()
    assert hidden.grad is not None
    covered = seen.cover[0].sum(0) > 0
    assert 0 < covered.sum() < 48
    assert (hidden.grad[0, covered].abs().sum(-1) > 0).all()
    assert (hidden.grad[0, ~covered] == 0).all()
