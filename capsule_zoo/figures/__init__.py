"""Pictures of trained entries."""
