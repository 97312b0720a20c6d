"""What tests and users' tests share: ranks spawned once, tiny models, parity runs."""
