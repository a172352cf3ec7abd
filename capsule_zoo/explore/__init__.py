"""An explorer of models: move objects, parts or requests by hand, and see the image follow.

In a notebook, with the extra `explore` (`capsule-zoo explore part-whole-mnist` writes one):

>>> from capsule_zoo.explore.explorer import Explorer
>>> Explorer.of("part-whole-mnist")

Without widgets, use the state and its pictures:

>>> from capsule_zoo.explore.sources import view_of
>>> view = view_of(load("part-whole-mnist"))
>>> view.read(images[:1])
>>> view.change(3, "angle", 45.0)
>>> view.painted()                                        # (1, C, H, W)

Nothing is imported here, so that the command line does not wait for torch.
"""
