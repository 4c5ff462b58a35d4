"""A batch in pieces is the batch, and a bag in chunks the bag: losses, gradients and answers, for every head that can."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume
from torch import nn

from head_cases import CASES, NEVER_SPLIT, C, D, features, near, over_heads, small_head, small_options, why_never_split
from headcount.bags import Bags, Pool, pool as pools
from headcount.bags.splits import sample_rows, subsample_bags, subsample_instances
from headcount.errors import HeadcountError
from headcount.experiments.recipe import Recipe
from headcount.majority import transition
from headcount.majority.calibration import log_mean_shares
from headcount.models import backbones as normalize
from headcount.models.heads import HEADS, SumHead, nll, why_not_chunkable
from headcount.models.network import Model, ModelConfig
from headcount.models.predictions import predict
from headcount.selection import cross_validation
from headcount.training import chunked
from headcount.training.loader import BagLoader
from headcount.training.loop import train
from headcount.training.trainer import Trainer
from oracles import examine, ragged


@pytest.fixture(autouse=True)
def _map_every_file(monkeypatch):
    monkeypatch.setattr(pools, "MAX_RESIDENT_BYTES", 0)


NEVER_CUT = {"additive", "additive_trans", "mctformer"}  # what they say of an instance depends on the others
SIZES = [180, 3, 40, 150, 7, 1, 260, 30]  # with chunks of 64, three bags are cut; election wants 128 votes for that


def bags_of(given) -> Bags:
    """Ragged bags with removal, weights, instance labels for the head that is told them, every third bag unlabelled."""
    labels = [-1 if i % 3 == 2 else int(y) for i, y in enumerate(given.rng(6).integers(0, C, len(given.sizes)))]
    return Bags.of(
        Pool(features(given)),
        sizes=given.sizes,
        labels=labels,
        classes=C,
        removed=given.removed,
        weight=given.weight,
        known=given.rng(8).integers(0, C, given.n),
    )


def large_bags(path=None, weight=True, sizes=SIZES) -> Bags:
    rng, n = np.random.default_rng(5), sum(sizes)
    x = rng.normal(size=(n, D)).astype(np.float32)
    if path is not None:
        np.save(path, x)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    removed = rng.random(n) < 0.15
    removed[64:128] = True  # a whole chunk of the first bag
    removed[starts] = False
    return Bags.of(
        Pool(x) if path is None else Pool.from_npy(path),
        sizes=sizes,
        labels=[int(v) for v in rng.integers(0, C, len(sizes) - 1)] + [-1],
        classes=C,
        removed=removed,
        weight=rng.choice([1.0, 2.0, 3.0], n) if weight else None,
        known=rng.integers(-1, C, n),
    )


def training(name, options, chunk, bags=None, dropout=0.0, **more) -> Trainer:
    given = large_bags() if bags is None else bags
    made = small_options(name, options)
    torch.manual_seed(1)
    backbone = (("dropout", dropout), ("hidden", 16))
    design = ModelConfig((D,), given.classes, "mlp", backbone, name, tuple(made.items()))
    recipe = Recipe(backbone="mlp", head=name, options=made, batch_bags=8, chunk_instances=chunk, **more)
    return Trainer(Model(design), given, given, recipe.train_config)


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


def able(name, options) -> bool:
    """Whether this head, so set, can hear a bag of over 128 votes in pieces."""
    return not (name in NEVER_CUT or options.get("positions") or options.get("mining", "off") != "off")


# -- groups of whole bags ------------------------------------------------------------------------------------------------


@over_heads
def test_losses_of_parts_average_to_the_loss_of_the_whole(name, options):
    """Weighed by ``mass``, in every pass: so a batch can be shared out over processes, or taken bit by bit."""

    def law(given):
        assume(len(given.sizes) > 1)
        bags, head = bags_of(given), quiet(small_head(name, options))
        if head.depends_on_batch or why_never_split(head):
            return
        head.setup(bags.segments(), bags.target)
        feed = BagLoader(bags, len(bags))
        for sweep in head.passes:
            every = torch.arange(len(bags) if sweep.over == "bags" else len(bags.index))
            loss, mass = zip(*(said(head, feed, w, sweep.over) for w in (every, *every.split(2))), strict=True)
            near(sum(mass[1:]), mass[0])
            near(sum(l * m for l, m in zip(loss[1:], mass[1:], strict=True)), loss[0] * mass[0], 2e-5)

    examine(law, CASES, given=ragged(most=5))


def said(head, feed, which, over):
    h, batch = feed.batch(which, over, head.views)
    return head.loss(head(h, batch.segments), batch).detach(), head.loss_weight(batch).float()


def test_groups_cover_the_step_within_the_budget():
    feed, which = BagLoader(large_bags(), 8), torch.tensor([6, 1, 2, 0, 7, 5, 4, 3])
    made = chunked.split_into_groups(feed, which, "bags", 1, 64)
    assert [g.tolist() for g in made] == [[6], [1, 2], [0], [7, 5, 4], [3]]
    assert [g.tolist() for g in chunked.split_into_groups(feed, which, "bags", 2, 64)][:2] == [[6], [1]]
    assert chunked.split_into_groups(feed, which, "bags", 1, 0) == [which]
    assert [len(g) for g in chunked.split_into_groups(feed, torch.arange(100), "instances", 2, 64)] == [32, 32, 32, 4]
    places = list(chunked.read_order(feed, [which], budget=64, times=2))
    assert max(map(len, places)) <= 64
    assert sum(map(len, places)) == sum(SIZES) + 260 + 180 + 150


# -- gradients -----------------------------------------------------------------------------------------------------------


def slopes(state, one, which):
    torch.manual_seed(3)
    loss, mass = state.chunked.gradient(one, which)
    return {n: p.grad for n, p in state.model.named_parameters() if p.grad is not None}, loss, mass


@over_heads
@pytest.mark.parametrize("chunk", [64, 300])
def test_the_gradient_in_chunks_is_that_of_the_whole_batch(name, options, chunk):
    """Several bags a step, ragged, weights, removal (a whole chunk of it), unlabelled bags; and every pass of the head."""
    whole = training(name, options, 0)
    batch_wide = name == "additive" or whole.head.depends_on_batch or why_never_split(whole.head)  # batch-norm, Nystrom, tilt
    if batch_wide or (chunk == 64 and not able(name, options)):  # at 300 no bag is cut
        with pytest.raises(HeadcountError, match=f"head {name}"):
            training(name, options, chunk)
        return
    pieces = training(name, options, chunk)
    for state in (whole, pieces):
        quiet(state.model)
    for one in whole.head.passes:
        which = torch.randperm(len(whole.train_loader.bags) if one.over == "bags" else len(whole.train_loader.bags.index))
        assert not pieces.chunked.fits(pieces.train_loader, which, one.over)
        want, loss, mass = slopes(whole, one, which)
        got, loss_too, mass_too = slopes(pieces, one, which)
        near(loss_too, loss)
        near(mass_too, mass.float())
        assert got.keys() == want.keys()
        for parameter, slope in want.items():
            torch.testing.assert_close(got[parameter], slope, rtol=1e-5, atol=1e-5, msg=lambda m, p=parameter: f"{p} {m}")
        assert max(slope.abs().max() for slope in want.values()) > 1e-3, "nothing to compare"
        for a, b in zip(whole.model.buffers(), pieces.model.buffers(), strict=True):
            torch.testing.assert_close(a, b)
    near(pieces.valid_loss(), whole.valid_loss())


def test_which_heads_can_be_chunked():
    divided = {n for n in HEADS if not why_not_chunkable(small_head(n, {}), large_bags().take([0]).segments())}
    assert divided == set(HEADS) - NEVER_CUT - set(NEVER_SPLIT)


@pytest.mark.parametrize("name", NEVER_SPLIT)
def test_a_head_that_is_never_split_is_refused(name):
    with pytest.raises(HeadcountError, match=rf"chunk_instances 64 splits batches, and head {name} needs them whole"):
        training(name, {}, 64)


@pytest.mark.parametrize("name", ["count", "attention", "millet", "weno", "feature_lse", "noisy_label"])
def test_dropout_is_replayed(name):
    """Against one graph over all the chunks, drawn with the same seeds."""
    state = training(name, {"dropout": 0.3} if name in ("millet", "weno") else {}, 64, dropout=0.5, views="noise")
    state.model.train()
    bag, one = torch.tensor([6]), state.head.passes[0]
    got, loss, _ = slopes(state, one, bag)
    got = {k: v.clone() for k, v in got.items()}
    torch.manual_seed(3)
    seed = int(torch.randint(1 << 62, ()))
    batch, place = state.train_loader.batch_info(bag)
    rows = torch.arange(len(place)).split(64)
    noted = [
        state.chunked._accumulate(state.model, state.train_loader.read(place[r]), chunked._chunk(batch, r).segments, seed + i)
        for i, r in enumerate(rows)
    ]
    state.model.zero_grad()
    want = state.chunked._read_out(state.model, noted, batch)
    want.backward()
    near(loss, want)
    for parameter, slope in state.model.named_parameters():
        if slope.grad is not None and parameter in got:
            torch.testing.assert_close(got[parameter], slope.grad, rtol=1e-5, atol=1e-6)
    again, loss_again, _ = slopes(state, one, bag)
    assert loss_again == loss
    assert all(torch.equal(again[k], v) for k, v in got.items())
    torch.manual_seed(4)
    assert state.chunked.gradient(one, bag)[0] != loss, "another seed drops others"


def test_training_in_chunks_has_the_same_losses():
    bags = large_bags()
    fits = []
    for chunk in (0, 64):
        torch.manual_seed(0)
        model = Model(ModelConfig((D,), bags.classes, "mlp"))
        recipe = Recipe(backbone="mlp", epochs=5, batch_bags=3, lr=1e-3, chunk_instances=chunk)
        fits.append(train(model, bags, bags.take([0, 1, 2, 3]), recipe.train_config))
    curves = [f.progress.curve for f in fits]
    np.testing.assert_allclose(*curves, rtol=1e-4)
    assert curves[0][-1][0] < curves[0][0][0]


def test_at_most_one_chunk_is_processed_at_once(tmp_path):
    bags, seen = large_bags(tmp_path / "x.npy"), []
    model = Model(ModelConfig((D,), bags.classes, "mlp"))
    recipe = Recipe(backbone="mlp", epochs=1, batch_bags=8, chunk_instances=64)
    state = Trainer(model, bags, bags, recipe.train_config)
    for m in (state.model, model):
        m.backbone.register_forward_pre_hook(lambda _module, given: seen.append(len(given[0])))
    state.train_epoch(0)
    state.valid_loss()
    cut = 260 + 180 + 150
    assert sum(seen) == 2 * sum(SIZES) + cut - 64, "cut bags twice in training; the removed chunk not the second time"
    predict(model, bags, batch_instances=64)
    assert max(seen) == 64


IN_A_PROCESS = """
import sys, numpy as np
from pathlib import Path
from headcount.bags import Bags, Pool, pool
from headcount.models.network import ModelConfig, build_model
from headcount.models.predictions import predict
from headcount.training.config import TrainConfig
from headcount.training.loop import train

pool.MAX_RESIDENT_BYTES = 0
rows = int(sys.argv[1])
out = np.lib.format.open_memmap("x.npy", "w+", np.float32, (rows, 128))
out[:] = np.random.default_rng(0).standard_normal(128, dtype=np.float32)
del out
bags = Bags.of(Pool.from_npy("x.npy"), sizes=[rows], labels=[1], classes=10)
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
model = build_model(ModelConfig.for_bags(bags, backbone="mlp"), bags)
predict(train(model, bags, bags, TrainConfig(epochs=1, chunk_instances=4096)).model, bags, batch_instances=4096)
print(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")))
"""


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc to read the peak from")
def test_memory_does_not_grow_with_the_bag(tmp_path):
    """Eight times the bag (200 MB of features more) and the same peak, but for a few numbers per instance."""
    peaks = []
    for rows in (60_000, 480_000):
        command = [sys.executable, "-c", IN_A_PROCESS, str(rows)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) / 1024)
    assert peaks[1] - peaks[0] < 90, peaks


# -- refused ---------------------------------------------------------------------------------------------------------------


def test_batch_norm_is_refused():
    pool = Pool(np.zeros((40, 8, 8, 1), dtype=np.uint8))
    bags = Bags.of(pool, sizes=[20, 20], labels=[0, 1], classes=2)
    model = Model(ModelConfig((8, 8, 1), bags.classes, backbone_options=(("width", 2),)))
    with pytest.raises(HeadcountError, match=r"chunk_instances 30 splits batches, and batch-norm.*resnet18"):
        Trainer(model, bags, bags, Recipe(chunk_instances=30).train_config)
    Trainer(model, bags, bags, Recipe(chunk_instances=40).train_config)  # every batch fits
    Trainer(model, bags, bags, Recipe(chunk_instances=20, batch_bags=1).train_config)


def test_steps_of_single_instances_are_checked_too():
    """Bags fit one by one; a step of loose instances does not, and its head needs it whole."""
    bags = Bags.of(Pool(np.zeros((20, D), dtype=np.float32)), sizes=[5, 7, 8], labels=[0, 1, 2], classes=3)
    model = Model(ModelConfig((D,), bags.classes, backbone="mlp", head="tilt", options=(("over", "instances"), ("bag", 0.0))))
    recipe = Recipe(backbone="mlp", head="tilt", options={"over": "instances", "bag": 0.0}, batch_bags=1)
    largest = int(bags.sizes.max()) * model.head.views
    Trainer(model, bags, bags, recipe.replace(batch_instances=4, chunk_instances=largest).train_config)
    with pytest.raises(HeadcountError, match=rf"chunk_instances {largest} splits batches, .* head tilt needs them whole"):
        Trainer(model, bags, bags, recipe.replace(batch_instances=largest, chunk_instances=largest).train_config)


def test_election_refuses_small_bags_in_chunks():
    with pytest.raises(
        HeadcountError, match=r"bag 0 has 180 instances.*head election cannot process a bag in chunks.*up to 128 votes"
    ):
        training("election", {}, 39, large_bags(weight=False))


def test_a_loss_that_uses_instance_logits_is_refused(tmp_path):
    (tmp_path / "own.py").write_text(
        "from headcount.models.heads.count import Count\n\n\nclass Peeks(Count):\n    title = 'Peeks'\n\n"
        "    def loss(self, output, batch, teacher=None):\n        return output.instance.mean()\n"
    )
    state = training(f"{tmp_path / 'own.py'}:Peeks", {}, 64)
    for how in (lambda: state.chunked.gradient(state.head.passes[0], torch.tensor([0])), state.valid_loss):
        with pytest.raises(HeadcountError, match=r"Peeks uses the instances' logits"):
            how()


def test_views_and_teachers_are_refused_for_bags_in_chunks(monkeypatch):
    monkeypatch.setattr(HEADS["count"], "views", 2)
    with pytest.raises(HeadcountError, match="head count cannot process a bag in chunks: it needs several views"):
        training("count", {}, 64)
    training("count", {}, 2 * max(SIZES))  # groups of whole bags, each with its views


# -- asking ----------------------------------------------------------------------------------------------------------------


@over_heads
@pytest.mark.parametrize("mapped", [False, True])
def test_predictions_in_chunks_are_the_same(name, options, mapped, tmp_path):
    bags = large_bags(tmp_path / "x.npy" if mapped else None)
    torch.manual_seed(2)
    head = small_options(name, options)
    model = Model(ModelConfig((D,), bags.classes, "mlp", (("hidden", 16),), name, tuple(head.items()))).eval()
    if model.head.depends_on_batch:
        return
    whole = predict(model, large_bags(), keep=("features",), batch_instances=10**6)
    chunks = predict(model, bags, keep=("features",), batch_instances=64)
    near(chunks.instance, whole.instance, 1e-6)
    near(chunks.bag.exp(), whole.bag.exp(), 2e-6)
    near(chunks.parts["features"], whole.parts["features"], 1e-6)


def test_known_instances_have_their_own_weight_in_a_subsample():
    """A person marked some of one class: those left in the part must not speak for the others."""
    rng = np.random.default_rng(0)
    label = np.arange(20) % 2
    truth = np.where(rng.random((20, 1000)) < 0.6, label[:, None], 1 - label[:, None]).ravel()
    known = np.where((truth == 0) & (rng.random(20_000) < 0.3), 0, -1)
    bags = Bags.of(Pool(np.zeros((20_000, 1), np.float32)), sizes=[1000] * 20, labels=label, classes=2, known=known)
    few, rows = subsample_instances(bags, 4000), sample_rows(bags, 4000)
    assert few.segments().total_weight().tolist() == pytest.approx([1000.0] * 20, rel=1e-5)
    p = torch.eye(2)[torch.from_numpy(truth)] * 0.98 + 0.01
    whole = transition.estimate_transition(p, bags.segments(), bags.target).share
    part = transition.estimate_transition(p[rows], few.segments(), few.target).share
    assert part.tolist() == pytest.approx(whole.tolist(), abs=0.03)


def shared_out(bags=600, size=10, classes=3):
    """Bags whose shares differ much, and what somebody who cannot do better says of their instances."""
    rng = np.random.default_rng(0)
    truth = np.array([rng.choice(classes, size, p=p) for p in rng.dirichlet(np.ones(classes), bags)])
    label = [np.bincount(row, minlength=classes).argmax() for row in truth]
    x = rng.normal(size=(bags * size, classes)) + 1.5 * np.eye(classes)[truth.ravel()]
    held = Bags.of(Pool(x.astype(np.float32)), sizes=[size] * bags, labels=label, classes=classes)
    p = torch.from_numpy(1.5 * x).softmax(1)
    return [cross_validation.FoldResult(np.arange(bags), p, log_mean_shares(p, held.segments()), 0.0)], held


def test_large_data_are_scored_on_some_instances_and_all_votes(monkeypatch):
    """More bags than there is time for made the vote that of two in ten, and every method look worse than it is."""
    units, held = shared_out()
    whole = cross_validation.score_method(units, held)
    monkeypatch.setattr(cross_validation, "MAX_FIT_INSTANCES", 1200)
    some = cross_validation.score_method(units, held)
    assert some.criterion.bag_temperature == whole.criterion.bag_temperature
    assert some.loss == pytest.approx(whole.loss, abs=0.03)
    assert len(some.criterion.loss_per_bag) == len(held)


@pytest.mark.parametrize(("bags", "size", "listened"), [(600, 10, 1500), (60, 300, 12_000)])
def test_context_of_large_data_is_assessed_on_whole_bags(monkeypatch, bags, size, listened):
    """One of ten tells nothing of the others: more data made the model deaf to the bags it is asked about."""
    units, held = shared_out(bags, size)
    whole = cross_validation.assess_held_out_context(cross_validation.score_method(units, held), units, held)
    monkeypatch.setattr(cross_validation, "CONTEXT_INSTANCES", listened)
    some = cross_validation.assess_held_out_context(cross_validation.score_method(units, held), units, held)
    assert whole.helps
    assert some.helps
    assert whole.concentration / 4 <= some.concentration <= whole.concentration * 4  # of few bags no more is known
    assert some.bag_loss == pytest.approx(whole.bag_loss, abs=0.15)


def test_subsampled_bags_are_whole_or_of_one_size():
    sizes = [3, 500, 40, 900, 1] * 8
    bags = Bags.of(Pool(np.arange(sum(sizes), dtype=np.float32)[:, None]), sizes=sizes, labels=[0, 1] * 20, classes=2)
    few, rows = subsample_bags(bags, 2000)
    assert torch.equal(few.index, bags.index[rows])
    assert set(few.sizes.tolist()) <= {1, 3, 40, 200}
    assert 1600 < len(rows) <= 2000
    assert few.weight is None
    assert torch.equal(few.target, bags.target[bags.bag[rows].unique()])
    assert subsample_bags(bags, sum(sizes))[0] is bags


def test_parts_of_the_output_are_kept_for_large_bags():
    bags = large_bags()
    model = Model(ModelConfig((D,), bags.classes, "mlp", head="attention")).eval()
    whole = predict(model, bags, keep=("attention",), batch_instances=10**6)
    near(predict(model, bags, keep=("attention",), batch_instances=64).parts["attention"], whole.parts["attention"], 1e-6)
    with pytest.raises(HeadcountError, match="no part of a model's output 'mood'"):
        predict(model, bags, keep=("mood",), batch_instances=64)


# -- reading ahead -----------------------------------------------------------------------------------------------------------


def test_training_from_a_file_is_training_from_memory(tmp_path):
    fits = []
    for path in (None, tmp_path / "x.npy"):
        bags = large_bags(path)
        assert bags.pool.on_disk == (path is not None)
        torch.manual_seed(0)
        recipe = Recipe(backbone="mlp", head="weno", options={"width": 8, "student_width": 8}, epochs=3, batch_bags=3)
        model = Model(ModelConfig((D,), bags.classes, "mlp", head="weno", options=recipe.options))
        fits.append(train(model, bags, bags.take([0, 1, 2, 3]), recipe.train_config))
    assert fits[0].progress.curve == fits[1].progress.curve
    for a, b in zip(fits[0].model.parameters(), fits[1].model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_training_from_image_files_is_training_from_memory(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (24, 6, 5, 3), dtype=np.uint8)
    for i, p in enumerate(pixels):
        Image.fromarray(p).save(tmp_path / f"{i}.png")
    files = pools.ImageFilePool([tmp_path / f"{i}.png" for i in range(24)], 6, 5, n_threads=2)
    assert (files.kind, len(files), files.shape, files.to("cpu")) == ("images", 24, (6, 5, 3), files)
    curves = []
    for pool in (Pool(pixels), files):
        bags = Bags.of(pool, sizes=[5, 9, 2, 8], labels=[0, 1, 1, 0], classes=2)
        torch.manual_seed(0)
        recipe = Recipe(backbone="mlp", epochs=3, batch_bags=2)
        fitted = train(Model(ModelConfig((6, 5, 3), bags.classes, "mlp")), bags, bags, recipe.train_config)
        curves.append((fitted.progress.curve, predict(fitted.model, bags).bag.tolist()))
    assert curves[0] == curves[1]
    (tmp_path / "3.png").write_bytes(b"no picture")
    with pytest.raises(HeadcountError, match=r"3.png: not an image, or damaged"):
        predict(fitted.model, bags)
    half = pools.ImageFilePool([tmp_path / "0.png"], 3, 4)
    assert half.take(torch.tensor([0])).shape == (1, 3, 4, 3)


def test_a_custom_sum_head_can_be_chunked():
    class Vote(SumHead):
        title = "Vote"

        def instance_terms(self, h):
            return self.classifier(h), self.classifier(h).softmax(1)

        def readout_sums(self, sums, total):
            return self.masked_log_softmax((sums / total[:, None]).log())

    bags = large_bags(weight=False)
    head, h = Vote(D, C), bags.pool.data[:180]
    target, segments = torch.eye(C)[:1], bags.take([0]).segments()
    nll(head(h, segments).bag, target).backward()
    assert why_not_chunkable(head, segments) == ""
    assert head.classifier.weight.grad.any()


def test_normalisation_is_fitted_in_parts(monkeypatch):
    """Mean and deviation of each feature, and of each channel, as numpy has them; a constant feature stays as it is."""
    monkeypatch.setattr(normalize, "_CHUNK", 7)
    rng = np.random.default_rng(0)
    x, pixels = rng.normal(3, 2, size=(50, 4)).astype(np.float32), rng.integers(0, 256, (50, 4, 5, 3), dtype=np.uint8)
    x[:, 1] = 5
    for data, flat in ((x, x), (pixels, pixels.reshape(-1, 3) / 255)):
        bags = Bags.of(Pool(data), sizes=[20, 30], labels=[0, 1], classes=2)
        learned = normalize.Normalize.fit(bags)
        std = flat.std(0)
        np.testing.assert_allclose(learned.mean, flat.mean(0), rtol=1e-5)
        np.testing.assert_allclose(learned.std, np.where(std > 1e-6, std, 1), rtol=1e-5)


def test_the_example_of_the_page_on_size(tmp_path, monkeypatch):
    page = (Path(__file__).parent.parent.parent / "docs" / "how-to" / "size.md").read_text()
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(page.split("```python\n")[1].split("```")[0], found)
    assert found["predictions"].instance.shape == (5000, 2)
    assert found["predictions"].bag.shape == (3, 2)
