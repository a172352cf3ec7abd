"""Training objectives: Pyro ELBOs that also work with torch optimizers."""

from capsule_zoo.inference.objectives.base import Objective
from capsule_zoo.inference.objectives.importance_weighted import ImportanceWeightedELBO
from capsule_zoo.inference.objectives.score_function import ScoreFunctionELBO
from capsule_zoo.inference.objectives.sleep_phase import SleepPhase
from capsule_zoo.inference.objectives.spread_loss import SpreadLoss
from capsule_zoo.inference.objectives.stacked_capsules import StackedCapsuleObjective, TermHistory
from capsule_zoo.inference.objectives.summed_presences import SummedPresences
from capsule_zoo.inference.objectives.thermodynamic import ThermodynamicObjective
from capsule_zoo.inference.objectives.wake_sleep import ReweightedWakeSleep, WakeSleep

__all__ = [
    "ImportanceWeightedELBO",
    "Objective",
    "ReweightedWakeSleep",
    "ScoreFunctionELBO",
    "SleepPhase",
    "SpreadLoss",
    "StackedCapsuleObjective",
    "SummedPresences",
    "TermHistory",
    "ThermodynamicObjective",
    "WakeSleep",
]
