"""A batch in pieces is the batch: losses by their mass, for every head; bags of any size, chunk by chunk."""

from __future__ import annotations

import torch
from hypothesis import assume
from torch import nn

from headcount.bags import Bags, Pool
from headcount.training.batches import Feed
from oracles import examine, ragged
from test_heads import CASES, C, features, made, near, over_heads


def bags_of(given, weight=True) -> Bags:
    """Ragged bags with removal, weights, instance labels for the head that is told them, every third bag unlabelled."""
    labels = [-1 if i % 3 == 2 else int(y) for i, y in enumerate(given.rng(6).integers(0, C, len(given.sizes)))]
    return Bags.of(
        Pool(features(given)),
        sizes=given.sizes,
        labels=labels,
        classes=C,
        removed=given.removed,
        weight=given.weight if weight else None,
        known=given.rng(8).integers(0, C, given.n),
    )


def quiet(head: nn.Module) -> nn.Module:
    """In training, but nothing is dropped, and batch-norm is not asked for the batch's own statistics."""
    head.train()
    for m in head.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
        if isinstance(m, nn.BatchNorm1d):
            m.eval()
        if hasattr(m, "drop_path"):
            m.drop_path = 0.0
    return head


@over_heads
def test_losses_of_parts_average_to_the_loss_of_the_whole(name, options):
    """Weighed by ``mass``, in every pass: so a batch can be shared out over processes, or taken bit by bit."""

    def law(given):
        assume(len(given.sizes) > 1)
        bags, head = bags_of(given), quiet(made(name, options))
        if head.batch_matters:
            return
        head.enrol(len(bags), len(bags.index))
        feed = Feed(bags, len(bags))
        for sweep in head.passes:
            every = torch.arange(len(bags) if sweep.over == "bags" else len(bags.index))
            loss, mass = zip(*(said(head, feed, w, sweep.over) for w in (every, *every.split(2))), strict=True)
            near(sum(mass[1:]), mass[0])
            near(sum(l * m for l, m in zip(loss[1:], mass[1:], strict=True)), loss[0] * mass[0], 2e-5)

    examine(law, CASES, given=ragged(most=5))


def said(head, feed, which, over):
    h, batch = feed.deal(which, over, head.views)
    return head.loss(head(h, batch.segments), batch).detach(), head.mass(batch).float()
