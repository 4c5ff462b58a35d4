"""The lines of tilt's tables on photographs: each a name and a recipe.

The best recipe, the twin that is told every instance, one change at a time, equal footing with the paper's methods, trouble.
photographs.py runs them, scoreboard.py sums up what they reached.
"""

from __future__ import annotations

from typing import Any

from headcount.errors import check_choice
from headcount.experiments.recipe import Recipe

OPTIONS = {
    "over": "instances", "form": "one", "decay": 0.995, "threshold": 0.95, "adapt": False, "align": 1.0, "start": 0.3,
    "fade": 0.3, "bag": 0.05, "vote": 0.5, "doubt": 0.01,  # the bag term, as a deep network can bear it
    "own": 1.0,
}  # fmt: skip
BEST = Recipe(
    head="tilt", options=tuple(OPTIONS.items()), backbone="quick", epochs=100, batch_bags=8, batch_instances=512,
    optimizer="sgd", lr=0.2, weight_decay=1e-3, decay="weights", schedule="cosine", warmup=0.05, views="image",
    selection="mean", mirror=True, precision="bf16",
)  # fmt: skip
TWIN = {"over": "instances", "views": 2, "decay": 0.995}  # the same batches, views and moving average
PAPER = Recipe(precision="bf16")  # the paper's stem, optimizer and epochs, no augmentation
TRUE_SHARE = {"various": 0.55, "small": 0.25, "large": 0.8}  # for the line that is given it


def but(recipe: Recipe, **options: Any) -> Recipe:
    return recipe.replace(options={**dict(recipe.options), **options})


def _epochs(times: float) -> int:
    """Of a training on so many times as many instances: as many steps, and at least a quarter of the epochs."""
    return max(BEST.epochs // 4, round(BEST.epochs / max(1, times)))


STEM = BEST.replace(backbone="resnet18")
BARE = STEM.replace(views="none", mirror=False, epochs=30)  # what is seen unchanged is soon known by heart
AUGMENTED = PAPER.replace(views="image", mirror=True)  # flips and shifts, for those who ask for one view
GROUPS: dict[str, dict[str, Recipe]] = {
    "main": {"best": BEST},
    "twin": {"supervised twin": BEST.replace(head="supervised", options=TWIN)},
    "ablation": {
        "instance term alone": but(BEST, teach=0.0, bag=0.0),
        "bag term alone": but(BEST, instance=0.0, teach=0.0, bag=1.0, vote=0.0, over="bags"),
        "instance and bag term, no teaching": but(BEST, teach=0.0),
        "no bag term": but(BEST, bag=0.0),
        "bag term from the beginning": but(BEST, vote=0.0),
        "bag term as shares and validation say": but(BEST, bag="auto"),
        "no alignment": but(BEST, align=0.0),
        "thresholds for each class": but(BEST, adapt=True),
        "threshold 0.8": but(BEST, threshold=0.8),
        "taught from the beginning": but(BEST, start=0.05),
        "taught late": but(BEST, start=0.6),
        "no fading": but(BEST, fade=1.0),
        "fading to nought": but(BEST, fade=0.0),
        "teacher is the pupil": but(BEST, decay=0.0),
        "slow teacher": but(BEST, decay=0.999),
        "tilt of full rows": but(BEST, form="full"),
        "shares of the label alone": BEST.replace(options={k: v for k, v in OPTIONS.items() if k != "own"}),
        "last epoch kept": BEST.replace(selection="last"),
        "epochs judged under a temperature": but(BEST, tempered=True),
        "two networks": but(BEST.replace(backbone_options={"networks": 2}), networks=2),
        "bags merged by four": BEST.replace(trouble={"merge": 4}, batch_bags=2),
        "tilt given": BEST,  # its share is filled in by scenario
        "weak views only": BEST.replace(views="flip_crop"),
        "no views": BEST.replace(views="none", mirror=False),
        "ResNet18, 3x3 stem": BEST.replace(backbone="resnet18", backbone_options={"stem": "small"}),
        "ResNet18, 3x3 stem and pooling": BEST.replace(backbone="resnet18", backbone_options={"stem": "pool"}),
        "rate 0.1": BEST.replace(lr=0.1),
        "rate down twice": but(BEST.replace(schedule="twice"), start=0.5),
        "AdamW": BEST.replace(optimizer="adamw", lr=1e-3, weight_decay=0.05),
        "50 epochs": BEST.replace(epochs=50),
        "200 epochs": BEST.replace(epochs=200),
    },
    "footing": {  # the paper's stem: without augmentation and with it
        "paper's stem, nothing else: tilt": BARE,
        "paper's stem, nothing else: supervised twin": BARE.replace(head="supervised", options={**TWIN, "views": 1}),
        "paper's stem, augmented: tilt": STEM,
        **{
            f"paper's stem, augmented{how}: {name}": recipe.replace(head=head, options=options)
            for how, recipe in {"": AUGMENTED, ", tilt's optimizer and epochs": STEM}.items()
            for name, head, options in (
                ("count", "count", {}),
                ("Output+Mean (nll)", "output_mean", {"form": "nll"}),
                ("bag label", "noisy_label", {}),
            )
        },
    },
    "robust": {
        **{f"{r:.0%} wrong labels": BEST.replace(trouble={"wrong": r}) for r in (0.1, 0.2, 0.3)},
        **{
            f"bags of {n}": BEST.replace(
                bag_size=n, batch_bags=512 // n, epochs=_epochs(n / 64)
            )  # 512 instances a step
            for n in (8, 32, 128, 512)
        },
        **{
            f"{n} bags": BEST.replace(train_bags=n, valid_bags=max(20, n // 4), epochs=_epochs(n / 400))
            for n in (50, 200, 800, 3200)
        },
        "unequal classes": BEST.replace(trouble={"unequal": 10.0}),
        "a class that never wins": BEST.replace(trouble={"never": 9}),
    },
}
GROUPS["robust count"] = {  # the Counting Network beside it, 4,096 instances a step, 600 epochs where tilt has 100
    f"{name}, count": PAPER.replace(
        epochs=6 * r.epochs,
        batch_bags=4096 // r.bag_size,
        **{what: getattr(r, what) for what in ("bag_size", "train_bags", "valid_bags", "trouble")},
    )
    for name, r in {"no trouble": BEST, **GROUPS["robust"]}.items()
}
LINES = {name: recipe for group in GROUPS.values() for name, recipe in group.items()}


def line(name: str, source: str, scenario: str, fold: int) -> Recipe:
    """A line's recipe for these data."""
    recipe = LINES[name].replace(source=source, scenario=scenario, fold=fold)
    if name == "tilt given":
        recipe = but(recipe, share=TRUE_SHARE[scenario])
    if source == "svhn":
        recipe = recipe.replace(
            views={"image": "digit", "flip_crop": "crop"}.get(recipe.views, recipe.views), mirror=False
        )
    return recipe


def names_of(text: str) -> list[str]:
    """Lines by name, groups as their lines. Some names have commas: those stand alone, or between semicolons."""
    words = [text] if text in LINES else [word.strip() for word in text.split(";" if ";" in text else ",")]
    for word in words:
        check_choice("line", word, [*GROUPS, *LINES])
    return [name for word in words for name in GROUPS.get(word, [word])]
