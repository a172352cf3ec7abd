"""Item response: abilities of students and difficulties of questions, from answers.

Rasch 1960, "Probabilistic Models for Some Intelligence and Attainment Tests".
"""

import pyro
import pyro.distributions as dist
import torch

generator = torch.Generator().manual_seed(3)
ability = torch.randn(20, 1, generator=generator)
difficulty = torch.randn(5, generator=generator)
answers = torch.bernoulli((ability - difficulty).sigmoid(), generator=generator)


def program(answers):
    students, items = answers.shape
    with pyro.plate("items", items, dim=-1):
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, 1.0))
    with pyro.plate("students", students, dim=-2):
        ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
        with pyro.plate("answers", items, dim=-1):
            logits = ability - difficulty
            pyro.sample("correct", dist.Bernoulli(logits=logits), obs=answers)


def example():
    return program, (answers,), {}
