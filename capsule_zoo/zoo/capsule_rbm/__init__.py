"""The entry of capsule RBMs."""
