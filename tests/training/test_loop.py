"""fit(): it learns, it never sees truth, it stops when told, and it goes on bit for bit after any interruption."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress

import numpy as np
import pytest
import torch

from headcount.bags import Bags, Pool
from headcount.bags.bags import fingerprint
from headcount.datasets.registry import load_source
from headcount.errors import HeadcountError, HeadcountWarning
from headcount.experiments import run as runs
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.models.backbones import Normalize
from headcount.models.network import Model, ModelConfig, build_model
from headcount.models.predictions import predict
from headcount.training import augment, loop
from headcount.training.config import TrainConfig, lr_factor
from headcount.training.loader import BagLoader
from headcount.training.loop import load_checkpoint, save_checkpoint
from headcount.training.trainer import Trainer, TrainProgress
from training_cases import (
    CUSTOM_HEAD,
    TINY,
    Interrupted,
    check_resuming,
    have_equal_weights,
    model_and_bags,
    train_recipe,
    train_until,
)


def test_it_learns_instances_from_majorities():
    recipe = TINY.replace(bag_size=24, train_bags=120, valid_bags=30, test_bags=30, epochs=40, lr=1e-3, batch_bags=16)
    model, train, valid = model_and_bags(recipe)
    fitted = loop.train(model, train, valid, recipe.train_config)
    test = runs.make_bags(recipe)["test"]
    right = (predict(fitted.model, test).instance.argmax(1) == test.truth).float().mean()
    assert right > 0.75  # chance is 0.1
    assert 1 <= fitted.progress.best_epoch <= 40
    assert fitted.progress.best == min(valid for _, valid in fitted.progress.curve)


def test_a_finished_training_leaves_nothing_behind(monkeypatch):
    """Freed at once, without the collector of cycles: on a GPU, gigabytes of captured graphs would wait for it."""
    kept, release = [], Trainer.release

    def watched(state):
        objects = (state, state.model, state.train_loader, *state.optimizers.values(), *state.model.parameters())
        kept[:] = [weakref.ref(x) for x in objects]
        release(state)

    monkeypatch.setattr(Trainer, "release", watched)
    model_and_recipe = (*model_and_bags(TINY), TINY.replace(epochs=1).train_config)
    loop.train(*model_and_recipe)  # the first one in a process imports what keeps frames
    gc.collect()
    gc.disable()
    try:
        loop.train(*model_and_recipe)
        assert len(kept) > 4
        assert [x() for x in kept if x() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("part", ["train", "valid"])
def test_truth_is_refused(part):
    bags = runs.make_bags(TINY)
    given = {name: b if name == part else b.blind() for name, b in bags.items()}
    model = runs.initial_model(TINY, bags["train"].blind())
    with pytest.raises(HeadcountError, match=r"carry truth.*blind"):
        loop.train(model, given["train"], given["valid"], TINY.train_config)


def test_truth_does_not_change_the_weights():
    """Permuting the instances' true classes inside the pool's truth leaves training as it was, bit for bit."""
    model, train, valid = model_and_bags(TINY)
    a = loop.train(model, train, valid, TINY.train_config).model
    bags = runs.make_bags(TINY)
    lying = Bags(**{**vars(bags["train"]), "truth": bags["train"].truth.flip(0)})
    b = loop.train(runs.initial_model(TINY, lying.blind()), lying.blind(), valid, TINY.train_config).model
    assert have_equal_weights(a, b)


def test_equal_seeds_give_equal_weights():
    fits = [train_recipe(r).model for r in (TINY, TINY, TINY.replace(seed=1))]
    assert have_equal_weights(fits[0], fits[1])
    assert not have_equal_weights(fits[0], fits[2])


def test_every_fold_and_removal_starts_from_the_same_weights():
    models = [
        runs.initial_model(r, runs.make_bags(r)["train"].blind())
        for r in (TINY, TINY.replace(fold=3), TINY.replace(removal=0.5))
    ]
    for other in models[1:]:
        assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), other.parameters(), strict=True))


def test_validation_loss_is_the_official_one():
    """Batches of 64 and 36 weigh the same, so a bag of the last batch counts 1.78 times; ``mean`` repairs that."""
    recipe = TINY.replace(valid_bags=10, batch_bags=8)
    model, train, valid = model_and_bags(recipe)
    state = Trainer(model, train, valid, recipe.train_config)
    official = float(state.valid_loss())
    each = []
    for which in (range(8), range(8, 10)):
        part = valid.take(list(which))
        with torch.no_grad():
            output = model.eval()(part.pool.take(part.index), part.segments())
        p = (output.bag.exp() + 1e-8).log()
        each.append(-(part.target * p).sum(1) / 10)
    assert official == pytest.approx(float((each[0].mean() + each[1].mean()) / 2), rel=1e-5)
    plain = Trainer(model, train, valid, recipe.replace(selection="mean").train_config)
    assert float(plain.valid_loss()) == pytest.approx(float(torch.cat(each).mean()), rel=1e-5)


def test_patience():
    recipe = TINY.replace(epochs=200, patience=3, lr=0.05)
    progress = train_recipe(recipe).progress
    assert progress.epoch == progress.best_epoch + 3 < 200


def test_the_last_epoch_is_kept_if_asked_for():
    recipe = TINY.replace(epochs=30, lr=0.01, selection="mean")
    chosen, last = (train_recipe(r) for r in (recipe, recipe.replace(selection="last")))
    assert chosen.progress.best_epoch < 30 == last.progress.best_epoch
    assert last.progress.best > chosen.progress.best
    state = Trainer(*model_and_bags(recipe), recipe.train_config)
    for epoch in range(30):
        state.train_epoch(epoch)
    for own, then in zip(last.model.parameters(), state.eval_model.parameters(), strict=True):
        assert torch.equal(own, then)
    with pytest.raises(HeadcountError, match="give one of the two"):
        recipe.replace(selection="last", patience=3)


def test_a_last_epoch_with_a_nan_loss_is_not_kept():
    recipe = TINY.replace(selection="last")
    state, progress = Trainer(*model_and_bags(recipe), recipe.train_config), TrainProgress()
    state.record_epoch(progress, 1.0, 2.0)
    state.record_epoch(progress, 1.0, float("nan"))
    assert (progress.epoch, progress.best_epoch, progress.best) == (2, 1, 2.0)


def test_last_short_batch_is_kept():
    feed = BagLoader(model_and_bags(TINY)[1], 8)
    sizes = [len(w) for w in feed.shuffled("bags", 0, 0)]
    assert sizes == [8, 8, 8, 6]
    assert sorted(torch.cat(feed.shuffled("bags", 0, 0)).tolist()) == list(range(30))
    assert sorted(torch.cat(feed.shuffled("instances", 0, 5)).tolist()) == list(range(240))


def test_removed_instances_stay_in_the_batch_and_dropped_ones_do_not():
    _, train, _ = model_and_bags(TINY)
    gone = torch.arange(240) % 8 == 3
    x, batch = BagLoader(train.without(gone), 8).batch(torch.arange(8))
    assert len(x) == 64
    assert batch.segments.total_weight().tolist() == [7] * 8
    assert len(BagLoader(train.without(gone).drop_removed(), 8).batch(torch.arange(8))[0]) == 56


def test_ragged_bags_train():
    rng = np.random.default_rng(0)
    pool = Pool(rng.normal(size=(60, 4)).astype(np.float32))
    bags = Bags.of(pool, sizes=[5, 9, 2, 14, 1, 29], labels=[0, 1, 2, 0, -1, 1], classes=3)
    model, recipe = (
        Model(ModelConfig((4,), bags.classes, "linear")),
        TINY.replace(backbone="linear", epochs=30, lr=0.05, batch_bags=4),
    )
    progress = loop.train(model, bags, bags.take([0, 1, 4]), recipe.train_config).progress
    assert progress.curve[-1][0] < progress.curve[0][0]


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("schedule", ["constant", "cosine", "twice"])
def test_optimizers_and_schedules(optimizer, schedule):
    recipe = TINY.replace(optimizer=optimizer, schedule=schedule, warmup=0.2, weight_decay=0.01, epochs=8)
    recipe = recipe.replace(lr=0.01 if optimizer == "sgd" else 0.001)
    curve = train_recipe(recipe).progress.curve
    assert curve[-1][0] < curve[0][0]


def test_schedule_shape():
    assert lr_factor("constant", 0.0, 0.7) == 1
    assert lr_factor("cosine", 0.0, 0.5) == pytest.approx(0.5)
    assert lr_factor("cosine", 0.2, 0.2) == 1
    assert lr_factor("twice", 0.2, 0.2) == 1
    assert lr_factor("twice", 0.1, 0.499999) == pytest.approx(0, abs=1e-6)
    assert lr_factor("twice", 0.1, 0.5) == 0.5
    assert lr_factor("twice", 0.1, 0.75) == pytest.approx(0.25)


@pytest.mark.parametrize("kind", ["crop", "flip_crop"])
def test_views_of_images(kind):
    recipe = TINY.replace(views=kind, epochs=2)
    assert np.isfinite(train_recipe(recipe).progress.curve).all()


def test_rectangles_are_cropped_too():
    x = torch.rand(5, 3, 64, 4, generator=torch.Generator().manual_seed(0))
    for side in (x, x.transpose(2, 3), x[:, :, :1]):
        assert augment.crop(side).shape == side.shape


def test_no_step_has_a_single_instance():
    """Batch-norm could not learn from it."""
    pool = Pool(np.random.default_rng(0).integers(0, 256, (9, 8, 8, 1), dtype=np.uint8))
    bags = Bags.of(pool, sizes=[1] * 9, labels=[0, 1, 2] * 3, classes=3)
    recipe = TINY.replace(backbone="resnet18", backbone_options={"width": 4}, epochs=1, batch_bags=4)
    assert np.isfinite(
        loop.train(
            build_model(recipe.model_config(bags), bags, seed=recipe.seed), bags, bags, recipe.train_config
        ).progress.curve
    ).all()
    feed = BagLoader(bags, 4, batch_instances=8)
    assert [feed.step_sizes(over) for over in ("bags", "instances")] == [[4, 5], [9]]
    pairs = BagLoader(Bags.of(pool, index=[0] * 18, sizes=[2] * 9, labels=[0] * 9, classes=3), 4, batch_instances=18)
    assert [pairs.step_sizes(over) for over in ("bags", "instances")] == [[4, 4, 1], [18]]
    assert [pairs.n_steps(over) for over in ("bags", "instances")] == [3, 1]


def test_bf16_trains_on_the_cpu():
    recipe = TINY.replace(precision="bf16", epochs=2)
    assert np.isfinite(train_recipe(recipe).progress.curve).all()


# -- interrupted ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe",
    [
        TINY,
        TINY.replace(head=CUSTOM_HEAD, views="crop", epochs=5),
        TINY.replace(optimizer="sgd", schedule="cosine", backbone_options={"dropout": 0.3}),
        TINY.replace(optimizer="adamw", patience=3, lr=0.05, epochs=30),
        TINY.replace(backbone="quick", backbone_options={"width": 8}, epochs=5),
        TINY.replace(backbone="quick", backbone_options={"width": 8}, epochs=5, optimizer="sgd"),
    ],
    ids=["count", "toy", "sgd", "adamw", "convolutions", "convolutions, sgd"],
)
def test_resumes_bit_for_bit(recipe, tmp_path):
    check_resuming(recipe, tmp_path)


@pytest.mark.parametrize("step", [4, 6, 11])
def test_interrupted_in_the_middle_of_an_epoch(tmp_path, monkeypatch, step):
    """Four steps an epoch: what the torn epoch had learned is not taken for a finished one's."""
    whole = train_recipe(TINY)
    steps, real = iter(range(1, 100)), Trainer.step

    def torn(self, *given):
        if next(steps) == step:
            raise KeyboardInterrupt
        return real(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", torn)
        with pytest.raises(KeyboardInterrupt):
            train_recipe(TINY, work_dir=tmp_path)
    again = train_recipe(TINY, work_dir=tmp_path)
    assert have_equal_weights(whole.model, again.model)
    assert whole.progress.curve == again.progress.curve


def test_checkpoints_of_other_configurations_or_broken_ones_are_ignored(tmp_path):
    train_until(TINY, tmp_path, 3)
    other = TINY.replace(lr=1e-3)
    assert train_recipe(other, work_dir=tmp_path).progress.curve == train_recipe(other).progress.curve
    train_until(TINY, tmp_path, 5)
    file = tmp_path / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.warns(HeadcountWarning, match=r"the training starts from the beginning: cannot read .*checkpoint\.safetensors"):
        assert train_recipe(TINY, work_dir=tmp_path).progress.curve == train_recipe(TINY).progress.curve


def test_losses_are_not_written_into_a_pipe(tmp_path):
    """To open one would wait for a reader for ever."""
    file, curve = tmp_path / "metrics.jsonl", [(2.0, 3.0), (1.0, 2.0)]
    os.mkfifo(file)
    for written in (0, 1):
        with pytest.raises(HeadcountError, match="not a file"):
            loop.write_losses(tmp_path, curve, written)
    file.unlink()
    loop.write_losses(tmp_path, curve)
    loop.write_losses(tmp_path, [*curve, (0.5, 1.0)], written=2)
    assert file.read_text().splitlines()[1:] == [
        '{"epoch": 2, "train_loss": 1.0, "valid_loss": 2.0}',
        '{"epoch": 3, "train_loss": 0.5, "valid_loss": 1.0}',
    ]


def test_checkpoints_of_other_versions_are_ignored(tmp_path):
    train_until(TINY, tmp_path, 3)
    file = tmp_path / "checkpoint.safetensors"
    tensors, facts = load_checkpoint(file)
    save_checkpoint(file, tensors | {"model.head.forgotten_since": torch.zeros(1)}, facts)
    whole = train_recipe(TINY)
    assert train_recipe(TINY, work_dir=tmp_path).progress.curve == whole.progress.curve
    train_until(TINY, tmp_path, 3)
    name = next(name for name in tensors if name.startswith("best.head"))
    save_checkpoint(file, {k: v for k, v in tensors.items() if k != name}, facts)
    assert train_recipe(TINY, work_dir=tmp_path).progress.curve == whole.progress.curve


def features(shift=0.0, **more):
    x = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
    given = {"labels": [0, 1, 2, 0, 1, 2], "classes": 3, "sizes": [4] * 6, **more}
    return Bags.of(Pool(x + np.float32(shift)), **given)


def test_checkpoints_of_other_bags_or_weights_are_ignored(tmp_path):
    """Whatever source the recipe names: it is not asked for, here or over the network."""
    recipe = Recipe(backbone="mlp", epochs=4, batch_bags=2)
    one = features()

    def epochs(work, train, stop=0, seed=0):
        seen, model = [], build_model(recipe.model_config(one), one, seed=seed)

        def watch(progress):
            seen.append(progress.epoch)
            if progress.epoch == stop:
                raise Interrupted

        with suppress(Interrupted):
            loop.train(model, train, one, recipe.train_config, work_dir=str(work), on_progress=watch, checkpoint_seconds=0)
        return seen

    others = {"features": features(1.0), "labels": features(labels=[0, 1, 2, 0, 1, 1]), "sizes": features(sizes=[3, 5] * 3)}
    for name, train in {**others, "none": features()}.items():
        assert epochs(tmp_path / name, one, stop=2) == [1, 2]
        assert epochs(tmp_path / name, train) == ([3, 4] if name == "none" else [1, 2, 3, 4])
    assert epochs(tmp_path / "weights", one, stop=2) == [1, 2]
    assert epochs(tmp_path / "weights", one, seed=1) == [1, 2, 3, 4], "it began from other weights"


def test_a_pool_on_disk_is_sampled_for_its_fingerprint(monkeypatch):
    bags, taken = features(), []
    whole = fingerprint(bags, 5)
    assert whole == fingerprint(features(), 5) != fingerprint(features(1.0), 5)
    bags.pool.on_disk = True
    monkeypatch.setattr(Pool, "take", lambda self, rows: taken.append(rows) or self.data[rows])
    assert fingerprint(bags, 5) == fingerprint(bags, 5) != whole
    assert taken[0].tolist() == [0, 5, 11, 17, 23]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"train": {"labels": [-1] * 6}}, "no training bag has a label"),
        ({"valid": {"labels": [-1] * 6}}, "no validation bag has a label to choose an epoch by; .*selection=last"),
        ({"train": {"classes": 5}}, "the training bags have the classes 0, 1, 2, 3, 4, the model 0, 1, 2; give the same"),
        ({"valid": {"classes": ["2", "1", "0"]}}, "the validation bags have the classes 2, 1, 0, the model 0, 1, 2"),
        ({"recipe": {"views": "image"}}, "views=image are for images, and the instances are features"),
    ],
)
def test_incompatible_models_bags_and_configurations_are_refused(change, says):
    recipe = Recipe(backbone="mlp", epochs=1)
    model = build_model(recipe.model_config(features()), features(), seed=recipe.seed)
    given = [features(**change.get(part, {})) for part in ("train", "valid")]
    with pytest.raises(HeadcountError, match=says):
        loop.train(model, *given, recipe.replace(**change.get("recipe", {})).train_config)


def test_bags_of_another_shape_are_refused_and_the_last_epoch_needs_no_labels():
    recipe = Recipe(backbone="mlp", epochs=2, selection="last")
    model, silent = (build_model(recipe.model_config(features()), features(), seed=recipe.seed), features(labels=[-1] * 6))
    assert loop.train(model, features(), silent, recipe.train_config).progress.best_epoch == 2
    wide = Bags.of(Pool(np.zeros((4, 7), np.float32)), sizes=[4], labels=[0], classes=3)
    with pytest.raises(HeadcountError, match=r"training bags has shape \(7,\), the model was built for \(3,\)"):
        loop.train(model, wide, wide, recipe.train_config)
    with pytest.raises(HeadcountError, match="there are no validation bags"):
        loop.train(model, features(), features().take([]), recipe.train_config)


def test_a_custom_head_with_two_passes_a_teacher_and_memory():
    recipe = TINY.replace(head=CUSTOM_HEAD, views="crop", epochs=3)
    model, train, valid = model_and_bags(recipe)
    state = Trainer(model, train, valid, recipe.train_config)
    before = {k: v.clone() for k, v in state.model.state_dict().items()}
    state.train_epoch(0)
    head = state.head
    assert head.bag_visits.tolist() == [2.0] * 30, "each bag twice, once per view"
    assert (head.confidence > 0).all()
    for name, value in state.model.state_dict().items():
        if name.startswith(("backbone", "head.classifier", "head.student")):
            assert not torch.equal(before[name], value), name
    teacher = dict(state.teacher.named_parameters())
    for name, p in state.model.named_parameters():
        assert not torch.equal(teacher[name], p), "the teacher lags behind"
    assert set(state.optimizers) == {"backbone", "head.classifier", "head.student"}


@pytest.mark.soak
def test_a_killed_training_resumes(tmp_path):
    """SIGKILL in the middle of training, twice, through the command line: the record is that of an undisturbed run."""
    recipe = TINY.replace(head=CUSTOM_HEAD, views="crop", epochs=120)  # so many that no kill comes too late
    options = {k: v for k, v in recipe.changes.items() if k not in ("source", "bag_size", "epochs", "head")}
    command = [sys.executable, "-m", "headcount", "run", "--source", "digits", "--bag-size", "8", "--epochs", "120"]
    command += ["--head", CUSTOM_HEAD, "--device", "cpu", *(w for k, v in options.items() for w in ("--set", f"{k}={v}"))]
    env = {**os.environ, "HEADCOUNT_CHECKPOINT_SECONDS": "0.05"}
    work = tmp_path / "torn" / "running" / recipe.key
    for least in (5, 30):
        child = subprocess.Popen([*command, "--out", str(tmp_path / "torn")], env=env, stdout=subprocess.DEVNULL)
        log, deadline = work / "metrics.jsonl", time.monotonic() + 60
        while time.monotonic() < deadline and not (log.exists() and log.read_text().count("\n") >= least):
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, "it ended before it could be killed"
        assert (work / "checkpoint.safetensors").exists()
    subprocess.run([*command, "--out", str(tmp_path / "torn")], env=env, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*command, "--out", str(tmp_path / "whole")], check=True, stdout=subprocess.DEVNULL)
    torn, whole = (Record.read(tmp_path / w / f"{recipe.key}.json") for w in ("torn", "whole"))
    assert torn.data | {"provenance": {}} == whole.data | {"provenance": {}}
    assert not (tmp_path / "torn" / "running").exists()


def test_digits_is_what_it_was():
    assert load_source("digits").checksum.startswith("0b7e9c32")


@pytest.mark.parametrize("head", ["attention", "count", "tilt"])
@pytest.mark.parametrize("batch_bags", [1, 3])
def test_standard_features_are_not_copied_and_nothing_changes(head, batch_bags, monkeypatch):
    """Mean 0 and deviation 1 change no number; and training must not write into the features, which are the user's."""
    bags = ragged_features()
    before, losses = bags.pool.data.clone(), []
    for constants in ({"mean": torch.zeros(6), "std": torch.ones(6)},) * 2:
        model = build_model(ModelConfig.for_bags(bags, backbone="mlp", head=head), bags, **constants)
        result = loop.train(model, bags, bags, TrainConfig(epochs=3, batch_bags=batch_bags, views="none"), compile="off")
        losses.append((result.progress.curve, result.model.state_dict()))
        monkeypatch.setattr(Normalize, "is_identity", False)
    assert losses[0][0] == losses[1][0]
    assert all(torch.equal(v, losses[1][1][k]) for k, v in losses[0][1].items())
    assert torch.equal(bags.pool.data, before)


def ragged_features():
    g = np.random.default_rng(0)
    return Bags.of(
        Pool(g.normal(size=(40, 6)).astype(np.float32)), sizes=[4, 9, 1, 6, 12, 8], labels=[0, 1, 2, 0, 1, 2], classes=3
    )


def test_a_batch_of_one_bag_is_that_bag():
    for bags in (ragged_features(), ragged_features().without(np.arange(40) % 5 == 0)):
        one, several = BagLoader(bags, 1), BagLoader(bags, 6)
        x, batch = several.batch(torch.arange(6))
        start = 0
        for b, size in enumerate(bags.sizes.tolist()):
            single, info = one.batch(torch.tensor([b]))
            rows = slice(start, start + size)
            assert torch.equal(single, x[rows])
            assert torch.equal(info.position, batch.position[rows])
            assert torch.equal(info.segments.removed, batch.segments.removed[rows])
            assert torch.equal(info.target[0], batch.target[b])
            torch.testing.assert_close(info.segments.sum(single)[0], batch.segments.sum(x)[b])
            start += size


def test_a_backbone_without_parameters(tmp_path):
    """WENO trains backbone and head by optimizers of their own, and linear has no weights; stopped and taken up too."""
    recipe = TINY.replace(head="weno", backbone="linear", options={"width": 8, "student_width": 8}, epochs=3)
    whole = train_recipe(recipe).model

    def stop(progress: TrainProgress) -> None:
        if progress.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_recipe(recipe, work_dir=tmp_path, on_progress=stop)
    assert have_equal_weights(whole, train_recipe(recipe, work_dir=tmp_path).model)
    assert not have_equal_weights(whole, model_and_bags(recipe)[0])
