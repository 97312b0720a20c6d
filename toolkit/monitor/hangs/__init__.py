"""A run that makes no progress: what each rank says, and what it means. Pure but for taking stacks."""
