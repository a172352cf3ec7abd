"""What classifiers with routing are built of: votes, laws of parents, layers of capsules."""
