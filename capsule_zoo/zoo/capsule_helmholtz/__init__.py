"""The entry of capsule Helmholtz machines."""
