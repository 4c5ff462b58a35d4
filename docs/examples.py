"""What the pages of public objects say beyond their docstrings: parameters, returns and examples. A test runs the examples."""

_BAGS = """>>> import headcount as hc
>>> bags = hc.Bags.of(hc.Pool([[0.0], [0.1], [5.0], [5.2], [0.2]]), sizes=[2, 3], labels=[0, 1], classes=["low", "high"])
"""

EXTRA = {
    "Bags": """
Parameters
----------
pool : Pool
    The instances, shared by all bags made from it.
index : Tensor
    (N,) addresses into the pool, bag after bag.
offsets : Tensor
    (B + 1,) where each bag begins and ends in ``index``.
target : Tensor
    (B, C) one-hot labels, votes as shares, or rows of zeros for unlabelled bags.
classes : tuple of str
    Names of the classes.
weight, counted, group, names, known, truth, removed, label_noise : optional
    Per instance a weight, supervision (``known``), the class for scoring only (``truth``), and whether it is removed; per bag its
    group and name; per class whether it counts in the vote; the probability with which each label was replaced by one at random.
""",
    "Output": f"""
Parameters
----------
instance : Tensor
    (N, C) logits of the instances.
bag : Tensor
    (B, C) log-probabilities of the bags' labels.
parts : mapping
    What the head's own loss needs, by name.

Examples
--------
{_BAGS}>>> output = hc.predict(hc.Model(hc.ModelConfig.for_bags(bags, backbone="linear")), bags)
>>> output.instance.shape, output.bag.exp().sum(1).round().tolist()
(torch.Size([5, 2]), [1.0, 1.0])
""",
    "HeadcountError": """
Examples
--------
>>> import headcount as hc
>>> try:
...     hc.load_source("no-such-set")
... except hc.HeadcountError as e:
...     print(type(e).__name__)
HeadcountError
""",
    "Protocol": """
Examples
--------
>>> import headcount as hc
>>> small = hc.Protocol("small", bag_size=8, train_bags=20, valid_bags=10, test_bags=10)
>>> {name: len(bags) for name, bags in hc.majority_bags(hc.load_source("digits"), fold=0, protocol=small).items()}
{'train': 20, 'valid': 10, 'test': 10}
""",
    "majority_bags": """
Returns
-------
dict of str to Bags
    ``train``, ``valid`` and ``test``. Their ``truth`` is for scoring: training takes ``bags["train"].blind()``.
""",
    "load_source": """
Returns
-------
Source
    ``data`` (n, ...), ``truth`` (n,), ``classes`` and a checksum.

Examples
--------
>>> import headcount as hc
>>> digits = hc.load_source("digits")
>>> len(digits), digits.data.shape[1:], digits.classes[:3]
(1797, (8, 8, 1), ('0', '1', '2'))
""",
    "run": """
Returns
-------
Record
    The recipe, its scores, the data and the training, as written to ``out``.

Examples
--------
>>> import tempfile
>>> import headcount as hc
>>> small = hc.Recipe(source="digits", backbone="linear", bag_size=8, train_bags=8, valid_bags=4, test_bags=4, epochs=1)
>>> record = hc.run(small, tempfile.mkdtemp(), device="cpu")
>>> sorted(record.scores)[:3]
['bag_accuracy', 'consistency_rate', 'instance_accuracy']
""",
    "study": """
Parameters
----------
recipes : iterable of Recipe
    What to run.
out : path
    Folder of the records. A second call runs only what has no record.

Returns
-------
StudyResult
    The records in the order of the recipes, and what failed.

Examples
--------
>>> import tempfile
>>> import headcount as hc
>>> small = hc.Recipe(source="digits", backbone="linear", bag_size=8, train_bags=8, valid_bags=4, test_bags=4, epochs=1)
>>> result = hc.study(hc.grid(small, fold=range(2)), tempfile.mkdtemp(), device="cpu")
>>> len(result.records), result.failed
(2, {})
""",
    "grid": """
Parameters
----------
base : Recipe
    The fields that do not vary.
**axes : iterable
    The values of each field that varies.

Returns
-------
list of Recipe
    One for each combination.
""",
    "BagDataset": """
Examples
--------
>>> import headcount as hc
>>> table = {"bag": ["a", "a", "b", "b"], "label": ["x", "x", "y", "y"], "size": [1.0, 2.0, 8.0, 9.0]}
>>> dataset = hc.read(table)
>>> dataset
BagDataset(table: 2 bags, 4 instances, 2 classes)
>>> dataset.to_bags(dataset.fit_preprocessor()).pool.shape
(1,)
""",
    "Model": """
Parameters
----------
config : ModelConfig
    Backbone, head, classes and the shape of an instance.
normalize : Normalize, optional
    Mean and standard deviation of stored instances; :func:`headcount.build_model` takes them from training bags.
""",
    "SumHead": """
Parameters
----------
dim : int
    Features of an instance.
classes : int
    Number of classes.
counted : Tensor, optional
    (C,) which classes count in the vote; by default all.
""",
    "build_head": """
Returns
-------
Head
""",
    "ModelConfig": f"""
Examples
--------
{_BAGS}>>> config = hc.ModelConfig.for_bags(bags, backbone="mlp", head="tilt")
>>> config.shape, config.classes, config.head
((1,), ('low', 'high'), 'tilt')
""",
    "build_model": """
Returns
-------
Model
""",
    "predict": """
Parameters
----------
model : Model
    A network, such as ``train(...).model``.
bags : Bags
    Bags over instances of the model's shape.
keep : tuple of str
    Parts of the output to return.
batch_instances : int
    How many instances go through the network at once.

Returns
-------
Output
""",
    "predict_instances": f"""
Parameters
----------
model : Model
    A network.
x : Tensor
    (n, ...) instances of the model's shape.
batch_instances : int
    How many go through the network at once.

Returns
-------
Tensor
    (n, C) logits.

Examples
--------
{_BAGS}>>> model = hc.Model(hc.ModelConfig.for_bags(bags, backbone="linear"))
>>> hc.predict_instances(model, bags.pool.take(bags.index)).softmax(1).shape
torch.Size([5, 2])
""",
    "prototypes": """
Parameters
----------
h : Tensor
    (N, D) features of the instances.
votes, bag : Tensor
    (N,) predicted class, and number of the bag.
label, bag_prediction : Tensor
    (B,) given and predicted label of the bags.
classes : int
    Number of classes.
bags : {"correct", "all"}
    Which bags count.
distance : {"euclidean", "cosine"}
    The distance for which the prototypes are.

Returns
-------
Prototypes
    A mean for each class that has one.

Examples
--------
>>> import torch
>>> import headcount as hc
>>> h, votes, bag = torch.tensor([[0.0], [2.0], [9.0]]), torch.tensor([0, 0, 1]), torch.tensor([0, 0, 0])
>>> hc.prototypes(h, votes, bag, label=torch.tensor([0]), bag_prediction=torch.tensor([0]), classes=2).centre[0].tolist()
[1.0]
""",
    "dissenters": """
Parameters
----------
distance : Tensor
    (N,) distance of each instance to its bag's prototype.
votes, bag : Tensor
    (N,) predicted class, and number of the bag.
label : Tensor
    (B,) label of the bags.
removal : float
    The share r to remove.

Returns
-------
Tensor
    (N,) true where an instance is removed.

Examples
--------
>>> import torch
>>> import headcount as hc
>>> distance, votes, bag = torch.tensor([0.1, 3.0, 5.0]), torch.tensor([0, 1, 1]), torch.tensor([0, 0, 0])
>>> hc.dissenters(distance, votes, bag, label=torch.tensor([0]), removal=0.5).tolist()
[False, False, True]
""",
}
