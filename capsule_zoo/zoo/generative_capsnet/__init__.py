"""The entry of generative capsnet, its figures and its view."""
