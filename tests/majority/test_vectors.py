"""Every number of the specification's table of test vectors, to 1e-6, and the paper's two examples of why to count."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headcount.bags import Segments
from headcount.datasets.share_sampler import round_shares
from headcount.majority.metrics import mean_iou
from headcount.models.heads import Batch, build_head

Z = torch.tensor([[2.0, 1, 0], [0.5, 0, 0.2], [0, 1, 0.9], [1, 0, 2]])
LABEL = torch.tensor([[1.0, 0, 0]])


def run_head(name, options, removed=None, logits=Z, target=LABEL):
    """The shares, bag probabilities, loss and output for one bag of a head whose classifier passes the logits through."""
    classes = logits.shape[1]
    head = build_head(name, classes, classes, options)
    with torch.no_grad():
        head.classifier.weight.copy_(torch.eye(classes))
        head.classifier.bias.zero_()
    segments = Segments.from_sizes([len(logits)])
    if removed is not None:
        segments = segments.without(torch.tensor(removed))
    output = head(logits, segments)
    batch = Batch(segments, target, torch.zeros(1, dtype=torch.int64), torch.arange(len(logits)))
    share = output.parts["sums"] / output.parts["total"][:, None]
    return share[0], output.bag[0].exp(), head.loss(output, batch).item(), output


def close(got, *want):
    np.testing.assert_allclose(torch.as_tensor(got).detach().numpy(), want if len(want) > 1 else want[0], atol=1.1e-6)


def test_counting_network():
    share, p, loss, output = run_head("count", {})
    close(share, 0.486633, 0.184364, 0.329003)
    close(p, 0.796554, 0.038768, 0.164678)
    close(loss, 0.075820)
    close(run_head("count", {"reduction": "paper"})[2], 0.227461)
    assert output.instance.argmax(1).tolist() == [0, 0, 1, 2]


def test_without_count():
    share, p, loss, _ = run_head("count", {"t1": 1.0})
    close(share, 0.374462, 0.258288, 0.367250)
    close(p, 0.445761, 0.139496, 0.414743)
    close(loss, 0.269324)


@pytest.mark.parametrize(("name", "options"), [("count", {"t1": 1.0, "t2": 1.0}), ("output_mean", {"form": "tempered"})])
def test_both_temperatures_one(name, options):
    _, p, loss, _ = run_head(name, options)
    close(p, 0.346845, 0.308803, 0.344352)
    close(loss, 0.352959)


def test_output_mean():
    close(run_head("output_mean", {})[2], 1.085251)
    close(run_head("output_mean", {"form": "nll"})[2], 0.982264)


def test_paper_literal_counts():
    _, p, loss, output = run_head("count", {"mode": "count", "reduction": "paper"})
    close(output.parts["sums"][0], 1.946532, 0.737457, 1.316011)
    close(p[0], 0.998171)
    close(loss, 0.001831)


def test_mpem_fourth_instance_removed():
    share, p, loss, _ = run_head("count", {}, removed=[False, False, False, True])
    close(share, 0.648829, 0.245819, 0.105352)
    close(p[0], 0.978345)
    close(loss, 0.007298)


@pytest.mark.parametrize(("classes", "want"), [(10, 0.230259), (9, 0.244136), (4, 0.346574)])
def test_all_zero_logits(classes, want):
    target = torch.eye(classes)[:1]
    close(run_head("count", {}, logits=torch.zeros(64, classes), target=target)[2], want)
    close(run_head("output_mean", {}, logits=torch.zeros(64, classes), target=target)[2], math.log(classes))


@pytest.mark.parametrize(("classes", "floor"), [(10, 2.172), (9, 2.056), (4, 1.170)])
def test_the_loss_of_output_mean_has_a_lower_bound(classes, floor):
    """All instances certainly of the majority class: three softmaxes still leave this loss."""
    logits = torch.zeros(64, classes)
    logits[:, 0] = 100
    got = run_head("output_mean", {}, logits=logits, target=torch.eye(classes)[:1])[2]
    assert got == pytest.approx(floor, abs=5e-4)


def test_miou():
    close(mean_iou(np.array([[8, 2, 0], [1, 6, 3], [0, 0, 10]])), 0.665501)


def test_rounding():
    assert round_shares(np.full((1, 10), 0.1), 64).tolist() == [[6] * 9 + [10]]
    assert np.rint([4.5, 6.5]).tolist() == [4, 6]
    assert round_shares(np.array([[4.5, 6.5, 53]]) / 64, 64).tolist() == [[4, 6, 54]]


@pytest.mark.parametrize(
    ("instances", "summed", "counted"),
    [
        ([(0.5, 0.4, 0.1), (0.1, 0.4, 0.5)], (0.6, 0.8, 0.6), (1, 0, 1)),
        ([(0.1, 0.4, 0.5), (0.4, 0.6, 0.0)], (0.5, 1.0, 0.5), (0, 1, 1)),
        ([(0.0, 1.0, 0.0), (0.0, 1.0, 0.0)], (0.0, 2.0, 0.0), (0, 2, 0)),
    ],
)
def test_why_count(instances, summed, counted):
    """A class can win the sum of confidences without winning one instance; sharp votes tell the difference."""
    p = torch.tensor(instances)
    segments = Segments.from_sizes([len(instances)])
    close(segments.sum(p)[0], *summed)
    votes = segments.sum((p.clamp_min(1e-9).log() / 0.01).softmax(1))[0]
    np.testing.assert_allclose(votes.numpy(), counted, atol=1e-3)
