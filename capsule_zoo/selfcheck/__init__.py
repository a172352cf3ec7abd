"""The statistical self-check of the zoo; see `capsule_zoo.selfcheck.checks`."""
