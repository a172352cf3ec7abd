"""Any Pyro program in, what each guide loses in nats out; see `examine`."""
