"""An explorer of models: move objects, parts or requests by hand, and see the image follow.

In a notebook, with the extra `explore` (`capsule-zoo explore part-whole-mnist` writes one):

>>> from capsule_zoo.explore.explorer import Explorer
>>> Explorer.of("part-whole-mnist")

Nothing is imported here, so that the command line does not wait for torch.
"""
