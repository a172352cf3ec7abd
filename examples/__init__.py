"""Eight textbook programs, written for Pyro alone; `example()` returns program and data.

>>> program, arguments, observed = eight_schools.example()
>>> print(examine(program, *arguments, observed=observed))
"""
