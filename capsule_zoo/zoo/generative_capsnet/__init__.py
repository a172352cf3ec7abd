"""The entries of generative CapsNets, and their view."""
