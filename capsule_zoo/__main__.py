"""`python -m capsule_zoo`: the command line."""

from capsule_zoo.cli import main

main()
