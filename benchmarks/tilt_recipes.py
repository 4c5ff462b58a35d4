"""The rows of tilt's tables on photographs: each a name and a recipe.

The best recipe, the supervised twin, one change at a time, the paper's stem for several methods, corrupted bags.
photographs.py runs them, scoreboard.py makes the tables.
"""

from __future__ import annotations

from typing import Any

from headcount.errors import check_choice
from headcount.experiments.recipe import Recipe

BEST = Recipe.preset("tilt-photographs")  # the bag term is bounded and delayed for a deep network
OPTIONS = dict(BEST.options)
TWIN = {"over": "instances", "views": 2, "decay": 0.995}  # the same batches, views and moving average
PAPER = Recipe(precision="bf16")  # the paper's stem, optimizer and epochs, no augmentation
TRUE_SHARE = {"various": 0.55, "small": 0.25, "large": 0.8}  # for the row to which it is given


def with_options(recipe: Recipe, **options: Any) -> Recipe:
    return recipe.replace(options={**dict(recipe.options), **options})


def _epochs(factor: float) -> int:
    """Epochs for ``factor`` times as many instances: the same number of steps, but at least a quarter of the epochs."""
    return max(BEST.epochs // 4, round(BEST.epochs / max(1, factor)))


STEM = BEST.replace(backbone="resnet18")
NOT_AUGMENTED = STEM.replace(views="none", mirror=False, epochs=30)  # images without augmentation are memorised early
AUGMENTED = PAPER.replace(views="image", mirror=True)  # flips and shifts for methods with one view
GROUPS: dict[str, dict[str, Recipe]] = {
    "main": {"best": BEST},
    "twin": {"supervised twin": BEST.replace(head="supervised", options=TWIN)},
    "ablation": {
        "instance term only": with_options(BEST, teach=0.0, bag=0.0),
        "bag term only": with_options(BEST, instance=0.0, teach=0.0, bag=1.0, vote=0.0, over="bags"),
        "instance and bag term, no self-training": with_options(BEST, teach=0.0),
        "no bag term": with_options(BEST, bag=0.0),
        "bag term from the start": with_options(BEST, vote=0.0),
        "bag weight from shares and trust": with_options(BEST, bag="auto"),
        "no alignment": with_options(BEST, align=0.0),
        "class-wise thresholds": with_options(BEST, adapt=True),
        "threshold 0.8": with_options(BEST, threshold=0.8),
        "self-training from the start": with_options(BEST, start=0.05),
        "self-training late": with_options(BEST, start=0.6),
        "no fading": with_options(BEST, fade=1.0),
        "fading to 0": with_options(BEST, fade=0.0),
        "student is its own teacher": with_options(BEST, decay=0.0),
        "slow teacher": with_options(BEST, decay=0.999),
        "full rows of T": with_options(BEST, form="full"),
        "shares per label only": BEST.replace(options={k: v for k, v in OPTIONS.items() if k != "own"}),
        "last epoch kept": BEST.replace(selection="last"),
        "epochs evaluated at a temperature": with_options(BEST, tempered=True),
        "two networks": with_options(BEST.replace(backbone_options={"networks": 2}), networks=2),
        "four bags merged into one": BEST.replace(trouble={"merge": 4}, batch_bags=2),
        "majority share given": BEST,  # with the share of the scenario, see recipe_for
        "weak views only": BEST.replace(views="flip_crop"),
        "no views": BEST.replace(views="none", mirror=False),
        "ResNet18, 3x3 stem": BEST.replace(backbone="resnet18", backbone_options={"stem": "small"}),
        "ResNet18, 3x3 stem and pooling": BEST.replace(backbone="resnet18", backbone_options={"stem": "pool"}),
        "learning rate 0.1": BEST.replace(lr=0.1),
        "learning rate lowered twice": with_options(BEST.replace(schedule="twice"), start=0.5),
        "AdamW": BEST.replace(optimizer="adamw", lr=1e-3, weight_decay=0.05),
        "50 epochs": BEST.replace(epochs=50),
        "200 epochs": BEST.replace(epochs=200),
    },
    "footing": {  # the paper's stem: without and with augmentation
        "paper's stem, not augmented: tilt": NOT_AUGMENTED,
        "paper's stem, not augmented: supervised twin": NOT_AUGMENTED.replace(head="supervised", options={**TWIN, "views": 1}),
        "paper's stem, augmented: tilt": STEM,
        **{
            f"paper's stem, augmented{suffix}: {name}": recipe.replace(head=head, options=options)
            for suffix, recipe in {"": AUGMENTED, ", tilt's optimizer and epochs": STEM}.items()
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
            f"bags of {n}": BEST.replace(bag_size=n, batch_bags=512 // n, epochs=_epochs(n / 64))  # 512 instances a step
            for n in (8, 32, 128, 512)
        },
        **{
            f"{n} bags": BEST.replace(train_bags=n, valid_bags=max(20, n // 4), epochs=_epochs(n / 400))
            for n in (50, 200, 800, 3200)
        },
        "unequal classes": BEST.replace(trouble={"unequal": 10.0}),
        "a class that is never the majority": BEST.replace(trouble={"never": 9}),
    },
}
GROUPS["robust count"] = {  # the Counting Network beside it, 4,096 instances a step, 600 epochs where tilt has 100
    f"{name}, count": PAPER.replace(
        epochs=6 * r.epochs,
        batch_bags=4096 // r.bag_size,
        **{field: getattr(r, field) for field in ("bag_size", "train_bags", "valid_bags", "trouble")},
    )
    for name, r in {"not corrupted": BEST, **GROUPS["robust"]}.items()
}
RECIPES = {name: recipe for group in GROUPS.values() for name, recipe in group.items()}


def recipe_for(name: str, source: str, scenario: str, fold: int) -> Recipe:
    """A row's recipe for these data."""
    recipe = RECIPES[name].replace(source=source, scenario=scenario, fold=fold)
    if name == "majority share given":
        recipe = with_options(recipe, share=TRUE_SHARE[scenario])
    if source == "svhn":
        recipe = recipe.replace(views={"image": "digit", "flip_crop": "crop"}.get(recipe.views, recipe.views), mirror=False)
    return recipe


def parse_names(text: str) -> list[str]:
    """Names of rows and groups, separated by commas; by semicolons where a name has a comma of its own."""
    words = [text] if text in RECIPES else [word.strip() for word in text.split(";" if ";" in text else ",")]
    for word in words:
        check_choice("line", word, [*GROUPS, *RECIPES])
    return [name for word in words for name in GROUPS.get(word, [word])]
